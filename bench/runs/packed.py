"""Documents of unequal lengths in one call: ours packed and with segment ids, beside FlexAttention and FLA.

The sizes are those of Kvax's benchmark (github.com/nebius/kvax): 131072 tokens, 12 documents in each row, of lengths
that scatter a little around the mean, causal inside documents, 32 query heads on 8 key heads of 128 channels.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.cases.case import BACKWARD_FLOPS
from bench.peers.torch_peers import Runner
from bench.timing.clock import Clock
from codegen.compile.pool import spread
from codegen.testing import golden
from codegen.testing.calls import packed
from codegen.testing.golden import BOUND, Inputs, Shape

DTYPE = torch.bfloat16
HEADS, KV_HEADS, DIM = 32, 8, 128
TOKENS = 131072
SEQS = (4096, 16384, 65536)
DOCUMENTS = 12
DENSE_SEQ = 16384
LONG, SHORT = 65536, 64
CHECK_TOKENS = 2048

DENSE_SHARE = 0.85
"""Least part of the dense causal rate, per unmasked score, that documents of 1000 tokens and more are to reach."""

KVAX_BLOCK = 128
"""Kvax keeps four int32 bounds per block of each row, for each of three passes."""

MOST_JOBS = 3
"""Processes that compile at once: each holds a case's tensors, up to 16 GiB, on the same GPU."""


def random_lengths(total: int, documents: int) -> tuple[int, ...]:
    """Lengths that sum to `total`, as Kvax draws them: one token each, the others to a random one each, from seed 0."""
    rng = random.Random(0)
    counts = Counter(rng.randint(0, documents - 1) for _ in range(total - documents))
    return tuple(1 + counts[i] for i in range(documents))


