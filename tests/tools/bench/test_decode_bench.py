"""The decode benchmark's own logic: cases and the bytes that they read, which results are right, times and ratios."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark needs torch")
pytest.importorskip("triton", reason="the benchmark needs Triton")

import torch

from bench.cases import decode as cases
from bench.cases.decode import DecodeCase
from bench.peers import decode_peers as peers
from bench.peers.decode_step import Built, Step, draw
from bench.peers.installed import is_installed
from bench.runs import decode
from bench.runs.decode import DecodeMeasurement
from bench.timing.clock import Clock
from docs.generators.benchmarks import DECODE

CASES = {case.name: case for case in cases.cases(("causal", "window", "alibi"))}
MIXED_STEP = "mixed step 8 x 512 of 4096 + 56 x 1"
IN_JAX = "B16 S8192 page 16 in JAX"
TINY = DecodeCase(name="tiny", lengths=(40, 33), heads=4, kv_heads=2, dim=16, page_size=16)


def narrow(name: str) -> DecodeCase:
    """A case with few heads."""
    case = CASES[name]
    return replace(case, heads=4, kv_heads=min(case.kv_heads, 2))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CHECK_KEYS", 800)
    monkeypatch.setattr(cases, "CHECK_QUERIES", 70)


# --------------------------------------------------------------------------------------------------------------- cases


def test_every_implementation_can_be_built_and_has_a_title() -> None:
    named = {name for case in CASES.values() for name in case.implementations}
    assert named == set(peers.BUILDERS) == set(DECODE)
    assert named == {*cases.OURS, *cases.PEERS}


def test_what_is_checked_has_prompts_and_decoding_sequences() -> None:
    small = CASES[MIXED_STEP].small()
    assert (small.queries, small.lengths[0], len(small.lengths)) == ((512, 1), 2000, 2)
    prompt = CASES["prompt 2048 of 32768 causal page 16"].small()
    assert (prompt.queries, prompt.lengths) == (640, (2000,))


def test_implementations_beside_ours_change_what_they_are_named_after() -> None:
    assert CASES["B64 mixed page 16 fp8"].read_by("bfloat16").cache == "bfloat16"
    assert CASES["B16 S8192 8 queries"].read_by("single").counts == (1,) * 16
    assert CASES["B16 S8192 8 queries"].read_by("codegen").counts == (8,) * 16


def test_peers_can_be_chosen_and_be_absent() -> None:
    case = CASES["B16 S8192"]
    assert cases.with_peers(case, ("fa3",), ["sdpa"]).implementations == ("codegen", "contiguous", "fa3")
    assert cases.with_peers(CASES[IN_JAX], None, ["jax"]).implementations == ("pallas",)


def test_bytes_are_those_of_the_cache_that_is_read() -> None:
    plain = draw(TINY, "cpu")
    assert plain.nbytes == 73 * 2 * 2 * 16 * 2
    eight = draw(replace(TINY, cache=cases.FP8), "cpu")
    assert eight.nbytes * 2 == plain.nbytes
    latent = draw(replace(TINY, value_dim=8), "cpu")
    assert latent.nbytes == 73 * 2 * 16 * 2
    assert latent.v.data_ptr() == latent.k.data_ptr()


def test_keys_of_8_bits_are_gathered_with_the_scales_of_their_heads() -> None:
    step = draw(replace(TINY, cache=cases.FP8), "cpu")
    k, v = step.gathered(1)
    page, scale = step.page_table[1, 2], step.scales["v_scale"][1].double()
    assert k.shape == (1, 2, 33, 16)
    assert torch.equal(v[0, 1, 32], step.v[page, 0, 1].double() * scale)


@pytest.mark.parametrize(
    ("variant", "pairs", "keys"), [("full", 120, 40), ("causal", 117, 40), ("window", 117, 40), ("gpt_oss", 117, 40)]
)
def test_unmasked_pairs_and_keys_are_counted(variant: str, pairs: int, keys: int) -> None:
    assert (decode.kept_pairs(variant, 3, 40), decode.seen_keys(variant, 3, 40)) == (pairs, keys)


def test_a_window_ends_what_is_counted() -> None:
    assert decode.kept_pairs("gpt_oss", 600, 2000) == 600 * 128
    assert decode.seen_keys("gpt_oss", 600, 2000) == 600 + 127


def test_rates_are_of_bytes_or_of_what_is_computed() -> None:
    prompt = replace(TINY, lengths=(40,), queries=20)
    assert decode.rates(prompt) == (None, 4.0 * 16 * 4 * (20 * 20 + 20 * 21 // 2))
    assert decode.rates(TINY) == (1.0, None)
    assert decode.rates(replace(TINY, value_dim=8)) == (1.0, 2.0 * (16 + 8) * 4 * 73)
    assert decode.rates(CASES[MIXED_STEP]) == (None, None)


# ----------------------------------------------------------------------------------------------------------- float64


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("B16 S8192", "contiguous"),
        ("B64 mixed page 16 fp8", "codegen"),
        ("B64 mixed page 16 fp8", "bfloat16"),
        ("B64 S8192 latent 16 heads", "codegen"),
        ("B64 S4096 latent 128 heads fp8", "codegen"),
        ("prompt 2048 of 32768 causal page 256", "codegen"),
        ("prompt 2048 of 32768 window page 64", "packed"),
        ("prompt 2048 of 32768 alibi page 64", "packed"),
        ("B16 S8192 4 queries", "codegen"),
        ("B16 S8192 4 queries", "single"),
        (MIXED_STEP, "codegen"),
        (MIXED_STEP, "apart"),
    ],
)
def test_ours_is_taken_for_right(name: str, implementation: str) -> None:
    assert peers.fault(narrow(name), implementation, "cpu") == ""


def test_fault_finds_scales_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def unscaled(step: Step) -> Built:
        built = peers.BUILDERS["contiguous"](step)
        wrong = {name: torch.ones_like(x) for name, x in step.scales.items()}
        return replace(built, call=lambda layer: built.call(replace(layer, scales=wrong)))

    monkeypatch.setitem(peers.BUILDERS, "codegen", unscaled)
    found = peers.fault(replace(TINY, cache=cases.FP8), "codegen", "cpu")
    assert found.startswith("WRONG against float64: o is off by ")


def test_fault_finds_rows_of_another_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(step: Step) -> Built:
        return replace(peers.BUILDERS["contiguous"](step), result=lambda o: o.roll(1, 0))

    monkeypatch.setitem(peers.BUILDERS, "codegen", shifted)
    assert peers.fault(replace(TINY, queries=(9, 1)), "codegen", "cpu").startswith("WRONG against float64")


def test_fault_finds_results_that_are_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_: Step) -> Built:
        return Built(call=lambda layer: torch.full_like(layer.q, math.nan))

    monkeypatch.setitem(peers.BUILDERS, "codegen", nothing)
    assert peers.fault(TINY, "codegen", "cpu").startswith("WRONG against float64")


# --------------------------------------------------------------------------------------------------------------- times


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of a graph runs once, and each call counts as ten microseconds."""

    def graph_us(calls: Sequence[Callable[[], Any]]) -> float:
        for call in calls:
            call()
        return 10.0 * len(calls)

    monkeypatch.setattr(decode, "graph_us", graph_us)
    monkeypatch.setattr(decode, "COLD_BYTES", 20_000)


