"""From expressions to the statements of a kernel: what is computed once per program, per vector or per tile, and under
which local names.

A value has a shape: one number, a vector over query rows or keys, or a tile. Vectors are broadcast where a tile is
computed, never earlier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from codegen.analysis.affine import MOST_POSITION
from codegen.analysis.call_modes import KEY_IDS, QUERY_IDS, Mode
from codegen.analysis.grids import GridSide, grid_axes, shared_runs
from codegen.analysis.indexing import DECAY, POSITIONS, TOKENS, WIDE_INDICES, exact_index, needs_clamp
from codegen.ir import expr
from codegen.ir.expr import COMPARISONS, Const, Expr, Level, Load, Op, TensorSpec, Type, Var, int_var, level
from codegen.plan.code.statements import Assign
from codegen.plan.code.tree import (
    SUM,
    ZERO,
    Broadcast,
    Cast,
    Code,
    DType,
    Infix,
    Literal,
    Name,
    Prefix,
    builtin,
    call,
    grouped,
    product,
    total,
)

INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "eq": "==",
    "ne": "!=",
    "bitor": "|",
    "bitxor": "^",
    "bitand": "&",
    "shl": "<<",
    "shr": ">>",
    "and": "&",
    "or": "|",
}
"""Operation of the IR -> operator of the kernel language."""

HELPERS = {
    "floordiv": "floor_div",
    "floordiv of any": "floor_div_any",
    "mod": "floor_mod",
    "round": "round_even",
    "log1p": "log1p",
    "tan": "tan",
}
"""Operation -> the helper that a kernel file has if it uses the operation; `tanh` has a helper of its own name."""

_RENAMED = {"min": "minimum", "max": "maximum"}

_SUFFIX = {Level.UNIFORM: "val", Level.QUERY: "q", Level.KEY: "kv", Level.TILE: "qk"}

_STARTS = ("start_n", "row_start")
"""The start of the loop's block, by the axis of queries: a number that changes in each iteration."""

_KEYS = (int_var("kv_idx"), int_var("cols"))


def _operation_of(e: Op) -> str:
    """The operation of a node, a key of `HELPERS` if it has a helper. A tensor's element may be any integer, and so may
    what was a float, or what is counted from a literal beyond all positions; positions and scalars are far smaller."""
    is_any = e.op == "floordiv" and any(map(_may_be_any, expr.walk(e.args[0])))
    return "floordiv of any" if is_any else e.op


def _may_be_any(e: Expr) -> bool:
    """True if a sum that has this operand may lie anywhere in the range of 32 bits."""
    if isinstance(e, Const):
        return e.type is Type.INT and abs(e.value) > MOST_POSITION
    return isinstance(e, Load) or (isinstance(e, Op) and e.op == "int")


