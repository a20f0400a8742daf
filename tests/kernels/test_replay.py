"""A replayed call gives the bits of a computed call, for all kinds of calls, and no call is taken for another kind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from codegen.testing.calls import make_schedule
from codegen.testing.golden import Inputs
from generated._runtime.core.checks import ArgumentError
from generated._runtime.torch import launching
from generated._runtime.torch import replay as torch_replay
from tests.kernels.test_paged import draw_case
from tests.support.cases import DEVICE, DTYPES, INTERPRET, Shape, assert_same, draw, tiles, with_variants
from tests.support.packings import Packing, draw_packed
from tests.support.replaying import kinds_of, never_replaying, replaying

pytestmark = [
    pytest.mark.skipif(
        not INTERPRET and not launching.ENABLED, reason="nothing is replayed with this version of Triton, or on AMD"
    ),
    pytest.mark.covers(mode="dense", family="portable", dtype="float16", framework="torch"),
]
SHAPE = Shape(batch=2, kv_heads=1, group=2, q_len=20, kv_len=40, dim=32, dim_v=16)
PACKING = Packing.of(9, 10, 31)
# A call is replayed from the third of its kind on. In a call with gradients, each pass is replayed.
CALLS = 4


def check_replays(variant: str, drawn: Callable[[int], tuple[Inputs, dict[str, Any]]]) -> None:
    """Calls of one kind, each with other values, one after the other: forward alone and with every gradient."""
    with replaying(variant) as (op, replays):
        for number in range(CALLS):
            inputs, options = drawn(number)
            with torch.no_grad():
                got = inputs.call(op, **options)
                with never_replaying():
                    want = inputs.call(op, **options)
            assert torch.equal(got, want)
            assert got.stride() == want.stride()
        assert replays.count >= CALLS - 2
        for number in range(CALLS):
            inputs, options = drawn(number)
            results = golden.evaluate(op, inputs, **options)
            with never_replaying():
                wanted = golden.evaluate(op, inputs, **options)
            for name, want in wanted.items():
                assert_same(variant, name, results[name], want)
                assert results[name].stride() == want.stride(), name


def test_negated_views_are_not_replayed() -> None:
    """Kernels read memory, in which the numbers of such a view are negated."""
    with replaying("causal") as (op, _), torch.no_grad():
        inputs = draw("causal", SHAPE)
        for _ in range(CALLS):
            inputs.call(op)
        with never_replaying():
            want = replace(inputs, v=-inputs.v).call(op)
        assert torch.equal(replace(inputs, v=torch._neg_view(inputs.v)).call(op), want)


def same_kind(inputs: Inputs, number: int) -> Inputs:
    """The same sizes, scalars and strides, with other values of q, k and v, in new tensors each time."""

    def other(x: Tensor) -> Tensor:
        moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return moved.copy_(x.detach() * (1 - number / 8)).requires_grad_(x.requires_grad)

    return replace(inputs, q=other(inputs.q), k=other(inputs.k), v=other(inputs.v))


@with_variants
def test_dense(variant: str) -> None:
    inputs = draw(variant, replace(SHAPE, group=1))
    check_replays(variant, lambda number: (same_kind(inputs, number), {}))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_calls_of_other_seeds_are_replayed(packed: bool) -> None:
    inputs = draw_packed("causal_dropout", PACKING, DTYPES[0]) if packed else draw("causal_dropout", SHAPE)
    options = PACKING.options() if packed else {}

    def drawn(number: int) -> tuple[Inputs, dict[str, Any]]:
        # Also a seed of more than 32 bits, and the last one.
        seed = (3, 2**40, 0, 2**63 - 1)[number]
        return replace(same_kind(inputs, number), scalars={"dropout_p": 0.4, "seed": seed}), options

    check_replays("causal_dropout", drawn)


def test_a_backward_has_the_seed_of_its_forward() -> None:
    """Also if other calls of the kind come in between."""
    inputs = replace(draw("causal_dropout", SHAPE), scalars={"dropout_p": 0.4})
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in ("q", "k", "v")}
    with replaying("causal_dropout") as (op, replays):

        def results() -> list[Tensor]:
            outputs = [op(**leaves, dropout_p=0.4, seed=seed) for seed in range(6)]
            found = [torch.autograd.grad(o, [*leaves.values()], inputs.do) for o in reversed(outputs)]
            return [*outputs, *(x for gradients in found for x in gradients)]

        with never_replaying():
            want = results()
        for _ in range(2):
            before = replays.count
            got = results()
        assert replays.count - before == 12
        for x, wanted in zip(got, want, strict=True):
            assert torch.equal(x, wanted)


def test_calls_that_draw_a_seed_are_replayed() -> None:
    """They draw what calls without replay draw."""
    inputs = replace(draw("causal_dropout", SHAPE), scalars={"dropout_p": 0.4})
    with replaying("causal_dropout") as (op, replays), torch.no_grad():
        counts = []
        for number in range(CALLS):
            results = []
            for never in (False, True):
                torch.manual_seed(number)
                with never_replaying() if never else nullcontext():
                    results.append(inputs.call(op))
            assert torch.equal(*results)
            counts.append(replays.count)
        # Another test of this process may have recorded calls of this kind, so that the first ones are replayed, too.
        assert counts[-1] - counts[1] == CALLS - 2
        before = replays.count
        by_tensor, by_number = (inputs.call(op, seed=seed) for seed in (torch.tensor(5), 5))
        assert replays.count - before == 2
        assert torch.equal(by_tensor, by_number)
        with pytest.raises(ArgumentError, match="causal_dropout: seed: expected an int from 0 to"):
            inputs.call(op, seed=2**63)
        with pytest.raises(ArgumentError, match="causal_dropout: seed: expected an int from 0 to"):
            inputs.call(op, seed=-1)


@pytest.mark.parametrize("variant", ["gpt_oss", "relative_bias"])
def test_gradients_that_a_launch_sums_are_replayed(variant: str) -> None:
    inputs = draw(variant, SHAPE)
    with replaying(variant) as (op, replays):
        for number in range(CALLS):
            before = replays.count
            golden.evaluate(op, same_kind(inputs, number))
    # Both passes of the last call are replayed.
    assert replays.count - before == 2


@pytest.mark.parametrize("variant", ["causal", "document", "natten", "alibi", "forgetting", "gpt_oss"])
def test_packed(variant: str) -> None:
    inputs = draw_packed(variant, PACKING, DTYPES[0])
    check_replays(variant, lambda number: (same_kind(inputs, number), PACKING.options()))


@pytest.mark.parametrize("variant", ["causal", "document", "forgetting"])
def test_segments(variant: str) -> None:
    inputs = draw(variant, replace(SHAPE, kv_len=SHAPE.q_len))
    ids = torch.arange(SHAPE.q_len, dtype=torch.int32, device=DEVICE).expand(SHAPE.batch, -1) // 7
    options = {"q_segment_ids": ids.contiguous()}
    check_replays(variant, lambda number: (same_kind(inputs, number), options))


@pytest.mark.parametrize("variant", ["document", "natten"])
def test_schedule(variant: str) -> None:
    """Calls with one schedule are replayed. With another schedule of the same size, they use that schedule's tables."""
    inputs = draw(variant, SHAPE)
    schedule = make_schedule(golden.load_op(variant), inputs)
    check_replays(variant, lambda number: (same_kind(inputs, number), {"schedule": schedule}))


