"""Calls over several ranks that are recorded and replayed: they have the bits of calls that are computed anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import calls
from generated._runtime.torch.parallel.collectives import Alone
from generated._runtime.torch.parallel.context_parallel import MOST_KINDS
from generated._runtime.torch.parallel.tape import Notes, Tape
from generated.torch_parallel import context_parallel, plan
from tests.support.ranks import ThreadRank, grid_of, run_ranks

pytestmark = pytest.mark.covers(family="reference", framework="torch")

HEADS, DIM, SEQ = (4, 2), 16, 40


def step(call: Any, tensors: dict[str, Tensor], do: Tensor, **given: Any) -> list[Tensor]:
    """o and the gradients of leaves, which have the strides of `tensors`."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    o = call(**leaves, **given)
    return [o.detach(), *torch.autograd.grad(o, list(leaves.values()), do)]


def compared(comm: ThreadRank, variant: str, strategy: str, **documents: Any) -> None:
    op = calls.load_op(variant)
    mesh = grid_of(comm, 2) if strategy == "2d" else comm
    layout = plan(op, mesh, seq=SEQ, heads=HEADS, head_dim=DIM, strategy=strategy, **documents)
    again, anew = context_parallel(op, layout), context_parallel(op, layout, check=False)
    assert again is context_parallel(op, layout)
    given = {"slope": torch.tensor([0.1, 0.2, 0.3, 0.4])} if variant == "alibi" else {}
    for number in range(4):
        torch.manual_seed(number)
        # q, k and v are views of one tensor of all heads, as projections return it.
        rows = layout.local
        sizes = (rows, sum(HEADS) + HEADS[1], DIM) if documents else (1, sum(HEADS) + HEADS[1], rows, DIM)
        parts = torch.randn(sizes).split([HEADS[0], HEADS[1], HEADS[1]], 1)
        do = torch.randn(parts[0].shape)
        anew._tapes.clear()
        tensors = dict(zip(("q", "k", "v"), parts, strict=True))
        got, want = (step(call, tensors, do, **given) for call in (again, anew))
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x, y), f"{variant} by {strategy}, call {number}"
    assert [type(tape) for tape in again._tapes.values()] == [Tape, Tape], "a call is not noted"


@pytest.mark.parametrize("strategy", ["heads", "gather", "exchange", "ring", "2d"])
def test_a_noted_call_has_the_bits_of_one_that_is_computed_anew(strategy: str) -> None:
    run_ranks(4 if strategy == "2d" else 2, lambda comm: compared(comm, "causal", strategy))
    if strategy != "2d":
        run_ranks(2, lambda comm: compared(comm, "causal", strategy, cu_seqlens=[0, 5, 29, SEQ]))


def test_the_variants_own_tensors_are_read_in_each_call() -> None:
    run_ranks(2, lambda comm: compared(comm, "alibi", "gather"))


def test_other_arguments_are_another_kind_of_call() -> None:
    def of_rank(comm: ThreadRank) -> None:
        op = calls.load_op("window")
        layout = plan(op, comm, seq=SEQ, heads=HEADS, head_dim=DIM, strategy="gather", size=8)
        call = context_parallel(op, layout)
        q, k = torch.randn(1, HEADS[0], layout.local, DIM), torch.randn(1, HEADS[1], layout.local, DIM)
        for size in (8, 8, 8, 4):
            o = call(q, k, k.clone(), size=size)
        assert torch.equal(o, context_parallel(op, layout, check=False)(q, k, k.clone(), size=4))
        # k and v may be one tensor in one call and two in the next.
        for _ in range(3):
            call(q, k, k, size=8)
        assert torch.equal(call(q, k, 2 * k, size=8), 2 * call(q, k, k, size=8))

    run_ranks(2, of_rank)


@pytest.mark.parametrize("strategy", ["heads", "gather", "exchange", "ring"])
def test_a_tape_serves_every_seed(strategy: str) -> None:
    def of_rank(comm: ThreadRank) -> None:
        op = calls.load_op("causal_dropout")
        layout = plan(op, comm, seq=SEQ, heads=HEADS, head_dim=DIM, strategy=strategy)
        again, anew = context_parallel(op, layout), context_parallel(op, layout, check=False)
        sizes = {"q": HEADS[0], "k": HEADS[1], "v": HEADS[1]}
        tensors = {name: torch.randn(1, heads, layout.local, DIM) for name, heads in sizes.items()}
        do, found = torch.randn(tensors["q"].shape), []
        for seed in range(2**63 - 80, 2**63):
            found.append(step(again, tensors, do, dropout_p=0.5, seed=seed))
            if seed % 20 == 19:
                anew._tapes.clear()
                want = step(anew, tensors, do, dropout_p=0.5, seed=seed)
                assert all(torch.equal(x, y) for x, y in zip(found[-1], want, strict=True))
        assert not torch.equal(found[-1][0], found[-2][0])
        assert [type(tape) for tape in again._tapes.values()] == [Tape, Tape], "a seed is another kind of call"
        assert len(again._checked) == 1
        with pytest.raises(ValueError, match="seed: expected an int from 0 to"):
            again(**tensors, dropout_p=0.5, seed=2**63)

    run_ranks(2, of_rank)


