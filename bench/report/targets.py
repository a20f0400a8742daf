"""The project's performance targets ("bars") compared with a run: each met or missed, with the deciding figure.

They hold for bfloat16 on one NVIDIA H100. A ratio is the peer's time divided by ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from bench.record import OURS, Measurement, Name, Results, parse_name

GPU = "H100"
LONG, SHORT = 16384, 512
DIMS = (64, 128, 256)
POWER_BELOW = {80: 64, 96: 64, 112: 64, 192: 128}


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One target: the least ratio that every one of its cases must reach, and the ratio `found` for each case."""

    title: str
    which: str
    needed: float
    found: dict[str, float]

    @property
    def met(self) -> bool | None:
        """True if every case reaches the target; None if none was measured."""
        return min(self.found.values()) >= self.needed if self.found else None

    @property
    def missed(self) -> dict[str, float]:
        """The cases below the target, worst first."""
        return dict(sorted(((c, x) for c, x in self.found.items() if x < self.needed), key=lambda each: each[1]))


def causal_beside(case: str) -> str | None:
    """The causal case of the same shape; None for a causal case."""
    name = parse_name(case)
    return None if name.variant == "causal" else str(replace(name, variant="causal", scalars=""))


def below(case: str) -> str | None:
    """The case at the next smaller power-of-two head_dim; None if the head_dim is a power of two."""
    name = parse_name(case)
    dim = POWER_BELOW.get(name.dim)
    return None if dim is None else str(replace(name, dim=dim, dim_v=min(name.dim_v, dim)))


def _ratio(mine: Measurement | None, theirs: Measurement) -> float:
    """The peer's time divided by ours; 0 if ours failed or is wrong."""
    return theirs.ms / mine.ms if mine and mine.ms and theirs.ms and not mine.note else 0.0


def _against(results: Results, peer: str, which: str, chosen: Callable[[Name], bool]) -> dict[str, float]:
    timed = results.timed()
    return {
        case: _ratio(timed.get((case, which, OURS)), theirs)
        for (case, at, by), theirs in timed.items()
        if (at, by) == (which, peer) and chosen(parse_name(case))
    }


def _shares(
    results: Results, beside: Callable[[str], str | None], which: str, chosen: Callable[[Name], bool]
) -> dict[str, float]:
    timed = results.timed()
    found = {}
    for m in results.measurements:
        if (m.which, m.implementation) != (which, OURS) or not chosen(parse_name(m.case)):
            continue
        base = timed.get((beside(m.case) or "", which, OURS))
        if base and base.tflops:
            found[m.case] = m.tflops / base.tflops if m.tflops and not m.note else 0.0
    return found


def _plain(name: Name) -> bool:
    return name.variant in ("causal", "full") and 2048 <= name.seq <= LONG


def _short(name: Name) -> bool:
    return name.variant in ("causal", "full") and name.seq == SHORT


def bars(results: Results) -> Iterator[Bar]:
    """All targets, forward and backward."""
    plain = "causal, full, {}, S2k-16k: over {}"
    for which, wide, fa4, flex, decayed in (("fwd", 1.2, 0.95, 1.4, 1.6), ("bwd", 1.8, 0.9, 1.3, 3.0)):
        narrow = _against(results, "flex-max", which, lambda name: _plain(name) and name.dim in (64, 128))
        yield Bar(title=plain.format("D64 D128", "Flex max-autotune"), which=which, needed=1.1, found=narrow)
        widest = _against(results, "flex-max", which, lambda name: _plain(name) and name.dim == 256)
        yield Bar(title=plain.format("D256", "Flex max-autotune"), which=which, needed=wide, found=widest)
        cudnn = _against(results, "cudnn", which, lambda name: _plain(name) and name.dim in DIMS)
        yield Bar(title=plain.format("D64 D128 D256", "cuDNN"), which=which, needed=1.0, found=cudnn)
        narrow = _against(results, "fa4", which, lambda name: _plain(name) and name.dim in (64, 128))
        yield Bar(title=plain.format("D64 D128", "FA4"), which=which, needed=fa4, found=narrow)
        widest = _against(results, "fa4", which, lambda name: _plain(name) and name.dim == 256)
        yield Bar(title=plain.format("D256", "FA4"), which=which, needed=fa4, found=widest)
        short = _against(results, "cudnn", which, lambda name: _short(name) and name.dim in DIMS)
        yield Bar(title="causal, full, S512: over cuDNN", which=which, needed=0.95, found=short)
        paper = _against(results, "flex", which, lambda name: name.seq == LONG)
        yield Bar(title="FlexAttention's variants, S16k: over Flex", which=which, needed=flex, found=paper)
        odd = _shares(results, below, which, lambda name: name.dim in (80, 96, 192))
        yield Bar(title="D80 D96 D192: rate over the power of two below", which=which, needed=0.85, found=odd)
        every = _shares(results, causal_beside, which, lambda name: name.seq == LONG)
        yield Bar(title="every variant, S16k: rate over causal's", which=which, needed=0.9, found=every)
        fla = _against(results, "fla", which, lambda name: name.variant == "forgetting")
        yield Bar(title="forgetting: over FLA", which=which, needed=decayed, found=fla)


def bars_table(results: Results) -> str:
    """One line per target and pass: the worst figure, the verdict, and below it all cases that miss the target."""
    gpu = results.machine.get("gpu", "an unknown GPU")
    lines = ["the project's bars" + ("" if GPU in gpu else f", which are for an {GPU}, on {gpu}")]
    for bar in sorted(bars(results), key=lambda each: each.title):
        verdict = {True: "met", False: "MISSED", None: "not measured"}[bar.met]
        worst = f"{min(bar.found.values()):.2f} of {bar.needed:.2f}" if bar.found else f"   - of {bar.needed:.2f}"
        passing = f"{len(bar.found) - len(bar.missed)}/{len(bar.found)} cases"
        lines.append(f"  {bar.title:56} {bar.which} {worst} {verdict:12} {passing}")
        lines += [f"      {value:5.2f}  {case}" for case, value in bar.missed.items()]
    return "\n".join(lines)