def test_paged() -> None:
    """Calls on caches, with and without a plan. Lengths and pages change, and the plan changes with them."""
    case = draw_case("alibi", 16, (1,) * 5)
    lengths = case.kwargs["kv_lengths"]
    with replaying("alibi") as (op, replays), torch.no_grad():
        for planned in (False, True):
            before = replays.count
            for number in range(CALLS):
                options = case.kwargs | case.own | {"kv_lengths": torch.clamp(lengths - number, 0)}
                plan = op.plan(case.q, case.k, **case.kwargs | {"kv_lengths": options["kv_lengths"]})
                if planned:
                    options["schedule"] = plan
                k, v = case.k.clone(), case.v.clone()
                got = op(case.q, k, v, **options)
                with never_replaying():
                    assert torch.equal(got, op(case.q, k, v, **options))
            assert replays.count >= before + CALLS - 2


def test_dense_with_split_keys() -> None:
    inputs = draw("document", replace(SHAPE, kv_len=520, q_len=2), positions=530)
    check_replays("document", lambda number: (same_kind(inputs, number), {"q_offset": "end"}))


@pytest.mark.parametrize("packed", [False, True], ids=["doc", "cu_seqlens"])
def test_integers_of_another_dtype(packed: bool) -> None:
    """Each call first casts the integers' current values; the rest of the call is replayed."""
    inputs = draw_packed("causal", PACKING, DTYPES[0]) if packed else draw("document", SHAPE)
    with replaying("causal" if packed else "document") as (op, replays), torch.no_grad():
        if packed:
            options = {name: x.long() for name, x in PACKING.options().items()}
        else:
            options = {"doc": inputs.tensors["doc"].long()}
        changed = options["cu_seqlens_q" if packed else "doc"]
        plain = dict(inputs.tensors) if packed else {}
        for number in range(CALLS + 1):
            got = op(inputs.q, inputs.k, inputs.v, **plain, **options)
            narrow = {name: x.to(torch.int32) for name, x in options.items()}
            with never_replaying():
                assert torch.equal(got, op(inputs.q, inputs.k, inputs.v, **plain, **narrow))
            if packed:
                changed[1] -= 1
            else:
                changed[:, number::3] += 1
        assert replays.count >= CALLS - 2