@dataclass
class Lowering:
    """Lowers expressions for one kernel.

    `query_axis` is the axis of query rows in its tiles: 0 in the forward and dq, 1 in dkdv, whose tiles are transposed.
    Loop invariants go to `prologue`; those that change with the query head, in a kernel that loops over the heads of a
    group, to `head_prologue`. `vectors` names values that count as uniform but are vectors: the extremes of several
    blocks. `helpers` gathers the helpers that the kernel file must define.
    """

    tensors: Mapping[str, TensorSpec]
    query_axis: int
    mode: Mode = Mode.DENSE
    walks_heads: bool = False
    vectors: frozenset[str] = frozenset()
    prologue: list[Assign] = field(default_factory=list)
    head_prologue: list[Assign] = field(default_factory=list)
    helpers: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._hoisted: dict[Expr, str] = {}
        self._taken: set[str] = set()
        self._in_loops: set[str] = set()
        self._whole = False
        self._named: dict[Expr, str] = {}

    @property
    def _vector_in_loop(self) -> Level:
        """The level of vectors that change in the loop: keys if a program owns query rows, else rows."""
        return Level.KEY if self.query_axis == 0 else Level.QUERY

    def block(self, *roots: Expr | None, whole: bool = False) -> tuple[list[Assign], list[Code | None]]:
        """The statements of a loop body, in order, and the code of each root as a tile (None for None).

        In a `whole` block every key lies inside the sequence, so it may index a tensor as it is.
        """
        self._whole = whole
        wanted = [r for r in roots if r is not None]
        self._named = dict(self._hoisted)
        statements: list[Assign] = []
        taken = set(self._taken)
        for node in _worth_naming(wanted):
            if node not in self._named:
                self._define(node, statements, taken)
        self._note_helpers(wanted)
        return statements, [None if r is None else self._condition(r, tile=True) for r in roots]

    def own_shape(self, roots: Iterable[Expr]) -> list[Code]:
        """The code of values in the shape they have: one number per program, or a vector. Tensor reads are hoisted."""
        wanted = list(roots)
        self.block(*wanted)
        in_block, self._named = self._named, dict(self._hoisted)
        try:
            return [self._condition(r, tile=False) for r in wanted]
        finally:
            self._named = in_block

    def of_block(self, root: Expr) -> tuple[list[Assign], Code]:
        """The statements of a loop body that compute a vector which changes in the loop, and the vector's code."""
        statements, _ = self.block(root)
        return statements, self._condition(root, tile=False)

    def offset(self, load: Load, buffer: str, *, tile: bool) -> Code:
        """The offset of an element in a buffer of the tensor's shape, in the names of the latest block."""
        return total(self._offsets(load, buffer, tile=tile))

    def grid_extremes(self, load: Load, own: GridSide, others: GridSide) -> Code:
        """The call that finds a grid's smallest and largest element. `own`: the side whose ends are numbers, in a
        program that serves one block of that side; the ends of `others` are vectors."""
        axes = own.axis, others.axis
        indices = [index for axis, index in enumerate(load.indices) if axis not in axes]
        self._note_helpers([*indices, own.first, own.last, others.first, others.last])
        self.helpers.add("grid_extremes")
        if needs_clamp(self.tensors, load, without=axes):
            self.helpers.add("clamp_index")
        base = [Name(f"{load.tensor}_ptr"), *self._offsets(load, load.tensor, tile=False, without=axes)]
        args: list[Code] = [total(base)]
        for side in (own, others):
            args += [self._code(side.first, tile=False), self._code(side.last, tile=False)]
            args += [Name(f"{load.tensor}_size_{side.axis}"), Name(f"stride_{load.tensor}_{side.axis}")]
        return call("grid_extremes", *args)

    def _define(self, node: Expr, statements: list[Assign], taken: set[str]) -> None:
        own = level(node)
        in_loop = own in (Level.TILE, self._vector_in_loop) or _STARTS[self.query_axis] in expr.names(node)
        # A hoisted value is visible in every block of the loop, also in blocks that were lowered before it.
        name = _fresh(_stem(node), taken | self._taken | (set() if in_loop else self._in_loops))
        statement = Assign(
            targets=(name,),
            values=(self._condition(node, tile=own is Level.TILE),),
            level=own,
            type=node.type,
            of_tokens=isinstance(node, Load) and node.tensor in (QUERY_IDS.name, KEY_IDS.name),
        )
        self._named[node] = name
        taken.add(name)
        if in_loop:
            statements.append(statement)
            self._in_loops.add(name)
            return
        self._taken.add(name)
        self._hoisted[node] = name
        target = self.head_prologue if self.walks_heads and expr.reads_head(node) else self.prologue
        target.append(statement)

    def _note_helpers(self, roots: Sequence[Expr]) -> None:
        for root in roots:
            for node in expr.walk(root):
                if isinstance(node, Op) and (node.op == "tanh" or node.op in HELPERS):
                    self.helpers.add(_operation_of(node))
                if isinstance(node, Load) and needs_clamp(self.tensors, node):
                    self.helpers.add("clamp_index")
                if isinstance(node, Load) and level(node) is Level.TILE:
                    self.helpers.add("load_grid" if self._is_grid(node) else "load_pairs")

    # ------------------------------------------------------------------------------------------------- expressions

    def _code(self, e: Expr, *, tile: bool) -> Code:
        own = level(e)
        if tile and own in (Level.QUERY, Level.KEY):
            leading = (own is Level.QUERY) == (self.query_axis == 0)
            return Broadcast(self._code(e, tile=False), 0 if leading else 1)
        if e in self._named:
            return Name(self._named[e])
        if isinstance(e, Var):
            return Cast(Name(e.name), "int32") if e.name in WIDE_INDICES else Name(e.name)
        if isinstance(e, Const):
            return Literal(e.value)
        if isinstance(e, Load):
            return self._element(e, tile=tile)
        assert isinstance(e, Op)
        return self._operation(e, tile=tile)

    def _operation(self, e: Op, *, tile: bool) -> Code:
        if e.op == "not" and level(e) is Level.UNIFORM:
            # A comparison of scalars is a Python bool in Triton's interpreter: `~` would make an integer of it.
            return Infix("==", grouped(self._code(e.args[0], tile=tile), SUM), ZERO)
        if e.op in ("and", "or", "where"):
            chosen = e.args[1:] if e.op == "where" else e.args
            of_numbers = any(map(self._compares_numbers, chosen))
            lowered = self._condition if of_numbers else self._code
            args = [lowered(a, tile=tile) for a in e.args]
            return builtin("where", *args) if e.op == "where" else _joined(INFIX[e.op], args)
        args = [self._code(a, tile=tile) for a in e.args]
        if e.op in INFIX:
            return Infix(INFIX[e.op], *args)
        if e.op in ("not", "neg"):
            return Prefix("~" if e.op == "not" else "-", *args)
        return self._function(_operation_of(e), args)

    @staticmethod
    def _function(op: str, args: Sequence[Code]) -> Code:
        first, *others = args
        if op == "float":
            return Cast(first, "float32")
        if op == "int":
            # A scalar is a plain number in Triton's interpreter: no `.to`.
            return builtin("cast", first, DType("int32"))
        if op == "tanh":
            return call("tanh", first, Name("HARDWARE_TANH"))
        if op == "relu":
            return builtin("maximum", first, Literal(0.0))
        if op == "clamp":
            low, high = others
            return builtin("minimum", builtin("maximum", first, low), high)
        if op in HELPERS:
            return call(HELPERS[op], *args)
        return builtin(_RENAMED.get(op, op), *args)

    def _condition(self, e: Expr, *, tile: bool) -> Code:
        """The code of a value that may be combined with a tile. Triton's interpreter treats a comparison of two scalar
        floats as a float when it broadcasts it to a tile; `!= 0` makes it an integer."""
        code = self._code(e, tile=tile)
        return Infix("!=", grouped(code, SUM), ZERO) if self._compares_numbers(e) else code

    def _compares_numbers(self, e: Expr) -> bool:
        """True if `e` is one boolean for the whole program that comes from a comparison of floats."""
        if not isinstance(e, Op) or e.type is not Type.BOOL or e.op in ("and", "or", "not"):
            return False
        if level(e) is not Level.UNIFORM or self.vectors & expr.names(e):
            return False
        return any(isinstance(n, Op) and n.op in COMPARISONS and n.args[0].type is Type.FLOAT for n in expr.walk(e))

    # ------------------------------------------------------------------------------------------------------- tensors

    def _element(self, e: Load, *, tile: bool) -> Code:
        # 64-bit arithmetic on tiles costs twice the instructions; each call checks that offsets in tiles fit 32 bits.
        if self._is_grid(e):
            read = self._grid_elements(e)
        else:
            address = total([Name(f"{e.tensor}_ptr"), *self._offsets(e, e.tensor, tile=tile, narrow=True)])
            of_pairs = level(e) is Level.TILE
            read = call("load_pairs", address, Name("PTX")) if of_pairs else builtin("load", address)
        return Cast(read, "float32") if self.tensors[e.tensor].dtype in ("float16", "bfloat16") else read

    def _is_grid(self, e: Load) -> bool:
        """True if neighbouring pairs read the same element of a grid."""
        return bool(shared_runs(e, self.tensors, self.mode))

    def _grid_elements(self, e: Load) -> Code:
        """The elements of a grid for a tile: from the addresses of its rows on, at an index for each column."""
        axes = grid_axes(e)
        lengths = shared_runs(e, self.tensors, self.mode)
        assert axes is not None
        axis, length = axes[1 - self.query_axis], lengths[1 - self.query_axis]
        rows = [Name(f"{e.tensor}_ptr"), *self._offsets(e, e.tensor, tile=True, without=(axis,))]
        index = e.indices[axis]
        assert isinstance(index, Op)
        columns = self._code(index.args[0], tile=False), self._code(length, tile=False)
        place = Name(f"{e.tensor}_size_{axis}"), Name(f"stride_{e.tensor}_{axis}")
        return call("load_grid", total(rows), *columns, *place, Name("GRID_RUN"), Name("PTX"))

    def _offsets(
        self, e: Load, strides: str, *, tile: bool, narrow: bool = False, without: Sequence[int] = ()
    ) -> list[Code]:
        """The offset along each axis, but for the axes `without`. Offsets that differ between the pairs of a tile come
        last, and only they have 32 bits if `narrow`."""
        offsets: list[Code] = []
        last: list[Code] = []
        for axis, index in enumerate(e.indices):
            if axis in without:
                continue
            stride = Name(f"stride_{strides}_{axis}")
            exact = self._exact(e.tensor, axis, index, tile=tile)
            if exact is not None:
                offsets.append(product(exact, stride))
                continue
            starts, position = self._position(e.tensor, axis, index, tile=tile)
            if e.tensor == DECAY.name:  # dense, so a position is its offset
                offsets += [*starts, position]
                continue
            offsets += [product(start, stride) for start in starts]
            if level(index) is Level.TILE:
                last.append(product(Cast(position, "int32" if narrow else "int64"), stride))
            else:
                # A position times an unknown stride may exceed 32 bits.
                offsets.append(product(Cast(position, "int64"), stride))
        return [*offsets, *last]

    def _exact(self, tensor: str, axis: int, index: Expr, *, tile: bool) -> Code | None:  # noqa: ARG002  (paged)
        """The index along an axis that it cannot leave; None for other indices, which are clamped."""
        if not exact_index(self.tensors, tensor, axis, index):
            return None
        assert isinstance(index, Var)
        return Name(index.name)

    def _position(self, tensor: str, axis: int, index: Expr, *, tile: bool) -> tuple[list[Code], Code]:
        """The start of this sequence, on an axis of packed sequences that follow each other, and the clamped index."""
        dim, own = self.tensors[tensor].dims[axis], self._code(index, tile=tile)
        # In a whole block every key lies inside the sequence.
        inside = self._whole and self.query_axis == 0 and index in _KEYS and dim in POSITIONS
        if self.mode is not Mode.PACKED or dim not in TOKENS:
            return [], own if inside else call("clamp_index", own, Name(f"{tensor}_size_{axis}"))
        if dim == "q_idx":
            row = Infix("-", builtin("maximum", own, ZERO), Name("q_shift"))
            return [Name("q_start")], call("clamp_index", row, Name("q_len"))
        return [Name("kv_start")], own if inside else call("clamp_index", own, Name("kv_len"))


