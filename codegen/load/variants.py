"""The reader of `variants:`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from codegen.analysis import pruning
from codegen.analysis.left_out import split_left_out
from codegen.analysis.scalar_limits import divisors, narrowed, vanishing, within
from codegen.analysis.schedule import keeps_nothing
from codegen.ir import expr
from codegen.ir.derive import ZERO, derivative
from codegen.ir.expr import INDEX_NAMES, LENGTH_NAMES, Expr, ScalarType, TensorSpec, Type
from codegen.ir.parse import Macro, Scope, parse, parse_example
from codegen.ir.printers import FormulaPrinter
from codegen.load.archs import read_archs
from codegen.load.grammar import (
    DECAY,
    DIM_SIZE,
    DIMS,
    DOC,
    DROPOUT,
    DTYPE,
    EXAMPLE,
    GRAD,
    MASK,
    PRUNE,
    SCALAR_LIMITS,
    SCALAR_RANGES,
    SCALAR_TYPE,
    SCALAR_VALUES,
    SCALARS,
    SCORE,
    SINK,
    TENSOR,
    TENSORS,
    VARIANT,
    VARIANTS,
)
from codegen.load.shapes import Expression, Flag
from codegen.load.yaml_tree import Document, Item, one_line
from codegen.spec import dims
from codegen.spec.model import TENSOR_DTYPES, ArchSpec, ScalarSpec, Variant
from codegen.spec.names import argument_problem, dim_problem, variant_problem
from codegen.util.errors import ExprError

FLOAT_DTYPES = tuple(dtype for dtype in TENSOR_DTYPES if "float" in dtype)


def read_variants(
    doc: Document, item: Item, macros: Mapping[str, Macro], archs: Mapping[str, ArchSpec]
) -> dict[str, Variant]:
    """Every variant without problems, in file order.

    `macros` are the named masks and scores in scope, `archs` the block sizes that a variant may override.
    """
    variants: dict[str, Variant] = {}
    spelled: dict[str, str] = {}
    before = len(doc.problems)
    entries = VARIANTS.items(doc, item)
    for name, entry in entries.items():
        _check_name(doc, name, entry, spelled)
        variant = _VariantReader(doc, name, entry, macros, archs, frozenset(entries)).read()
        if variant is not None:
            variants[name] = variant
        if variant is not None and variant.pruned:
            variants[variant.pruned] = pruning.companion(variant)
    if not variants and len(doc.problems) == before:
        doc.note(item, "needs at least one variant, got none")
    return variants


def _check_name(doc: Document, name: str, item: Item, spelled: dict[str, str]) -> None:
    """`spelled` maps the lower-case names met so far to their spelling."""
    problem = variant_problem(name)
    twin = spelled.setdefault(name.lower(), name)
    if problem is None and twin != name:
        problem = f"differs from '{twin}' in case only, and some file systems ignore case; choose another name"
    if problem is not None:
        doc.note(item, problem)


class _VariantReader:
    """Reads one variant."""

    def __init__(
        self,
        doc: Document,
        name: str,
        item: Item,
        macros: Mapping[str, Macro],
        archs: Mapping[str, ArchSpec],
        variants: Collection[str],
    ) -> None:
        """`variants`: the names of all of them, which no expression may use."""
        self.doc = doc
        self.name = name
        self.item = item
        self.macros = macros
        self.archs = archs
        self.variants = variants
        self.keys = VARIANT.items(doc, item)
        self.tensor_items = TENSORS.items(doc, self.keys["tensors"]) if "tensors" in self.keys else {}
        self.scalar_items = SCALARS.items(doc, self.keys["scalars"]) if "scalars" in self.keys else {}

    def read(self) -> Variant | None:
        """The variant, None if it has problems."""
        tensors, scalars = self._tensors(), self._scalars()
        tensors = self._with_computed_dims(tensors, {s.name: s.type for s in scalars.values()})
        self._check_names(tensors)
        scope = Scope(tensors=tensors, scalars={s.name: s.type for s in scalars.values()}, macros=self.macros)
        mask, mask_text = self._expression("mask", MASK, scope, Type.BOOL)
        if mask is not None and keeps_nothing(mask):
            self.doc.note(self.keys["mask"], f"no query attends to any key: {mask_text.strip()!r} is always false")
        score, score_text = self._expression("score", SCORE, scope, Type.FLOAT)
        if score is not None and expr.is_const(score, -math.inf):
            self.doc.note(self.keys["score"], f"no query attends to any key: {score_text.strip()!r} is -inf")
        mask, score = self._without_left_out(mask, score)
        doc = DOC.read(self.doc, self.keys["doc"]) if "doc" in self.keys else None
        sink, decay, dropout = (
            self._flag(shape, self.keys, key) for key, shape in (("sink", SINK), ("decay", DECAY), ("dropout", DROPOUT))
        )
        own_archs = self._own_archs()
        if not self.doc.has_problem_in(self.item):
            self._check_used(tensors, mask, score)
            scalars = self._limited(scalars, [e for e in (mask, score) if e is not None])
        if self.doc.has_problem_in(self.item):
            return None
        variant = Variant(
            name=self.name,
            archs=own_archs,
            line=self.item.line,
            entry=f"{self.name}: {one_line(self.item, leave_out=('doc', 'archs'))}",
            doc=(doc or "").strip(),
            mask=None if mask == expr.TRUE else mask,
            score=score,
            mask_text=mask_text,
            score_text=score_text,
            tensors=tensors,
            scalars=scalars,
            sink=sink,
            decay=decay,
            dropout=dropout,
        )
        return self._with_pruning(variant) if self._flag(PRUNE, self.keys, "prune") else variant

    def _with_pruning(self, variant: Variant) -> Variant | None:
        """The variant with the name of its companion; None if it cannot have one."""
        name = pruning.companion_name(variant.name)
        problem = pruning.refusal(variant)
        if name in self.variants:
            problem = f"its companion needs the name '{name}', which another entry has; rename that"
        elif pruning.FIRST_KEY in {*variant.tensors, *variant.scalars}:
            problem = (
                f"its companion needs the argument name '{pruning.FIRST_KEY}', which the entry declares; rename it"
            )
        if problem:
            self.doc.note(self.keys["prune"], problem)
            return None
        return replace(variant, pruned=name)

    def _flag(self, shape: Flag, keys: Mapping[str, Item], key: str) -> bool:
        return key in keys and shape.read(self.doc, keys[key])

    def _expression(self, key: str, shape: Expression, scope: Scope, want: Type) -> tuple[Expr | None, str]:
        """The expression and its text; None and "" if the variant has none."""
        text = shape.read(self.doc, self.keys[key]) if key in self.keys else None
        if text is None:
            return None, ""
        try:
            return parse(text, scope, want), text
        except ExprError as error:
            unreadable = {*self.tensor_items, *self.scalar_items} - {*scope.tensors, *scope.scalars}
            # A declaration with a problem is not in scope, and the expression is not to blame for reading it.
            if error.unknown not in unreadable:
                self.doc.note_in(self.keys[key], error.column, self._with_remedy(error))
            return None, text

    def _with_remedy(self, error: ExprError) -> str:
        """The message of a bad expression, with its own remedy where a variant is taken for a mask or score."""
        if error.unknown not in self.variants or error.indexed:
            return str(error)
        place = "".join(f"in '{name}': " for name in error.within)
        remedy = "to use its mask or score in another, name that under masks: or scores:"
        return f"{place}'{error.unknown}' is a variant, and no mask or score; {remedy} (column {error.column})"

    def _without_left_out(self, mask: Expr | None, score: Expr | None) -> tuple[Expr | None, Expr | None]:
        """Mask and score, after the pairs that the score leaves out by -inf are moved into the mask."""
        if score is None or self.doc.has_problem_in(self.item):
            return mask, score
        try:
            found = split_left_out(score)
        except ExprError as error:
            self.doc.note(self.keys["score"], error.message)
            return mask, score
        if found.keep == expr.TRUE:
            return mask, found.score
        kept = found.keep if mask is None else expr.logical_and(mask, found.keep)
        if keeps_nothing(kept):
            self.doc.note(self.keys["score"], "no query attends to any key: the mask or -inf leaves out every pair")
        return kept, None if found.score == expr.float_var(expr.SCORE) else found.score

    # ------------------------------------------------------------------------------------------- tensors and scalars

    def _scalars(self) -> dict[str, ScalarSpec]:
        read = (self._scalar(name, item) for name, item in self.scalar_items.items())
        return {scalar.name: scalar for scalar in read if scalar is not None}

    def _scalar(self, name: str, item: Item) -> ScalarSpec | None:
        """Read the declaration of a scalar: its type alone, or a mapping of its type and range."""
        if item.kind != "mapping":
            kind = SCALAR_TYPE.read(self.doc, item)
            return None if kind is None else ScalarSpec(name=name, type=ScalarType(kind))
        before = len(self.doc.problems)
        keys = SCALAR_RANGES[ScalarType.INT].items(self.doc, item)
        kind = SCALAR_TYPE.read(self.doc, keys["type"]) if "type" in keys else None
        if kind is None:
            return None
        type_ = ScalarType(kind)
        values = {key: SCALAR_VALUES[type_].read(self.doc, keys[key]) for key in SCALAR_LIMITS if key in keys}
        low, high, example = values.get("min"), values.get("max"), values.get("example")
        if low is not None and high is not None and low > high:
            self.doc.note(keys["max"], f"must be at least min, {low}, got {high}")
        elif example is not None and not (low is None or low <= example):
            self.doc.note(keys["example"], f"must be at least min, {low}, got {example}")
        elif example is not None and not (high is None or example <= high):
            self.doc.note(keys["example"], f"must be at most max, {high}, got {example}")
        if len(self.doc.problems) > before:
            return None
        return ScalarSpec(name=name, type=type_, minimum=low, maximum=high, example=example)

    def _own_archs(self) -> dict[str, ArchSpec]:
        """The architectures whose block sizes the variant changes, each completed from the shared ones."""
        if "archs" not in self.keys:
            return {}
        merged = read_archs(self.doc, self.keys["archs"], self.archs)
        return {name: arch for name, arch in merged.items() if arch != self.archs.get(name)}

    def _tensors(self) -> dict[str, TensorSpec]:
        read = (self._tensor(name, item) for name, item in self.tensor_items.items())
        return {tensor.name: tensor for tensor in read if tensor is not None}

    def _with_computed_dims(
        self, tensors: Mapping[str, TensorSpec], scalars: Mapping[str, ScalarType]
    ) -> dict[str, TensorSpec]:
        free = dims.own_names(tensors.values(), scalars)
        found = {}
        for name, tensor in tensors.items():
            try:
                found[name] = dims.with_computed(tensor, scalars, free)
            except ExprError as error:
                self.doc.note_below(self.item, f"tensors.{name}.dims", str(error))
        return found

    def _tensor(self, name: str, item: Item) -> TensorSpec | None:
        before = len(self.doc.problems)
        keys = TENSOR.items(self.doc, item)
        sizes = [self._dim(dim) for dim in DIMS.items(self.doc, keys["dims"])] if "dims" in keys else []
        dtype = DTYPE.read(self.doc, keys["dtype"]) if "dtype" in keys else DTYPE.default
        grad = self._flag(GRAD, keys, "grad")
        if grad and dtype is not None and dtype not in FLOAT_DTYPES:
            self.doc.note(keys["grad"], f"a gradient needs a dtype of {' '.join(FLOAT_DTYPES)}, got {dtype}")
        if dtype is None or len(self.doc.problems) > before:
            return None
        tensor = TensorSpec(name=name, dims=tuple(d for d in sizes if d is not None), dtype=dtype, grad=grad)
        return replace(tensor, example=self._example(keys["example"], tensor)) if "example" in keys else tensor

    def _example(self, item: Item, tensor: TensorSpec) -> Expr | None:
        text = EXAMPLE.read(self.doc, item)
        if text is None:
            return None
        try:
            return parse_example(text, tensor)
        except ExprError as error:
            self.doc.note_in(item, error.column, str(error))
            return None

    def _dim(self, item: Item) -> str | int | None:
        if item.kind == "int":
            return DIM_SIZE.read(self.doc, item)
        if item.kind != "str":
            rule = f"a dim must be one of {' '.join(INDEX_NAMES)}, a free name, an integer or an expression of integers"
            self.doc.note(item, f"{rule}, got {item.got}")
            return None
        name = str(item.node.value).strip()
        if not name.isidentifier() or name in LENGTH_NAMES:
            return name  # read where the scalars are known
        problem = dim_problem(name) if name not in INDEX_NAMES else None
        if problem is not None:
            self.doc.note(item, problem)
        return name

    # ------------------------------------------------------------------------------------------ rules across entries

    def _limited(self, scalars: Mapping[str, ScalarSpec], roots: Collection[Expr]) -> dict[str, ScalarSpec]:
        """The scalars, with narrower ranges for those that sums hold beside others, and without 0 if they divide."""
        found = dict(scalars)
        for name in sorted(divisors(roots) & scalars.keys()):
            found[name] = replace(scalars[name], divides=scalars[name].has(0))
            if found[name].divides and scalars[name].example == 0:
                self.doc.note(self.scalar_items[name], "integers are divided by it, so its example must not be 0")
        for divisor in vanishing(scalars, roots):
            text = FormulaPrinter().text(divisor)
            of_scalars = expr.names(divisor) & scalars.keys()
            remedy = "limit its scalars by min or max" if of_scalars else f"write '{text} + 1', or another divisor"
            message = f"integers are divided by {text!r}, which may be 0: {remedy}"
            self.doc.note(self.item, message)
        for name, most in narrowed(scalars, roots).items():
            scalar = found[name] = within(found[name], most)
            low, high, example = scalar.minimum, scalar.maximum, scalar.example
            is_empty = low is not None and high is not None and low > high
            if is_empty or (example is not None and abs(example) > most):
                message = f"a sum has several scalars or a factor, so this one must lie between -{most} and {most}"
                self.doc.note(self.scalar_items[name], message)
        return found

    def _check_names(self, tensors: Mapping[str, TensorSpec]) -> None:
        """Check that the names of tensors, scalars and free sizes are legal and different."""
        for name, item in [*self.tensor_items.items(), *self.scalar_items.items()]:
            problem = argument_problem(name, self.macros)
            if problem is None and item is self.scalar_items.get(name) and name in self.tensor_items:
                problem = f"'{name}' is declared under tensors already; choose another name"
            if problem is not None:
                self.doc.note(item, problem)
        for tensor in tensors.values():
            for dim in tensor.dims:
                if dim in self.tensor_items:
                    message = f"the free size '{dim}' has the name of a declared argument; choose another name"
                    self.doc.note_below(self.item, f"tensors.{tensor.name}.dims", message)

    def _check_used(self, tensors: Mapping[str, TensorSpec], mask: Expr | None, score: Expr | None) -> None:
        """Check that mask or score reads every argument, and that the score depends on every tensor with `grad`."""
        expressions = [e for e in (mask, score) if e is not None]
        in_score: dict[str, bool] = {}  # tensor that the score reads -> whether its derivative is other than zero
        for load in expr.loads(score) if score is not None else ():
            moves = score is not None and derivative(score, load) != ZERO
            in_score[load.tensor] = in_score.get(load.tensor, False) or moves
        read = {load.tensor for load in expr.loads(*expressions)}.union(*map(expr.names, expressions))
        read |= dims.names_of(list(tensors.values()))
        for name, item in [*self.tensor_items.items(), *self.scalar_items.items()]:
            if name not in read:
                self.doc.note(item, "neither mask nor score reads it; read it or remove it")
            elif name in tensors and tensors[name].grad and name not in in_score:
                message = "only the mask reads this tensor, and a mask has no gradient; remove 'grad'"
                self.doc.note_below(self.item, f"tensors.{name}.grad", message)
            elif name in tensors and tensors[name].grad and not in_score[name]:
                message = (
                    "the score's derivative with respect to it is zero: only an index, a condition, int(...) "
                    "or a rounding reads it; remove 'grad'"
                )
                self.doc.note_below(self.item, f"tensors.{name}.grad", message)