def test_options() -> None:
    inputs = draw("causal", SHAPE)
    offsets = torch.tensor([3, -4], dtype=torch.int32, device=DEVICE)
    every: list[dict[str, Any]] = [
        {"q_offset": offsets},
        {"scale": 0.3, "q_offset": "end"},
        {"config": tiles(16, 32)},
    ]
    for options in every:

        def drawn(number: int, options: dict[str, Any] = options) -> tuple[Inputs, dict[str, Any]]:
            return same_kind(inputs, number), options

        check_replays("causal", drawn)


def _bshd(x: Tensor) -> Tensor:
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2)


def _unaligned(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.detach().flatten()])[1:].view(x.shape)


def test_kinds_are_told_apart() -> None:
    """Calls that differ in one property take turns: none is replayed as another."""
    inputs = draw("window", SHAPE)
    longer = draw("window", replace(SHAPE, kv_len=64))
    q, k, v = inputs.q, inputs.k, inputs.v
    calls: list[tuple[Inputs, dict[str, Any]]] = [
        (inputs, {}),
        (replace(inputs, q=_unaligned(q), k=_unaligned(k)), {}),
        (replace(inputs, q=_bshd(q)), {}),
        (replace(inputs, k=_bshd(k), v=v[:1, :, :1].expand(v.shape)), {}),
        (replace(inputs, k=k[:1].expand(k.shape)), {}),
        (replace(inputs, v=k[..., : v.shape[3]]), {}),  # begins at the same address as k
        (replace(inputs, q=q.float(), k=k.float(), v=v.float()), {}),
        (longer, {}),
        (replace(inputs, scalars=dict.fromkeys(inputs.scalars, 3)), {}),
        (inputs, {"q_offset": 1}),
        (inputs, {"q_offset": 16}),
        (inputs, {"scale": 1}),
        (inputs, {"scale": 1.0}),
        (inputs, {"scale": -1.0}),
        (inputs, {"scale": 0.0}),
        (inputs, {"return_lse": True}),
        (replace(inputs, q=q[:, :, :0]), {}),
        (replace(inputs, k=k[:, :, :0], v=v[:, :, :0]), {}),
    ]
    with replaying("window") as (op, replays), torch.no_grad():
        for _ in range(4):
            for call, options in calls:
                got = call.call(op, **options)
                with never_replaying():
                    want = call.call(op, **options)
                for x, wanted in zip(_tuple(got), _tuple(want), strict=True):
                    assert torch.equal(x, wanted)
                    assert (x.dtype, x.stride()) == (wanted.dtype, wanted.stride())
        assert replays.count >= 20


def _tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def test_one_tensor_for_all() -> None:
    """A call with one tensor as q, k and v is another kind than a call with three tensors of the same sizes."""
    one, two, three = torch.randn(3, 1, 2, 24, 32, device=DEVICE)
    calls = [(one, one, one), (one, two, three), (one, one, two), (one, two, two), (two, one, two)]
    with replaying("causal") as (op, _), torch.no_grad():
        for _ in range(4):
            for q, k, v in calls:
                got = op(q, k, v)
                with never_replaying():
                    assert torch.equal(got, op(q, k, v))


def test_arguments_that_equal_good_ones_are_refused() -> None:
    inputs = draw("causal", SHAPE)
    with replaying("causal") as (op, replays), torch.no_grad():
        for _ in range(CALLS):
            inputs.call(op, q_offset=1)
        assert replays.count == CALLS - 2
        with pytest.raises(ArgumentError, match="q_offset: expected an int"):
            inputs.call(op, q_offset=True)
        with pytest.raises(ArgumentError, match="q_offset: expected an int"):
            inputs.call(op, q_offset=1.0)
        with pytest.raises(ArgumentError, match="q: expected a torch"):
            op(None, inputs.k, inputs.v, q_offset=1)
        with pytest.raises(TypeError, match="missing 3 required"):
            op()


