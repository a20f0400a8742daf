"""From expressions to the statements of a kernel: what is computed once per program, per vector or per tile, and under
which local names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from codegen.analysis.call_modes import Mode
from codegen.analysis.indexing import DECAY, POSITIONS, TOKENS, exact_index, needs_clamp
from codegen.ir import expr
from codegen.ir.expr import Expr, Level, Load, Op, TensorSpec, Type, Var, int_var, level
from codegen.ir.printers import TRITON_HELPERS, TritonPrinter

_SUFFIX = {Level.UNIFORM: "val", Level.QUERY: "q", Level.KEY: "kv", Level.TILE: "qk"}


_STARTS = ("start_n", "row_start")
"""Where a block of the loop begins, by the axis of queries: one number, and another in each turn."""


@dataclass
class Emitter:
    """Lowers expressions for one kernel.

    `query_axis` is the axis of query rows in its tiles. What does not change inside the loop goes to `prologue`; what
    changes with the query head, in a kernel that walks over the heads of a group, to `head_prologue`. `vectors`: see
    `TritonPrinter`.
    """

    tensors: Mapping[str, TensorSpec]
    query_axis: int
    mode: Mode = Mode.DENSE
    walks_heads: bool = False
    vectors: frozenset[str] = frozenset()
    prologue: list[str] = field(default_factory=list)
    head_prologue: list[str] = field(default_factory=list)
    helpers: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._hoisted: dict[Expr, str] = {}
        self._taken: set[str] = set()
        self._in_loops: set[str] = set()
        self._whole = False
        self._printer = TritonPrinter(query_axis=self.query_axis, vectors=self.vectors)

    @property
    def _vector_in_loop(self) -> Level:
        """The vectors that change in the loop: keys where a program owns query rows, and the other way round."""
        return Level.KEY if self.query_axis == 0 else Level.QUERY

    def block(self, *roots: Expr | None, whole: bool = False) -> tuple[list[str], list[str]]:
        """Statements for the loop body, in order, and the text of each root as a tile ('' for None).

        In a `whole` block every key lies inside the sequence, so it may index a tensor as it is.
        """
        self._whole = whole
        wanted = [r for r in roots if r is not None]
        printer = self._new_printer()
        self._printer = printer
        statements: list[str] = []
        taken = set(self._taken)
        for node in _worth_naming(wanted):
            if node not in printer.named:
                self._define(node, printer, statements, taken)
        self._note_helpers(wanted)
        texts = [printer.shaped(r, tile=True) if r is not None else "" for r in roots]
        return statements, texts

    def own_shape(self, roots: Iterable[Expr]) -> list[str]:
        """The texts of values in the shape they have: one number per program, or a vector. Tensor reads are hoisted."""
        wanted = list(roots)
        self.block(*wanted)
        printer = self._new_printer()
        return [printer.shaped(r, tile=False) for r in wanted]

    def _new_printer(self) -> TritonPrinter:
        return TritonPrinter(
            query_axis=self.query_axis, vectors=self.vectors, named=dict(self._hoisted), address=self._address
        )

    def place(self, load: Load, buffer: str, *, tile: bool) -> str:
        """The offset of an element in a buffer of the tensor's shape, in the names of the latest block."""
        outer, self._printer.in_tile = self._printer.in_tile, tile
        offsets = self._offsets(load, self._printer, buffer, narrow=False)
        self._printer.in_tile = outer
        return " + ".join(offsets)

    def _define(self, node: Expr, printer: TritonPrinter, statements: list[str], taken: set[str]) -> None:
        own = level(node)
        in_loop = own in (Level.TILE, self._vector_in_loop) or _STARTS[self.query_axis] in expr.names(node)
        # What is hoisted lives beside the statements of every block of the loop, those emitted before included.
        name = _fresh(_stem(node), taken | self._taken | (set() if in_loop else self._in_loops))
        line = f"{name} = {printer.shaped(node, tile=own is Level.TILE)}"
        printer.named[node] = name
        taken.add(name)
        if in_loop:
            statements.append(line)
            self._in_loops.add(name)
            return
        self._taken.add(name)
        self._hoisted[node] = name
        target = self.head_prologue if self.walks_heads and expr.reads_head(node) else self.prologue
        target.append(line)

    def _note_helpers(self, roots: Sequence[Expr]) -> None:
        for root in roots:
            for node in expr.walk(root):
                if isinstance(node, Op) and (node.op == "tanh" or node.op in TRITON_HELPERS):
                    self.helpers.add(node.op)
                if isinstance(node, Load) and needs_clamp(self.tensors, node):
                    self.helpers.add("clamp_index")
                if isinstance(node, Load) and level(node) is Level.TILE:
                    self.helpers.add("load_pairs")

    def _address(self, e: Load, printer: TritonPrinter) -> str:
        # 64-bit arithmetic on tiles costs twice the instructions; each call checks that such an axis fits 32 bits.
        terms = [f"{e.tensor}_ptr", *self._offsets(e, printer, e.tensor, narrow=True)]
        cast = ".to(tl.float32)" if self.tensors[e.tensor].dtype in ("float16", "bfloat16") else ""
        if level(e) is Level.TILE:
            return f"load_pairs({' + '.join(terms)}, PTX){cast}"
        return f"tl.load({' + '.join(terms)}){cast}"

    def _offsets(self, e: Load, printer: TritonPrinter, strides: str, *, narrow: bool) -> list[str]:
        """The offset along each axis; those that differ between the pairs of a tile come last, and only they have 32
        bits if `narrow`."""
        offsets, last = [], []
        for axis, index in enumerate(e.indices):
            if exact_index(self.tensors, e.tensor, axis, index):
                assert isinstance(index, Var)
                offsets.append(f"{index.name} * stride_{strides}_{axis}")
                continue
            first, text = self._position(e.tensor, axis, index, printer)
            if e.tensor == DECAY.name:  # dense, so a position is its offset
                offsets += [*first, text]
                continue
            offsets += [f"{start} * stride_{strides}_{axis}" for start in first]
            if level(index) is Level.TILE:
                last.append(f"{text}.to(tl.{'int32' if narrow else 'int64'}) * stride_{strides}_{axis}")
            else:
                # A position times an unknown stride may pass 32 bits.
                offsets.append(f"{text}.to(tl.int64) * stride_{strides}_{axis}")
        return [*offsets, *last]

    def _position(self, tensor: str, axis: int, index: Expr, printer: TritonPrinter) -> tuple[list[str], str]:
        """Where this sequence begins on an axis along which packed ones follow each other, and the clamped index."""
        dim, text = self.tensors[tensor].dims[axis], printer.text(index)
        # In a whole block every key lies inside the sequence.
        inside = self._whole and self.query_axis == 0 and index in _KEYS and dim in POSITIONS
        if self.mode is not Mode.PACKED or dim not in TOKENS:
            return [], text if inside else f"clamp_index({text}, {tensor}_size_{axis})"
        if dim == "q_idx":
            return ["q_start"], f"clamp_index(tl.maximum({text}, 0) - q_shift, q_len)"
        return ["kv_start"], text if inside else f"clamp_index({text}, kv_len)"


_KEYS = (int_var("kv_idx"), int_var("cols"))


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
    """Tensor reads, and what is used twice and costs more than a name; innermost first."""
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
