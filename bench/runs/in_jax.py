"""The JAX ops beside the torch ops, and beside cuDNN, Pallas and Kvax in JAX.

A time is the median of five rounds; a round makes many calls and waits for the last. TF is TFLOP/s of unmasked scores.
A ratio is a row's time divided by that of the row it names: above 1, the named row is faster.
"""

from __future__ import annotations

import functools
import gc
import os

# Read by JAX when it initialises the GPU; otherwise it takes the memory that torch needs.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from bench.cases.case import Case
from bench.cases.flex_mods import MODS
from bench.cases.packed import DOCUMENTS, SEQS, TOKENS, random_lengths
from bench.peers.jax_peers import BUILDERS, OURS, JaxCase, Program, draw, fault, ours, with_schedule
from bench.peers.torch_peers import Runner, build
from bench.record import in_one_line
from bench.timing import first_call
from bench.timing.clock import Clock
from bench.timing.loops import loop_ms, loops_ms
from codegen.testing import golden
from codegen.testing.calls import make_schedule
from codegen.testing.golden import BOUND, Inputs, Shape
from generated import jax as ops

CHAIN = 20
"""Calls in one program if a call is shorter than its dispatch."""

PASSES = ("fwd", "fwd+bwd")
REFERENCES = ("torch", *OURS)


@dataclass(frozen=True, kw_only=True)
class JaxMeasurement:
    """One implementation of a case: milliseconds and TFLOP/s by pass, and which results equal torch's bit for bit.

    `remark` says how it was run; `note` says why it is missing or wrong.
    """

    section: str
    case: str
    implementation: str
    ms: dict[str, float] = field(default_factory=dict)
    tflops: dict[str, float] = field(default_factory=dict)
    same_bits: dict[str, bool] = field(default_factory=dict)
    remark: str = ""
    note: str = ""


def unmasked_tflops(case: Case | JaxCase, ms: Mapping[str, float]) -> dict[str, float]:
    """TFLOP/s of the scores that the mask keeps, from milliseconds of each pass."""
    forward, backward = case.flops("fwd"), case.flops("bwd")
    work = {"fwd": forward, "fwd+bwd": forward + backward}
    return {which: work[which] / ms[which] / 1e9 for which in PASSES if which in ms}


# -------------------------------------------------------------------------------------------------- same kernels, torch


def same_cases() -> list[Case]:
    """The variants whose kernels differ most: plain, tanh with a window, block tables, log-decay with its gradient."""
    short = Shape(batch=8, heads=16, kv_heads=16, seq=2048, dim=128)
    long = Shape(batch=1, heads=32, kv_heads=8, seq=16384, dim=128)
    variants = ("causal", "gemma2_local", "document", "forgetting")
    cases = [Case(variant=variant, shape=shape) for shape in (short, long) for variant in variants]
    return [*cases, Case(variant="causal", shape=Shape(batch=1, heads=32, kv_heads=8, seq=16384, dim=64))]


def drawn(case: Case, device: str) -> Inputs:
    """Draw a case's inputs as torch tensors."""
    inputs = golden.draw_inputs(golden.load_manifest()[case.variant], case.shape, dtype=torch.bfloat16, device=device)
    own = MODS[case.variant].tensors
    if own is not None:
        inputs.tensors.update(own(case.shape, device))
    return inputs


def twin(case: Case, inputs: Inputs) -> Program:
    """The JAX op on the memory of torch's tensors, without copies."""
    leaves = {name: jax.dlpack.from_dlpack(x.detach()) for name, x in inputs.leaves().items()}
    others = {name: jax.dlpack.from_dlpack(x) for name, x in inputs.tensors.items() if name not in leaves}
    op = getattr(ops, case.variant)
    do = jax.dlpack.from_dlpack(inputs.do)
    as_torch = functools.partial(op, layout="bhsd", **inputs.scalars)
    program = Program(op=as_torch, leaves=leaves, do=do, given=others)
    if not golden.has_tables(case.variant):
        return program
    return with_schedule(program, functools.partial(op.schedule, layout="bhsd"))