def _joined(symbol: str, args: Sequence[Code]) -> Code:
    first, *rest = args
    for arg in rest:
        first = Infix(symbol, first, arg)
    return first


def _stem(node: Expr) -> str:
    if isinstance(node, Load):
        return f"{node.tensor}_{_SUFFIX[level(node)]}"
    assert isinstance(node, Op)
    if node.op == "float" and isinstance(node.args[0], Var) and node.args[0].name in ("q_idx", "kv_idx"):
        return "q_pos" if node.args[0].name == "q_idx" else "kv_pos"
    return f"{node.op}_val" if node.op in expr.FLOAT_FUNCTIONS | expr.ROUNDINGS else "term"


def _fresh(stem: str, taken: set[str]) -> str:
    name, n = stem, 2
    while name in taken:
        name, n = f"{stem}_{n}", n + 1
    return name


def _worth_naming(roots: Sequence[Expr]) -> Iterator[Expr]:
    """Tensor reads, and float operations on vectors or tiles that are used more than once; innermost first."""
    uses: Counter[Expr] = Counter(roots)
    order: dict[Expr, None] = {}

    def visit(node: Expr) -> None:
        if node in order:
            return
        for child in expr.children(node):
            uses[child] += 1
            visit(child)
        order[node] = None

    for root in roots:
        visit(root)
    for node in order:
        repeated = isinstance(node, Op) and uses[node] > 1 and level(node) is not Level.UNIFORM
        if isinstance(node, Load) or (repeated and node.type is Type.FLOAT):
            yield node