@pytest.mark.usefixtures("on_cpu")
def test_ours_is_compared_with_what_stands_beside_it() -> None:
    case = replace(TINY, cache=cases.FP8, implementations=("codegen", "bfloat16", "flashinfer"))
    ours, wide, missing = decode.measure(case, "cpu")
    # A layer has 9344 bytes in bfloat16, half of that in 8 bits: 3 and 5 layers exceed COLD_BYTES.
    assert (ours.us, wide.us) == (50.0, 30.0)
    assert (ours.ratio, ours.over) == (0.6, "bfloat16")
    assert ours.tb_per_s == 4672 / 50.0 / 1e6
    assert (wide.ratio, wide.over, wide.note) == (None, "", "")
    assert missing.us is None
    if not is_installed("flashinfer"):
        assert missing.note == "ModuleNotFoundError: No module named 'flashinfer'"


@pytest.mark.usefixtures("on_cpu")
def test_steps_in_jax_are_right_and_timed_with_all_their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax", reason="the implementations in JAX need it")
    from bench.peers import decode_jax
    from bench.timing import loops

    timed: list[tuple[int, ...]] = []

    def loop_ms(call: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
        timed.append(wait(call()).shape)
        return 0.8

    monkeypatch.setattr(loops, "loop_ms", loop_ms)
    monkeypatch.setattr(decode_jax, "LAYERS", 2)
    monkeypatch.setattr(decode, "COLD_BYTES", 1)
    monkeypatch.setattr(decode_jax, "PALLAS_OPTIONS", ((2, 1),))
    case = replace(TINY, implementations=("jax", "pallas"))
    ours, pallas = decode.measure(case, "cpu")
    assert not ours.note + pallas.note
    assert ours.us == pytest.approx(400.0)
    assert (ours.ratio, ours.over) == (1.0, "pallas")
    assert timed == [(2, 1, 4, 16)] * 2


def test_the_fastest_program_counts_and_those_that_fail_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax", reason="the times of programs are taken with it")
    from bench.timing import loops

    def too_large() -> float:
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(loops, "loop_ms", lambda call, _: call())
    step = draw(TINY, "cpu")
    some = Built(call=lambda _: None, wait=lambda x: x, programs=lambda _: [too_large, lambda: 4.0, lambda: 2.0])
    assert decode._program_us(some, [step, step]) == 1000.0
    with pytest.raises(RuntimeError, match="out of shared memory"):
        decode._program_us(replace(some, programs=lambda _: [too_large]), [step])


def test_the_table_shows_rates_and_ratios() -> None:
    rows = [
        DecodeMeasurement(case="p", implementation="codegen", us=1778.0, tflops=599.6, ratio=0.985, over="packed"),
        DecodeMeasurement(case="d", implementation="codegen", us=100.0, tb_per_s=2.7, plan_us=4.0),
        DecodeMeasurement(case="d", implementation="fa3", note="no module"),
    ]
    _, prompt, step, missing = decode.table(rows, 3.0).splitlines()
    assert prompt.split() == ["p", "codegen", "1778.0", "600", "0.985", "of", "packed"]
    assert step.split() == ["d", "codegen", "100.0", "2.70", "90%", "4.0"]
    assert missing.split() == ["d", "fa3", "no", "module"]


def test_every_case_is_kept_until_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []

    def measure(case: DecodeCase) -> list[DecodeMeasurement]:
        if kept:
            monkeypatch.setattr(Clock, "over", True)
        return [DecodeMeasurement(case=case.name, implementation="codegen", us=1.0)]

    monkeypatch.setattr(decode, "measure", measure)
    monkeypatch.setattr(decode, "copy_tb_per_s", lambda: 3.0)
    monkeypatch.setattr(decode, "host_us", lambda: 20.0)
    assert decode.run(list(CASES.values())[:3], lambda rows, copy: kept.append(len(rows)), Clock(minutes=1.0))
    assert kept == [2, 3]