def test_the_kinds_that_are_used_are_kept() -> None:
    op, (q, k, v) = calls.load_op("window"), torch.randn(3, 1, HEADS[0], SEQ, DIM)
    call = context_parallel(op, plan(op, 1, seq=SEQ, heads=(4, 4), head_dim=DIM, size=8))
    for size in range(1, 200):
        call(q, k, v, size=1000)
        call(q, k, v, size=size)
    assert len(call._tapes) == len(call._checked) == MOST_KINDS
    assert [type(tape) for tape in call._tapes.values()].count(Tape) == 1


def test_gradients_of_own_tensors_and_tensors_that_masks_read_are_computed_anew() -> None:
    def of_rank(comm: ThreadRank) -> None:
        op, slope = calls.load_op("alibi"), torch.rand(HEADS[0], requires_grad=True)
        layout = plan(op, comm, seq=SEQ, heads=HEADS, head_dim=DIM, strategy="gather")
        call, q = context_parallel(op, layout), torch.randn(1, HEADS[0], layout.local, DIM)
        found = [torch.autograd.grad(call(q, q, q, slope=x).sum(), x)[0] for x in [slope] * 4]
        assert all(torch.equal(x, found[0]) for x in found)

    run_ranks(2, of_rank)


def noted(compute: Any, *given: Tensor) -> Tape | None:
    """The tape of a function of tensors."""
    with Notes(given, None, Alone()) as notes:
        result = compute(*given)
    tape: Tape | None = notes.tape([result])
    return tape


def test_a_tape_frees_what_is_not_read_again_and_returns_views() -> None:
    x = torch.arange(24.0).reshape(4, 6)
    tape = noted(lambda x: torch.cat([x[:, 3:], x[:, :3] + 1])[1:, ::2], x)
    assert tape is not None
    assert torch.equal(tape([x * 3])[0], torch.cat([3 * x[:, 3:], 3 * x[:, :3] + 1])[1:, ::2])
    registers: list[Any] = [x, *tape._constants]
    for function, arguments, keywords, first, count, dead in tape._steps:
        found = function(*arguments(registers), **{name: registers[place] for name, place in keywords})
        registers[first : first + count] = [found] if count == 1 else found
        for place in dead:
            registers[place] = None
    made = [each for each in registers[1:] if isinstance(each, Tensor) and each.is_floating_point()]
    assert len(made) == 1, "the result alone is left"


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + float(x.sum()),
        lambda x: x[x > 0],
        lambda x: x + torch.rand(6),
        lambda x: x.to("meta"),
    ],
    ids=["a number", "a size", "random", "another device"],
)
def test_what_depends_on_values_has_no_tape(compute: Any) -> None:
    assert noted(compute, torch.arange(24.0).reshape(4, 6)) is None


def test_memory_of_an_argument_under_another_name_has_no_tape() -> None:
    x, other = torch.arange(24.0).reshape(4, 6), torch.ones(6)
    alias = x.view(-1)[:6]
    assert noted(lambda x: x + other, x) is not None
    assert noted(lambda x: x + alias, x) is None
    assert noted(lambda x, y: x + y, x, x) is None


def test_a_layout_trains_after_inference() -> None:
    """The tables of a layout that the first call makes, in inference mode, are read where gradients are recorded."""

    def of_rank(comm: ThreadRank) -> None:
        op, g = calls.load_op("forgetting"), -torch.rand(SEQ, HEADS[0])
        layout = plan(op, comm, seq=SEQ, heads=HEADS, head_dim=DIM, strategy="exchange", cu_seqlens=[0, 5, 29, SEQ])
        call = context_parallel(op, layout)
        q, k = torch.randn(layout.local, HEADS[0], DIM), torch.randn(layout.local, HEADS[1], DIM)
        with torch.inference_mode():
            o = call(q, k, k, g=g)
        trained = call(q, k, k, g=g.requires_grad_())
        assert torch.equal(o, trained)
        assert torch.autograd.grad(trained.sum(), g)[0].abs().sum() > 0

    run_ranks(2, of_rank)


def test_there_may_be_no_batch_rows() -> None:
    def of_rank(comm: ThreadRank) -> None:
        op, q = calls.load_op("window"), torch.zeros(0, HEADS[0], SEQ, DIM)
        layout = plan(op, comm, seq=SEQ, heads=(4, 4), head_dim=DIM, strategy="exchange", size=4)
        rows = layout.shard(q, 2).requires_grad_()
        o = context_parallel(op, layout)(rows, rows, rows, size=4)
        assert o.shape == torch.autograd.grad(o.sum(), rows)[0].shape == rows.shape

    run_ranks(2, of_rank)