def test_cache_of_replayed_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_replay, "MOST_KINDS", 4)
    with replaying("causal") as (op, replays), torch.no_grad():
        for length in [*range(16, 26), 20, 20, 20, 20]:
            inputs = draw("causal", replace(SHAPE, q_len=length))
            got = inputs.call(op)
            with never_replaying():
                assert torch.equal(got, inputs.call(op))
            assert len(kinds_of(op)) <= 4
        assert replays.count > 0


# Lengths that no other test has: calls of an earlier test would be replayed at once.
@pytest.mark.parametrize(("name", "length"), [("launch_enter_hook", 61), ("launch_exit_hook", 62)])
def test_hooks_of_profilers_see_every_launch(name: str, length: int) -> None:
    from triton import knobs

    inputs = draw("causal", replace(SHAPE, q_len=length))
    launches: list[Any] = []
    with replaying("causal") as (op, replays), torch.no_grad():
        for _ in range(CALLS):
            want = inputs.call(op)
        assert replays.count == CALLS - 2
        hooks = getattr(knobs.runtime, name)
        hooks.add(launches.append)
        try:
            assert torch.equal(inputs.call(op), want)
        finally:
            hooks.remove(launches.append)
        assert replays.count == CALLS - 2
        assert len(launches) == (0 if INTERPRET else 1)
        inputs.call(op)
        assert replays.count == CALLS - 1


def test_gradients_are_never_lost() -> None:
    """A call that would be replayed, except that an input requires a gradient."""
    inputs = draw("causal", SHAPE)
    with replaying("causal") as (op, _):
        for _ in range(CALLS):
            with torch.no_grad():
                assert not inputs.call(op).requires_grad
        assert inputs.call(op).requires_grad
        detached = replace(inputs, q=inputs.q.detach(), k=inputs.k.detach(), v=inputs.v.detach())
        assert not detached.call(op).requires_grad
        assert replace(detached, v=inputs.v).call(op).requires_grad


def test_forward_mode_is_refused_as_ever() -> None:
    inputs = draw("causal", SHAPE)
    q, k, v = inputs.q.detach(), inputs.k.detach(), inputs.v.detach()
    with replaying("causal") as (op, _), torch.no_grad():
        for _ in range(CALLS):
            op(q, k, v)
        with pytest.raises(NotImplementedError, match="causal: q: derivatives in forward mode"):
            torch.func.jvp(lambda q: op(q, k, v), (q,), (q,))
        refused = pytest.raises(NotImplementedError, match="causal: q: derivatives in forward mode")
        with torch.autograd.forward_ad.dual_level(), refused:
            op(torch.autograd.forward_ad.make_dual(q, q), k, v)


def test_compiled_ops_are_traced_as_written() -> None:
    torch.compiler.reset()
    inputs = draw("document", SHAPE)
    with replaying("document") as (op, _), torch.no_grad():
        compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
        for _ in range(CALLS):
            assert torch.equal(inputs.call(compiled), inputs.call(op))


@pytest.mark.gpu
def test_autocast() -> None:
    inputs = draw("causal", SHAPE, torch.float32)
    with replaying("causal") as (op, replays), torch.no_grad():
        for _ in range(CALLS):
            assert inputs.call(op).dtype == torch.float32
        with torch.autocast(DEVICE, torch.bfloat16):
            for _ in range(CALLS):
                assert inputs.call(op).dtype == torch.bfloat16
        assert replays.count >= CALLS - 2


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [None, PACKING], ids=["dense", "packed"])
@with_variants
def test_captured_in_a_cuda_graph(variant: str, tokens: Packing | None) -> None:
    """Replays of a graph give the results of calls, for the current values of its inputs."""
    # In int64, so that the graph casts their current values.
    options: dict[str, Any] = {} if tokens is None else {name: x.long() for name, x in tokens.options().items()}
    inputs = draw(variant, SHAPE) if tokens is None else draw_packed(variant, tokens, DTYPES[0])
    trained = inputs.leaves()
    names = ["o", "lse", *(f"d{name}" for name in trained)]

    def step() -> tuple[Tensor, ...]:
        o, lse = inputs.call(golden.load_op(variant), return_lse=True, **options)
        return (o, lse, *torch.autograd.grad((o, lse), list(trained.values()), (inputs.do, inputs.dlse)))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for factor in (1.0, 0.5):
        with torch.no_grad():
            inputs.q.mul_(factor)
        graph.replay()
        for name, got, want in zip(names, captured, step(), strict=True):
            assert_same(variant, name, got, want)
