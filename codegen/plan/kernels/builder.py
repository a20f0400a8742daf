"""The variant-dependent code of one kernel: the statements of its loop bodies, masks, gradients and index vectors."""

from __future__ import annotations

from collections.abc import Sequence, Set

from codegen.analysis.call_modes import Mode
from codegen.analysis.distances import by_lag
from codegen.analysis.gradients import GradientKind, GradientTerm
from codegen.analysis.indexing import DECAY, PACKED_DECAY
from codegen.analysis.mask_ranges import RangedMask
from codegen.analysis.mask_runs import Limits
from codegen.ir import expr
from codegen.ir.expr import Expr, Level, Type
from codegen.plan.code.logits import Logits
from codegen.plan.code.lower import Lowering
from codegen.plan.code.statements import Assign
from codegen.plan.code.tree import (
    ZERO,
    Arange,
    Choice,
    Code,
    Group,
    Infix,
    Literal,
    Name,
    Prefix,
    added,
    builtin,
    product,
    total,
)
from codegen.plan.kernels.kernel import Block, BlockGradient, MaskRange, MaskRun
from codegen.plan.kernels.token_layout import token_layout
from codegen.spec.model import Variant

_ROWS, _KEYS, _Q_SHIFT, _DS = Name("rows"), Name("cols"), Name("q_shift"), Name("ds")


class KernelBuilder:
    """Builds the variant-dependent code of one kernel. `reads` gathers the names that its expressions read."""

    def __init__(
        self, variant: Variant, mode: Mode, logits: Logits, *, query_axis: int, walks_heads: bool = False
    ) -> None:
        decay = PACKED_DECAY if mode is Mode.PACKED else DECAY
        tensors = {**variant.tensors, **({decay.name: decay} if variant.decay else {})}
        self.variant = variant
        self.logits = logits
        self.by_position = not token_layout(mode).gives_positions
        self.key = token_layout(mode).keys
        self.reads: frozenset[str] = frozenset()
        self.lowering = Lowering(tensors=tensors, query_axis=query_axis, mode=mode, walks_heads=walks_heads)
        self.transposed = query_axis == 1

    def block(self, *, partial: bool, terms: Sequence[GradientTerm], backward: bool) -> Block:
        dscore = self.logits.dscore if backward else None
        keep, same, limits = self.masks() if partial else (None, None, Limits())
        # Gradients that are gathered pair by pair read the whole mask.
        ranged = RangedMask(rest=keep or expr.TRUE) if terms or dscore is not None else self.ranges(keep)
        keep = unless_true(ranged.rest)
        run = self._run(limits)
        locals_ = [t.local for t in terms]
        limited = [e for part in ranged.ranges for e in (part.distance, part.count)]
        roots = (self.logits.logit, dscore, keep, same, *limited, *locals_)
        statements, codes = self.lowering.block(*roots, whole=not partial)
        logit, dscore_code, keep_code, same_code, *codes = codes
        range_codes, local_codes = codes[: len(limited)], codes[len(limited) :]
        assert logit is not None
        offsets = [self._offsets(t) for t in terms]
        read = frozenset().union(*(expr.names(e) for e in roots if e is not None))
        self.reads |= read
        if partial and not self.transposed and run is None:
            read |= {self.key}  # for the bound of a cut block
        if self.logits.linear:
            logit = product(Name("qk"), Name("qk_scale"))
        elif expr.level(self.logits.logit) is not Level.TILE:
            # A score that reads neither the product nor both positions.
            logit = added(builtin("zeros_like", Name("qk")), logit)
        # An infinite derivative on a masked lane times its zero ds is NaN: such lanes are cleared once more.
        product_of_ds = None if dscore_code is None else product(_DS, _factor(dscore_code))
        return Block(
            statements=[*self.index_statements("q" if self.transposed else "kv", read), *statements],
            logit=logit,
            keep=keep_code,
            same=same_code,
            dscore=_where_kept(product_of_ds) if partial and product_of_ds is not None else product_of_ds,
            gradients=[
                BlockGradient(term=t, value=_gradient(t, code, partial), offset=offset, pair_offset=pair_offset)
                for t, code, (offset, pair_offset) in zip(terms, local_codes, offsets, strict=True)
            ],
            run=run,
            ranges=[
                MaskRange(distance=distance, count=count)
                for distance, count in zip(range_codes[::2], range_codes[1::2], strict=True)
                if distance is not None and count is not None
            ],
        )

    def ranges(self, keep: Expr | None) -> RangedMask:
        """The ranges of distances that the kernel takes out of the mask; here none."""
        return RangedMask(rest=keep or expr.TRUE)

    def masks(self) -> tuple[Expr | None, Expr | None, Limits]:
        """The parts of the mask that the kernel evaluates separately: which pairs it keeps, whether their segments are
        equal, and the limits of a run of positions. Here the first part is the whole mask."""
        return unless_true(self.variant.mask), None, Limits()

    def _run(self, limits: Limits) -> MaskRun | None:
        if not limits.found:
            return None
        self.reads |= frozenset().union(*(expr.names(e) for e in limits.all))
        codes = dict(zip(limits.all, self.lowering.own_shape(limits.all), strict=True))

        def along(e: Expr | None) -> Code | None:
            """A limit along the loop. A loop over rows counts rows, which are positions less the query offset."""
            if e is None:
                return None
            return Infix("-", codes[e], _Q_SHIFT) if self.transposed else codes[e]

        found = {name: getattr(limits, name) for name in ("first", "end", "gap_first", "gap_end")}
        return MaskRun(
            **{name: along(e) for name, e in found.items()},
            own=None if limits.own == expr.TRUE else codes[limits.own],
            vectors=frozenset(
                name for name, e in found.items() if e is not None and expr.level(e) is not Level.UNIFORM
            ),
        )

    def term(self, term: Expr) -> Code | None:
        """The part that the logits of a row, a key or a block share, in its own shape; None if it is 0."""
        if expr.is_const(term, 0):
            return None
        self.reads |= expr.names(term)
        return self.lowering.own_shape([term])[0]

    def index_statements(self, axis: str, reads: Set[str]) -> list[Assign]:
        """The rows (or keys) of a block and their positions, as far as `reads` names them."""
        if axis == "q":
            row = Infix("+", _ROWS, _Q_SHIFT)
            codes: dict[str, Code] = {"q_row": row, "q_idx": row}
        else:
            keys = Infix("+", Name("start_n"), Arange("BLOCK_N"))
            codes = {"cols": keys, "kv_idx": keys if self.by_position else _KEYS}
            if "kv_idx" in reads and not self.by_position:
                reads = {*reads, "cols"}
        own = Level.QUERY if axis == "q" else Level.KEY
        found = []
        for name, code in codes.items():
            if name in reads:
                given = name.endswith("_idx") and not self.by_position
                value = _given_position(axis, code) if given else code
                found.append(Assign(targets=(name,), values=(value,), level=own, type=Type.INT, of_tokens=given))
        return found

    def _offsets(self, term: GradientTerm) -> tuple[Code | None, Code | None]:
        """The offset of a term in its buffer, None without atomics; and the offset of each pair, if the term is along
        diagonals and positions need not follow each other, else None."""
        if not term.atomic:
            return None, None
        by_pair = self.lowering.offset(term.load, term.accumulator, tile=True)
        if term.kind is GradientKind.SCATTER:
            return by_pair, None
        self.lowering.helpers.add("diagonals")
        along = by_lag(term.load)
        assert along is not None
        return self.lowering.offset(along, term.accumulator, tile=False), None if self.by_position else by_pair