def _torch_results(runner: Runner) -> dict[str, Tensor]:
    o = runner.forward()
    gradients = {f"d{name}": x for name, x in zip(runner.leaves, runner.gradients(o), strict=True)}
    return {"o": o.detach()} | gradients


def compared(runner: Runner, program: Program) -> tuple[dict[str, bool], str]:
    """Which results of torch and JAX are equal bit for bit, and an error text if any is not even close."""
    mine = _torch_results(runner)
    theirs = {name: from_dlpack(x) for name, x in program.results().items()}
    same = {name: torch.equal(x, theirs[name]) for name, x in mine.items()}
    errors = golden.relative_errors(theirs, mine)
    worst = max(errors, key=lambda each: errors[each])
    wrong = errors[worst] > BOUND[torch.bfloat16]
    return same, f"WRONG: {worst} is off torch's by {errors[worst]:.1e}" if wrong else ""


def _synchronize(_: Any) -> None:
    torch.cuda.synchronize()


def _both_ms(case: Case, runner: Runner, inputs: Inputs, program: Program) -> tuple[dict[str, float], dict[str, float]]:
    """The times in torch and the times in JAX."""
    from triton.testing import do_bench  # where there is a GPU

    calls = {"fwd": runner.forward, "fwd+bwd": lambda: runner.gradients(runner.forward())}
    twins = {"fwd": program.forward, "fwd+bwd": program.both}
    in_torch, in_jax = {}, {}
    for which, call in calls.items():
        pair = (call, _synchronize), (twins[which], jax.block_until_ready)
        in_torch[which], in_jax[which] = loops_ms(*pair)
    if golden.has_tables(case.variant):
        in_torch["schedule"] = loop_ms(lambda: make_schedule(golden.load_op(case.variant), inputs), _synchronize)
    if program.schedule:
        in_jax["schedule"] = loop_ms(program.schedule)
    alone = {f"{which} do_bench": do_bench(call, rep=50, return_mode="median") for which, call in calls.items()}
    return in_torch | alone, in_jax


def program_ms(program: Program) -> dict[str, float]:
    """The times of both passes, and of the schedule if there is one."""
    ms = {"fwd": loop_ms(program.forward), "fwd+bwd": loop_ms(program.both)}
    return ms | ({"schedule": loop_ms(program.schedule)} if program.schedule else {})


def _same_case(case: Case) -> Iterator[JaxMeasurement]:
    from bench.timing.measure import verify  # where there is a GPU

    row = functools.partial(JaxMeasurement, section="same", case=case.name)
    if wrong := verify(case):
        yield row(implementation="torch", note=wrong)
        return
    inputs = drawn(case, "cuda")
    runner = build("ours", case, inputs)
    torch.cuda.synchronize()
    program = twin(case, inputs)
    bits, wrong = compared(runner, program)
    in_torch, in_jax = ({}, {}) if wrong else _both_ms(case, runner, inputs, program)
    yield row(implementation="torch", ms=in_torch, tflops=unmasked_tflops(case, in_torch))
    yield row(implementation="ours", ms=in_jax, tflops=unmasked_tflops(case, in_jax), same_bits=bits, note=wrong)


def same() -> Iterator[JaxMeasurement]:
    """The same kernels from torch and from JAX, on the same memory."""
    for case in same_cases():
        try:
            yield from _same_case(case)
        except Exception as error:  # the next case still runs
            yield JaxMeasurement(section="same", case=case.name, implementation="ours", note=in_one_line(error, 300))
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------------------- peers


def dense_case(batch: int, heads: tuple[int, int], seq: int) -> JaxCase:
    """Causal attention on rows of one document each."""
    case = JaxCase(name="", rows=((seq,),) * batch, heads=heads)
    return replace(case, name=f"causal {case.shape}")


def documents(seq: int, batch: int) -> JaxCase:
    """Rows of documents from Kvax's benchmark."""
    case = JaxCase(name="", rows=(random_lengths(seq, DOCUMENTS),) * batch)
    return replace(case, name=f"{DOCUMENTS} documents {case.shape}")


def _kvax(case: JaxCase, *, hints: bool) -> Program:
    from bench.peers import kvax_peer  # optional

    return kvax_peer.build(case, hints=hints)


