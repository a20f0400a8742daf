"""Far blocks, whose pairs all read the same element by distance: their score, and the distances that bound them."""

from __future__ import annotations

from codegen.analysis.distances import LAG, by_lag, kept_lags
from codegen.analysis.far_distances import Limit, distance_loads, far_lags
from codegen.analysis.gradients import FAR_SUMS
from codegen.ir import expr
from codegen.ir.expr import Expr, int_var
from codegen.plan.code.host import HostCode, host, listed
from codegen.plan.kernels.kernel import ArgGroup, FarBlocks, pointers
from codegen.spec.model import Variant

BEFORE, BEHIND = "near_first", "near_last"
"""The names of the distances up to which, and from which on, all pairs read the same element."""

SUMS = "SUMS_FAR"
"""The constant that says whether a kernel sums ds of far blocks."""

_LIMITS = {"before": BEFORE, "behind": BEHIND}


def far_blocks(variant: Variant) -> FarBlocks | None:
    """The sides of the diagonal on which there are far blocks; None if there are none."""
    lags = far_lags(variant)
    return FarBlocks(before=bool(lags.first), behind=bool(lags.last)) if lags.known else None


def limits(far: FarBlocks | None) -> list[ArgGroup]:
    """The two limits, as arguments of a kernel that treats far blocks apart; none if `far` is None."""
    if far is None:
        return []
    names = tuple(_LIMITS[side] for side in far.sides)
    return [ArgGroup(names=names, host=listed(f"bands.{name}" for name in names), varies=True)]


def sums(far: FarBlocks | None) -> list[ArgGroup]:
    """The buffer of the sums of ds over far blocks."""
    return [] if far is None else [pointers(FAR_SUMS)]


def far_score(variant: Variant, score: Expr, side: str) -> Expr:
    """The score in a far block of a side: every read by distance is the read at the side's limit."""
    replaced: dict[Expr, Expr] = {}
    for load in distance_loads(variant):
        by_distance = by_lag(load)
        assert by_distance is not None
        replaced[load] = expr.substitute(by_distance, {LAG.name: int_var(_LIMITS[side])})
    return expr.rebuild(score, replaced.get)


def host_limits(variant: Variant) -> tuple[HostCode, HostCode]:
    """The two limits as the host computes them, None if a side has none. A side on which reads by distance set no limit
    has the limit of the mask, from which on the mask keeps no pair."""
    lags, kept = far_lags(variant), kept_lags(variant.mask)
    none_first = () if kept.least is None else (kept.least - 1,)
    none_last = () if kept.most is None else (kept.most + 1,)
    return _outermost("min", lags.first or none_first), _outermost("max", lags.last or none_last)


def _outermost(function: str, found: tuple[Limit, ...]) -> HostCode:
    parts = [_limit(limit) for limit in found]
    if not parts:
        return host("None")
    return parts[0] if len(parts) == 1 else host(f"{function}({{}})", listed(parts))


def _limit(limit: Limit) -> HostCode:
    if isinstance(limit, int):
        return host(str(limit))
    size, factor = host(f"{{}}.shape[{limit.axis}]", limit.tensor), abs(limit.factor)
    if factor == 1:
        less = limit.rest + 1
        behind = f"{{}} - {less}" if less > 0 else f"{{}} + {-less}" if less < 0 else "{}"
        return host(behind if limit.factor > 0 else f"{less} - {{}}", size)
    # The distance at which the index is at the end of the axis, rounded away from the others.
    quotient = f"({limit.rest + 1} - {{}}) // {factor}"
    return host(f"-({quotient})" if limit.factor > 0 else quotient, size)