@dataclass(frozen=True, kw_only=True)
class PackedCase:
    """One variant on documents: the lengths of those in each row of a batch. All rows are equally long."""

    name: str
    rows: tuple[tuple[int, ...], ...]
    implementations: tuple[str, ...]
    variant: str = "causal"
    heads: tuple[int, int] = (HEADS, KV_HEADS)
    dim: int = DIM

    @property
    def shape(self) -> Shape:
        """Of the dense batch."""
        heads, kv_heads = self.heads
        return Shape(batch=len(self.rows), heads=heads, kv_heads=kv_heads, seq=sum(self.rows[0]), dim=self.dim)

    def flops(self, which: str) -> float:
        """Work of the "fwd" or "bwd" pass on unmasked scores alone."""
        pairs = sum(length * (length + 1) // 2 for row in self.rows for length in row)
        forward = 4.0 * self.dim * pairs * self.heads[0]
        return forward * BACKWARD_FLOPS if which == "bwd" else forward

    def small(self) -> PackedCase:
        """The same at so few tokens that float64 is soon done with them; documents may become empty."""
        rows = self.rows[:2]
        each = CHECK_TOKENS // len(rows)
        return replace(self, name="", rows=tuple(_shrunk(row, each) for row in rows))


def _shrunk(row: Sequence[int], total: int) -> tuple[int, ...]:
    ends = [0, *(end * total // sum(row) for end in itertools.accumulate(row))]
    return tuple(end - start for start, end in itertools.pairwise(ends))


def cases() -> list[PackedCase]:
    """Kvax's documents, also with a log-decay; then what the dense rate is compared with; one long among short ones."""
    rows = {seq: (random_lengths(seq, DOCUMENTS),) * (TOKENS // seq) for seq in SEQS}
    documents = [
        PackedCase(
            name=f"documents B{TOKENS // seq} S{seq}", rows=rows[seq], implementations=("packed", "segments", "flex")
        )
        for seq in SEQS
    ]
    forgetting = [
        PackedCase(
            name=f"forgetting B{TOKENS // seq} S{seq}",
            rows=rows[seq],
            implementations=("packed", "fla"),
            variant="forgetting",
        )
        for seq in SEQS
    ]
    dense = PackedCase(
        name=f"dense B{TOKENS // DENSE_SEQ} S{DENSE_SEQ}",
        rows=((DENSE_SEQ,),) * (TOKENS // DENSE_SEQ),
        implementations=("dense",),
    )
    uniform = [
        PackedCase(name=f"uniform {length}", rows=((length,) * (TOKENS // length),), implementations=("packed",))
        for length in (1024, 2048, 4096)
    ]
    short = (SHORT,) * ((TOKENS - LONG) // SHORT)
    long = [
        PackedCase(name=f"{LONG} then {len(short)} x {SHORT}", rows=((LONG, *short),), implementations=("packed",)),
        PackedCase(name=f"{len(short)} x {SHORT} then {LONG}", rows=((*short, LONG),), implementations=("packed",)),
    ]
    return [*documents, *forgetting, dense, *uniform, *long]


def with_peers(case: PackedCase, wanted: Sequence[str] | None, absent: Iterable[str]) -> PackedCase:
    """The case with ours and those of its peers that are `wanted` (None: all of them), but for `absent` ones."""
    peers = set(case.implementations if wanted is None else wanted) - set(absent)
    return replace(case, implementations=tuple(name for name in case.implementations if name in {*OURS, *peers}))


@dataclass(frozen=True, kw_only=True)
class Built:
    """An implementation on its own inputs; `dense` brings its o and gradients into layout "bhsd" of the batch.

    `unscheduled` is a forward that makes its schedule itself, `schedule` makes one.
    """

    runner: Runner
    dense: Callable[[Tensor], Tensor] = lambda x: x
    schedule: Callable[[], Any] | None = None
    unscheduled: Callable[[], Tensor] | None = None

    def results(self) -> dict[str, Tensor]:
        """o and every gradient."""
        o = self.runner.forward()
        named = {f"d{name}": grad for name, grad in zip(self.runner.leaves, self.runner.gradients(o), strict=True)}
        return {name: self.dense(x.detach()) if name != "dg" else x for name, x in ({"o": o} | named).items()}


def draw(case: PackedCase, device: str) -> Inputs:
    """The dense batch."""
    entry = golden.load_manifest()[case.variant]
    return golden.draw_inputs(entry, case.shape, dtype=DTYPE, device=device)


def cu_seqlens(case: PackedCase, device: torch.device) -> Tensor:
    """Where documents begin and end among all tokens, int32."""
    ends = [0, *itertools.accumulate(length for row in case.rows for length in row)]
    return torch.tensor(ends, dtype=torch.int32, device=device)


def segment_ids(case: PackedCase, device: torch.device) -> Tensor:
    """The number of each token's document in its row, int32 `[B, S]`."""
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in case.rows]
    return torch.stack(rows).to(device, torch.int32)


def _scheduled(op: Any, inputs: Inputs, dense: Callable[[Tensor], Tensor], **options: Any) -> Built:
    def schedule() -> Any:
        return op.schedule(inputs.q, inputs.k, inputs.v, **options)

    made = schedule()
    return Built(
        runner=Runner(forward=lambda: inputs.call(op, schedule=made, **options), do=inputs.do, leaves=inputs.leaves()),
        dense=dense,
        schedule=schedule,
        unscheduled=lambda: inputs.call(op, **options),
    )


def _packed(case: PackedCase, inputs: Inputs) -> Built:
    batch = len(case.rows)
    ends = cu_seqlens(case, inputs.q.device)
    return _scheduled(
        golden.load_op(case.variant),
        packed(golden.load_manifest()[case.variant], inputs),
        lambda x: x.unflatten(0, (batch, -1)).transpose(1, 2),
        cu_seqlens_q=ends,
    )


def _segments(case: PackedCase, inputs: Inputs) -> Built:
    ids = segment_ids(case, inputs.q.device)
    return _scheduled(golden.load_op(case.variant), inputs, lambda x: x, q_segment_ids=ids)


def _dense(case: PackedCase, inputs: Inputs) -> Built:
    return _scheduled(golden.load_op(case.variant), inputs, lambda x: x)


def _flex(case: PackedCase, inputs: Inputs) -> Built:
    # Kept graphs are run again and again here, which donated buffers forbid.
    functorch_config.donated_buffer = False
    torch.compiler.reset()
    ids = segment_ids(case, inputs.q.device)

    def causal_in_documents(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001 -- Flex's names
        return (q_idx >= kv_idx) & (ids[b, q_idx] == ids[b, kv_idx])

    seq = case.shape.seq
    # Compiled, because the S x S mask of 64k tokens would not fit.
    create = torch.compile(create_block_mask)
    mask = create(causal_in_documents, len(case.rows), None, seq, seq, device=inputs.q.device)
    run = torch.compile(functools.partial(flex_attention, block_mask=mask, enable_gqa=True), dynamic=False)
    return Built(runner=Runner(forward=lambda: run(inputs.q, inputs.k, inputs.v), do=inputs.do, leaves=inputs.leaves()))


def _fla(case: PackedCase, inputs: Inputs) -> Built:
    from fla.ops.attn.parallel import parallel_attn  # optional

    batch = len(case.rows)
    one = packed(golden.load_manifest()[case.variant], inputs)
    # A batch of one; FLA indexes with 64 bits.
    leaves = {name: x.detach()[None].requires_grad_() for name, x in one.leaves().items()}
    ends = cu_seqlens(case, inputs.q.device).long()

    def forward() -> Tensor:
        o: Tensor = parallel_attn(leaves["q"], leaves["k"], leaves["v"], g=leaves["g"], cu_seqlens=ends)
        return o

    return Built(
        runner=Runner(forward=forward, do=one.do[None], leaves=leaves),
        dense=lambda x: x[0].unflatten(0, (batch, -1)).transpose(1, 2),
    )


BUILDERS: dict[str, Callable[[PackedCase, Inputs], Built]] = {
    "packed": _packed,
    "segments": _segments,
    "dense": _dense,
    "flex": _flex,
    "fla": _fla,
}
OURS = ("packed", "segments", "dense")


def _expected(case: PackedCase, inputs: Inputs) -> dict[str, Tensor]:
    """o and every gradient in float64: a dense call of the plain reference for each document."""
    reference = golden.load_reference(case.variant)
    whole = inputs.double()
    outputs = []
    for b, row in enumerate(case.rows):
        found = [whole.q.new_zeros(0, whole.q.shape[1], whole.v.shape[3])]
        ends = itertools.accumulate(row, initial=0)
        for start, end in itertools.pairwise(ends):
            if end > start:
                q, k, v = (x[b : b + 1, :, start:end] for x in (whole.q, whole.k, whole.v))
                own = {name: x[b : b + 1, start:end] for name, x in whole.tensors.items()}
                found.append(reference(q, k, v, **own)[0].transpose(0, 1))
        outputs.append(torch.cat(found).transpose(0, 1))
    o = torch.stack(outputs)
    leaves = whole.leaves()
    grads = torch.autograd.grad(o, list(leaves.values()), whole.do)
    return {"o": o.detach()} | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


@functools.cache
def fault(case: PackedCase, name: str, device: str) -> str:
    """What is wrong with one implementation of a small case, against float64; "" when nothing is."""
    inputs = draw(case, device)
    want = _expected(case, inputs)
    got = BUILDERS[name](case, inputs).results()
    errors = golden.relative_errors({key: x.reshape(want[key].shape) for key, x in got.items()}, want)
    bound = BOUND[DTYPE]
    if name not in OURS:  # a peer need only compute the same: its own precision is its own affair
        bound *= 2
        errors.pop("dg", None)
    worst = max(errors, key=lambda each: errors[each])
    return "" if errors[worst] <= bound else f"WRONG against float64: {worst} is off by {errors[worst]:.1e}"


@dataclass(frozen=True, kw_only=True)
class PackedMeasurement:
    """One implementation of a case: milliseconds, TFLOP/s of unmasked scores, bytes; None where there is none."""

    case: str
    implementation: str
    ms: dict[str, float] = field(default_factory=dict)
    tflops: dict[str, float] = field(default_factory=dict)
    schedule_bytes: int | None = None
    note: str = ""


def _median_ms(call: Callable[[], Any], rep_ms: int) -> float:
    from triton.testing import do_bench  # where there is a GPU

    ms: float = do_bench(call, warmup=10, rep=rep_ms, return_mode="median")
    return ms


def measure(case: PackedCase, rep_ms: int, device: str = "cuda") -> Iterator[PackedMeasurement]:
    """Every implementation of a case that is there and right."""
    inputs = draw(case, device)
    for name in case.implementations:
        try:
            if wrong := fault(replace(case.small(), implementations=()), name, device):
                yield PackedMeasurement(case=case.name, implementation=name, note=wrong)
            else:
                yield _timed(case, name, inputs, rep_ms)
        except Exception as error:  # a peer may be absent or fail in any way: the row says so
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"
            yield PackedMeasurement(case=case.name, implementation=name, note=reason)


def _timed(case: PackedCase, name: str, inputs: Inputs, rep_ms: int) -> PackedMeasurement:
    built = BUILDERS[name](case, inputs)
    o = built.runner.forward()
    passes = {"fwd": built.runner.forward, "bwd": lambda: built.runner.gradients(o)}
    ms = {which: _median_ms(call, rep_ms) for which, call in passes.items()}
    tflops = {which: case.flops(which) / ms[which] / 1e9 for which in passes}
    nbytes = None
    if built.schedule is not None and built.unscheduled is not None:
        ms["schedule"] = _median_ms(built.schedule, rep_ms)
        ms["unscheduled"] = _median_ms(built.unscheduled, rep_ms)
        nbytes = built.schedule().nbytes
    return PackedMeasurement(case=case.name, implementation=name, ms=ms, tflops=tflops, schedule_bytes=nbytes)


def rehearse(case: PackedCase) -> None:
    """Run everything the case will run, once, so that it is compiled and in the caches on disk."""
    inputs = draw(case, "cuda")
    for name in case.implementations:
        # What fails here fails again in `measure`, which reports it.
        with contextlib.suppress(Exception):
            fault(replace(case.small(), implementations=()), name, "cuda")
            BUILDERS[name](case, inputs).results()


def table(measurements: Sequence[PackedMeasurement], chosen: Sequence[PackedCase]) -> str:
    """One line per case and implementation; `no schedule` is a forward that makes its own."""
    kvax = {case.name: 3 * len(case.rows) * -(-case.shape.seq // KVAX_BLOCK) * 16 for case in chosen}
    width = max(len(m.case) for m in measurements)
    lines = [
        f"{'case':{width}} {'by':8} | {'fwd ms':>8} {'TF':>4} | {'bwd ms':>8} {'TF':>4} |"
        f" {'no schedule':>11} {'schedule ms':>11} {'KiB':>8} {'Kvax KiB':>8}"
    ]
    for m in measurements:
        passes = " | ".join(f"{_cell(m.ms.get(p), 8, 3)} {_cell(m.tflops.get(p), 4, 0)}" for p in ("fwd", "bwd"))
        size = None if m.schedule_bytes is None else m.schedule_bytes / 1024
        theirs = kvax[m.case] / 1024 if m.implementation == "segments" else None
        lines.append(
            f"{m.case:{width}} {m.implementation:8} | {passes} | {_cell(m.ms.get('unscheduled'), 11, 3)}"
            f" {_cell(m.ms.get('schedule'), 11, 3)} {_cell(size, 8, 1)} {_cell(theirs, 8, 1)}"
        )
    notes = [f"  {m.case} {m.implementation}: {m.note}" for m in measurements if m.note]
    return "\n".join([*lines, *(["", "not measured, or wrong:", *notes] if notes else [])])


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"


def dense_shares(measurements: Sequence[PackedMeasurement]) -> Iterator[tuple[str, str, float]]:
    """Case, pass and part of the dense causal rate of documents that are all equally long."""
    dense = next((m.tflops for m in measurements if m.implementation == "dense"), {})
    for m in measurements:
        if m.case.startswith("uniform"):
            yield from ((m.case, which, m.tflops[which] / dense[which]) for which in m.tflops if which in dense)


def run(
    rep_ms: int,
    jobs: int,
    chosen: Sequence[PackedCase],
    keep: Callable[[Sequence[PackedMeasurement]], None],
    clock: Clock,
) -> bool:
    """Print the tables, and `keep` what there is after each case; whether ours is right and keeps the bar."""
    start = time.perf_counter()
    if jobs > 0:
        for done, _ in enumerate(spread(rehearse, chosen, min(jobs, MOST_JOBS), until=clock.at(0.5)), start=1):
            seconds = time.perf_counter() - start
            print(f"\rpacked: compiling, {done}/{len(chosen)} cases, {seconds:.0f} s", end="", flush=True)
        print(flush=True)
    measurements: list[PackedMeasurement] = []
    for number, case in enumerate(chosen, start=1):
        if clock.over:
            print(f"out of time: skipped {', '.join(each.name for each in chosen[number - 1 :])}", flush=True)
            break
        print(f"[{number}/{len(chosen)}] {case.name}", flush=True)
        measurements += measure(case, rep_ms)
        keep(measurements)
    if not measurements:
        return True
    print(f"\ndocuments, bfloat16, H{HEADS}/{KV_HEADS} D{DIM}, {TOKENS} tokens; TF: TFLOP/s of unmasked scores\n")
    print(table(measurements, chosen))
    right = not any(m.note for m in measurements if m.implementation in OURS)
    for name, which, share in dense_shares(measurements):
        kept = share >= DENSE_SHARE
        right &= kept
        print(f"  {name} {which}: {share:.0%} of the dense rate, bar {DENSE_SHARE:.0%}: {'OK' if kept else 'TOO SLOW'}")
    print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)
    return right