PEERS: dict[str, Callable[[JaxCase], Program]] = {
    **BUILDERS,
    "kvax": functools.partial(_kvax, hints=False),
    "kvax patched": functools.partial(_kvax, hints=True),
}


# Two sections share some cases; ours is timed once.
@functools.cache
def measured(case: JaxCase, name: str) -> tuple[dict[str, float], str]:
    """The times of one implementation, or its error."""
    program = PEERS[name](case)
    wrong = fault(case, name, program)
    return {} if wrong else program_ms(program), wrong


def timed(section: str, case: JaxCase, names: Sequence[str]) -> Iterator[JaxMeasurement]:
    """Check and time each implementation of a case."""
    for name in names:
        try:
            ms, note = measured(case, name)
        except Exception as error:  # a peer may be missing or fail in any way; its row says so
            ms, note = {}, in_one_line(error, 300)
        if note:
            gc.collect()  # frees arrays that the error's frames hold
        yield JaxMeasurement(
            section=section, case=case.name, implementation=name, ms=ms, tflops=unmasked_tflops(case, ms), note=note
        )


def cudnn() -> Iterator[JaxMeasurement]:
    """cuDNN through `jax.nn`: causal, and documents with an S x S mask, on fewer rows if that exceeds memory."""
    for case in (dense_case(8, (16, 16), 2048), dense_case(1, (32, 8), 16384)):
        yield from timed("cudnn", case, ("ours", "cudnn"))
    for seq in SEQS[:2]:
        for batch in (TOKENS // seq, 2, 1):
            case = documents(seq, batch)
            yield from timed("cudnn", case, OURS[1:])
            theirs = list(timed("cudnn", case, ("cudnn", "cudnn mask")))
            yield from theirs
            if any(row.ms for row in theirs):
                break


def kvax() -> Iterator[JaxMeasurement]:
    """Kvax as installed, and with the divisibility hints that jax-triton 0.3.1 dropped."""
    for seq in SEQS:
        peers = ("kvax", "kvax patched")
        yield from timed("kvax", documents(seq, TOKENS // seq), (*OURS[1:], *peers))
        yield from timed("kvax", dense_case(TOKENS // seq, (32, 8), seq), ("ours", *peers))


PALLAS_BLOCKS: dict[str, tuple[tuple[int, ...], int]] = {
    "default": ((128, 128, 32, 32, 32, 32), 2),
    "128x128, 64x64": ((128, 128, 64, 64, 64, 64), 2),
    "64x128 3 stages, 32x64": ((64, 128, 32, 64, 64, 32), 3),
    "128x64 3 stages, 64x32": ((128, 64, 64, 32, 32, 64), 3),
    "64x64, 128x64": ((64, 64, 64, 128, 128, 64), 2),
}
"""Block sizes of Pallas (rows and keys of the forward, of dk and dv, of dq), and stages of the forward."""


def pallas_case() -> JaxCase:
    """The shape of Triton's tutorial, which Pallas's own benchmarks use."""
    case = JaxCase(name="", rows=((1024,),) * 4, heads=(8, 8), dim=64, variant="full", dtype="float16")
    return replace(case, name=f"full {case.shape} float16")


def pallas_program(case: JaxCase, blocks: str, interpret: bool = False) -> Program:
    """Pallas's own attention with the given block sizes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a recommendation of another library
        from jax.experimental.pallas.ops.gpu import attention
    sizes, stages = PALLAS_BLOCKS[blocks]
    block_sizes = attention.BlockSizes(*sizes)
    scale = case.dim**-0.5

    def op(q: Any, k: Any, v: Any) -> Any:
        # Its non-differentiated arguments must be positional.
        return attention.mha(q, k, v, None, scale, False, block_sizes, "triton", None, stages, None, interpret)

    return replace(ours(case), op=op)


def _chained_ms(case: JaxCase, name: str, program: Program) -> tuple[dict[str, float], str]:
    if wrong := fault(case, name, program):
        return {}, wrong
    return {which: loop_ms(call) / CHAIN for which, call in program.chained(CHAIN).items()}, ""


def pallas() -> Iterator[JaxMeasurement]:
    """Pallas's attention with its default blocks and with others, and the best of them for each pass."""
    case = pallas_case()
    remark = f"{CHAIN} calls in a program"
    row = functools.partial(JaxMeasurement, section="pallas", case=case.name)
    makers: dict[str, Callable[[], Program]] = {"ours": lambda: ours(case)}
    makers |= {f"pallas {blocks}": functools.partial(pallas_program, case, blocks) for blocks in PALLAS_BLOCKS}
    found: dict[str, dict[str, float]] = {}
    for name, make in makers.items():
        try:
            ms, note = _chained_ms(case, name, make())
        except Exception as error:  # some blocks exceed shared memory
            ms, note = {}, in_one_line(error, 300)
        if ms and name != "ours":
            found[name] = ms
        yield row(implementation=name, ms=ms, tflops=unmasked_tflops(case, ms), remark=remark, note=note)
    if found:
        best = {which: min(found, key=lambda name: found[name][which]) for which in PASSES}
        ms = {which: found[name][which] for which, name in best.items()}
        yield row(
            implementation="pallas best", ms=ms, tflops=unmasked_tflops(case, ms), remark=", ".join(best.values())
        )


def first() -> Iterator[JaxMeasurement]:
    """The first call in fresh processes: with empty caches, then with Triton's cache."""
    row = functools.partial(JaxMeasurement, section="first", case=first_call.CASE)
    try:
        for state, seconds in first_call.measured():
            yield row(implementation=state, ms={name: 1e3 * value for name, value in seconds.items()})
    except Exception as error:
        yield row(implementation="ours", note=in_one_line(error, 300))


# -------------------------------------------------------------------------------------------------------------- table


def line(m: JaxMeasurement, earlier: Sequence[JaxMeasurement]) -> str:
    """A row of the table, with its ratios to the earlier rows of the same case."""
    cells = [f"{m.case:34} {m.implementation:22}"]
    for which in PASSES:
        if which in m.ms:
            cells.append(f"{which} {m.ms[which]:9.3f} ms {m.tflops[which]:4.0f} TF")
    others = ", ".join(f"{name} {ms:.3f} ms" for name, ms in m.ms.items() if name not in PASSES)
    alike = [each for each in earlier if (each.section, each.case) == (m.section, m.case)]
    ratios = []
    for each in alike:
        found = [f"{m.ms[which] / each.ms[which]:.2f}" for which in PASSES if which in m.ms and which in each.ms]
        if found and each.implementation in REFERENCES:
            ratios.append(f"{' / '.join(found)} of {each.implementation}")
    unequal = [name for name, equal in m.same_bits.items() if not equal]
    bits = f"same bits: {', '.join(m.same_bits)}" if m.same_bits and not unequal else ""
    bits = f"OTHER BITS: {', '.join(unequal)}" if unequal else bits
    return " | ".join([*cells, *(text for text in (others, *ratios, bits, m.remark, m.note) if text)])


SECTIONS: dict[str, Callable[[], Iterator[JaxMeasurement]]] = {
    "same": same,
    "cudnn": cudnn,
    "pallas": pallas,
    "kvax": kvax,
    "first": first,
}


def require_gpu() -> None:
    """Raise a RuntimeError if JAX has no GPU."""
    jax.devices("gpu")


def run(
    names: Sequence[str],
    keep: Callable[[Sequence[JaxMeasurement]], None],
    clock: Clock = Clock(),  # noqa: B008 -- immutable, and without a limit
) -> bool:
    """Print each row at once, and call `keep` after each section. True if ours is right."""
    print(f"\n{__doc__}", flush=True)
    measurements: list[JaxMeasurement] = []
    torch.cuda.empty_cache()
    for name in names:
        if clock.over:
            print(f"{name}: skipped, out of time\n", flush=True)
            continue
        start = time.perf_counter()
        print(f"{name}: {SECTIONS[name].__doc__}", flush=True)
        for m in SECTIONS[name]():
            print(f"  {line(m, measurements)}", flush=True)
            measurements.append(m)
        keep(measurements)
        draw.cache_clear()
        print(f"  ({time.perf_counter() - start:.0f} s)\n", flush=True)
    return not any(m.note for m in measurements if m.implementation in REFERENCES)