def _given_position(axis: str, otherwise: Code) -> Code:
    """The position of each row or key if a segmented call gives it, else `otherwise`."""
    lies, length = (_ROWS, Name("q_len")) if axis == "q" else (_KEYS, Name("kv_len"))
    batch = product(Name("b"), Name(f"stride_{axis}_positions_b"))
    pointers = total([Name(f"{axis}_positions_ptr"), batch, lies])
    given = builtin("load", pointers, mask=Infix("<", lies, length), other=ZERO)
    return Choice(given, Name("POSITIONS"), otherwise)


def unless_true(mask: Expr | None) -> Expr | None:
    """The mask, None if it keeps every pair."""
    return None if mask == expr.TRUE else mask


def _factor(code: Code) -> Code:
    """A factor of ds: in parentheses, unless it is a name or an integer."""
    plain = isinstance(code, Name) or (isinstance(code, Literal) and isinstance(code.value, int))
    return code if plain else Group(code)


def _where_kept(code: Code) -> Code:
    return builtin("where", Name("keep"), code, Literal(0.0))


def _gradient(term: GradientTerm, local: Code | None, partial: bool) -> Code:
    """The gradient of each pair; 0 for pairs that the mask drops."""
    if term.sign:
        return _DS if term.sign > 0 else Prefix("-", _DS)
    assert local is not None
    code = product(_DS, _factor(local))
    return _where_kept(code) if partial else code
