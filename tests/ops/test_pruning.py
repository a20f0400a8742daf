"""`prune=`: each row leaves out at most the share that is asked for, and results and gradients stay in its bounds.

Weights are computed in float64, written out here, from inputs that make the bound as tight as it can be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor

from generated._runtime.core.checks import ArgumentError
from generated._runtime.core.pruning import GROUP
from generated._runtime.core.settings import INTERPRET
from generated._runtime.jax.pruning import first_keys as jax_first_keys
from generated._runtime.jax.sequences import SequenceArguments
from generated._runtime.torch.pruning import first_keys
from generated.jax import forgetting as jax_forgetting
from generated.torch import forgetting, forgetting_pruned

pytestmark = [
    pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 the ops run their kernels"),
    pytest.mark.covers(family="reference"),
]

LENGTH, HEADS, KV_HEADS, DIM = 1100, 4, 2, 16
TOKENS = ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions", "kv_lengths")
with_frameworks = pytest.mark.parametrize("framework", ["torch", "jax"])


def found(framework: str, q: Tensor, k: Tensor, g: Tensor, prune: float, **call: Any) -> Tensor:
    """The first key of each row of a call; v is k."""
    given = {"scale": None, "q_offset": 0, "cu_seqlens_q": None, "cu_seqlens_k": None, "padding_id": -1, **call}
    given |= {name: call.get(name) for name in TOKENS}
    if framework == "torch":
        return first_keys("forgetting", q, k, k, g, prune, layout="bhsd", **given)
    scale = given.pop("scale")
    arrays = {name: jnp.asarray(x.numpy()) if isinstance(x, Tensor) else x for name, x in given.items()}
    qkg = [jnp.asarray(x.numpy()) for x in (q, k, g)]
    sequences = SequenceArguments(**arrays)
    return torch.from_numpy(
        np.array(jax_first_keys("forgetting", qkg[0], qkg[1], qkg[1], qkg[2], prune, scale, "bhsd", sequences))
    )


def drawn(seed: int, *, size: float = 1.0, rise: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and g whose heads forget within about 2, 10, 50 and 1000 keys; `rise` is added to g."""
    generator = torch.Generator().manual_seed(seed)
    q = size * torch.randn(1, HEADS, LENGTH, DIM, generator=generator)
    k = torch.randn(1, KV_HEADS, LENGTH, DIM, generator=generator)
    g = -torch.rand(1, LENGTH, HEADS, generator=generator) * torch.tensor([1.0, 0.2, 0.04, 0.002])
    return q, k, g + rise


def opposed(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's own key has the least score that norms allow, and all keys far away have the largest."""
    q, k, g = drawn(seed)
    direction = torch.nn.functional.normalize(torch.ones(DIM), dim=0) * 5
    sign = torch.where(torch.arange(LENGTH) % 2 == 0, 1.0, -1.0)[:, None]
    return (-sign * direction).expand_as(q), (sign * direction).expand_as(k), g


def aligned(rate: float) -> tuple[Tensor, Tensor, Tensor]:
    """All scores are close to their bound, and all heads forget at one rate."""
    q, k, _ = drawn(4)
    direction = torch.nn.functional.normalize(torch.ones(DIM), dim=0) * 5
    return 0.01 * q + direction, 0.01 * k + direction, torch.full((1, LENGTH, HEADS), -rate)


def log_weights(q: Tensor, k: Tensor, g: Tensor, scale: float = DIM**-0.5) -> Tensor:
    """Logs of the weights of all pairs, float64, -inf where the mask drops one."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1).double()
    total = g.double().cumsum(1).mT
    logits = scale * q.double() @ k.mT + total[..., : q.shape[2], None] - total[..., None, : k.shape[2]]
    return logits.masked_fill(torch.ones(q.shape[2], k.shape[2]).triu(1).bool(), -math.inf)


def share_before(logits: Tensor, first: Tensor) -> Tensor:
    """The share of each row's denominator that comes from the keys before `first`."""
    before = torch.arange(logits.shape[-1]) < first[..., None]
    return logits.softmax(-1).masked_fill(~before, 0.0).sum(-1)


@with_frameworks
@pytest.mark.parametrize("prune", [2**-24, 0.01, 0.9])
@pytest.mark.parametrize(
    "inputs", [drawn, opposed, lambda seed: drawn(seed, size=8.0), lambda seed: drawn(seed, rise=0.005)]
)
def test_share_is_at_most_what_is_asked_for(
    framework: str, prune: float, inputs: Callable[[int], tuple[Tensor, Tensor, Tensor]]
) -> None:
    q, k, g = inputs(int(1 / prune) % 97)
    first = found(framework, q, k, g, prune)
    assert share_before(log_weights(q, k, g), first).max() <= prune
    assert (first % GROUP == 0).all()
    assert (first <= torch.arange(LENGTH)).all()
    assert (first[:, 0] > 0).float().mean() > 0.3, "a head that forgets at once leaves keys out"


def test_bound_is_tight() -> None:
    """If scores meet their bound, the first row of a group could not leave out one more group of keys."""
    q, k, g = aligned(0.05)
    first = found("torch", q, k, g, 1e-3)
    more = share_before(log_weights(q, k, g), first + GROUP)[:, :, 3 * GROUP :: GROUP]
    assert more.min() > 1e-3
    assert first[0, 0, 3 * GROUP] > 0


@with_frameworks
def test_no_decay_leaves_nothing_out(framework: str) -> None:
    q, k, g = drawn(5)
    assert (found(framework, q, k, torch.zeros_like(g), 0.01) == 0).all()


@with_frameworks
def test_numbers_that_bound_nothing(framework: str) -> None:
    q, k, g = drawn(6)
    k[0, 0, 40] = math.inf
    q[0, 2, :GROUP] = math.nan
    first = found(framework, q, k, g, 0.01)
    assert (first[0, :2] == 0).all()
    assert (first[0, 2, :GROUP] == 0).all()


@with_frameworks
@pytest.mark.parametrize("scale", [-0.7, 0.0, 0.05])
def test_scales(framework: str, scale: float) -> None:
    q, k, g = drawn(7)
    first = found(framework, q, k, g, 0.01, scale=scale)
    assert share_before(log_weights(q, k, g, scale), first).max() <= 0.01
    assert first.any()


@with_frameworks
def test_offsets(framework: str) -> None:
    """A call of the rows from 700 on finds first keys by position, which keep to the share in the whole call."""
    q, k, g = drawn(8)
    whole, begin = log_weights(q, k, g), 700
    for offset in (begin, "end", torch.tensor([begin])):
        first = found(framework, q[:, :, begin:], k, g, 0.01, q_offset=offset)
        assert first.shape == (1, HEADS, LENGTH)
        assert share_before(whole, first)[..., begin:].max() <= 0.01
        assert first[0, 0, begin:].min() > 0


@with_frameworks
def test_packed_sequences(framework: str) -> None:
    q, k, g = drawn(9)
    lengths = [300, 1, 0, 700, 99]
    begins = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    first = found(framework, q[0].transpose(0, 1), k[0].transpose(0, 1), g[0], 0.01, cu_seqlens_q=begins)
    assert first.shape == (HEADS, LENGTH)
    for begin, end in zip(begins.tolist(), begins[1:].tolist(), strict=False):
        rows = slice(begin, end)
        logits = log_weights(q[:, :, rows], k[:, :, rows], g[:, rows])
        if end > begin:
            assert share_before(logits, first[None, :, rows]).max() <= 0.01
    assert first[0, 800:1000].min() > 0


@with_frameworks
def test_segments_and_positions(framework: str) -> None:
    q, k, g = drawn(10)
    ids = (torch.arange(LENGTH) // 500)[None].to(torch.int32)
    ids[:, 1050:] = -1
    positions = (torch.arange(LENGTH) % 500)[None].to(torch.int32)
    logits = log_weights(q, k, g).masked_fill(ids[:, None, :, None] != ids[:, None, None], -math.inf)[:, :, :1050]
    first = found(framework, q, k, g, 0.01, q_segment_ids=ids)
    assert share_before(logits, first[..., :1050]).max() <= 0.01
    assert first[0, 0, 950:1000].min() >= 512
    by_position = found(framework, q, k, g, 0.01, q_segment_ids=ids, q_positions=positions, kv_positions=positions)
    rows = by_position + torch.arange(LENGTH) - positions[:, None]
    assert torch.equal(rows, first)
    lengths = found(framework, q, k, g, 0.01, kv_lengths=torch.tensor([600], dtype=torch.int32))
    assert (lengths[..., 640:] == 0).all(), "rows without their own key leave nothing out"


@with_frameworks
@pytest.mark.parametrize("restarts", [False, True], ids=["go on", "restart"])
def test_positions_of_an_interrupted_segment(framework: str, restarts: bool) -> None:
    """If they restart, a query sees keys of later rows, before the first key of its own: nothing is left out."""
    q, k, g = drawn(17)
    ids = torch.tensor([0] * 400 + [1] * 300 + [0] * 400, dtype=torch.int32)[None]
    positions = torch.cat([torch.arange(n) for n in (400, 300, 400)])[None].to(torch.int32)
    if not restarts:
        positions[:, 700:] += 400
    first = found(framework, q, k, g, 0.01, q_segment_ids=ids, q_positions=positions, kv_positions=positions)
    left_out = (ids[..., None] == ids[:, None]) & (positions[:, None] < first[..., None])
    assert left_out[0, 0].any() != restarts
    total = g.double().cumsum(1).mT
    logits = DIM**-0.5 * q.double() @ k.repeat_interleave(2, 1).double().mT + total[..., None] - total[..., None, :]
    kept = (ids[..., None] == ids[:, None]) & (positions[..., None] >= positions[:, None])
    share = logits.masked_fill(~kept, -math.inf).softmax(-1).masked_fill(~left_out, 0.0).sum(-1)
    assert share.max() <= 0.01


@with_frameworks
def test_packed_calls_without_queries(framework: str) -> None:
    q, k, g = drawn(18)
    begins = torch.tensor([0, 0]), torch.tensor([0, LENGTH])
    first = found(
        framework,
        q[0].transpose(0, 1)[:0],
        k[0].transpose(0, 1),
        g[0],
        0.01,
        cu_seqlens_q=begins[0],
        cu_seqlens_k=begins[1],
    )
    assert first.shape == (HEADS, 0)


def test_results_and_gradients_stay_in_their_bounds() -> None:
    """The bounds of docs/how-to/pruning.md, with a share so large that rounding errors are negligible."""
    prune = 0.3
    q, k, g = aligned(2.0)
    v, do = torch.randn(2, 1, HEADS, LENGTH, DIM).unbind()
    v = v[:, :KV_HEADS]
    inputs = [x.clone().requires_grad_() for x in (q, k, v, g)]
    o, lse = forgetting(*inputs[:3], g=inputs[3], return_lse=True)
    whole = torch.autograd.grad(o, inputs, do)
    pruned, pruned_lse = forgetting(*inputs[:3], g=inputs[3], return_lse=True, prune=prune)
    found_gradients = torch.autograd.grad(pruned, inputs, do)
    assert (pruned - o).abs().max() > 0.1
    v_norm = v.norm(dim=-1).amax(-1).repeat_interleave(2, 1)[..., None]
    assert ((pruned - o).norm(dim=-1) <= 2 * prune * v_norm).all()
    assert (pruned_lse <= lse + 1e-5).all()
    assert (pruned_lse >= lse + math.log1p(-prune) - 1e-5).all()
    row = 6 * prune * do.norm(dim=-1) * v_norm  # bounds the sum of the errors of ds in a row
    dq, dk, dv, dg = (x - y for x, y in zip(found_gradients, whole, strict=True))
    scale, k_norm = DIM**-0.5, k.norm(dim=-1).amax(-1).repeat_interleave(2, 1)[..., None]
    assert (dq.norm(dim=-1) <= scale * row * k_norm).all()
    of_keys = (scale * row * q.norm(dim=-1)).sum(-1).unflatten(1, (KV_HEADS, 2)).sum(-1)
    assert (dk.norm(dim=-1).amax(-1) <= of_keys).all()
    assert (dv.norm(dim=-1).amax(-1) <= (2 * prune * do.norm(dim=-1)).sum(-1).unflatten(1, (KV_HEADS, 2)).sum(-1)).all()
    assert (dg.abs() <= row.flip(-1).cumsum(-1).flip(-1).mT + 1e-4).all()


def test_segments_and_positions_end_to_end() -> None:
    q, k, g = drawn(15)
    ids = (torch.arange(LENGTH) // 500)[None]
    positions = (torch.arange(LENGTH) % 500)[None]
    calls: list[dict[str, Any]] = [
        {"q_segment_ids": ids},
        {"q_segment_ids": ids, "q_positions": positions},
        {"kv_lengths": torch.tensor([900])},
        {"layout": "bshd", "q_segment_ids": ids},
    ]
    for call in calls:
        queries, keys = (x.transpose(1, 2) if "layout" in call else x for x in (q, k))
        whole = forgetting(queries, keys, keys, g=g, return_lse=True, **call)
        pruned = forgetting(queries, keys, keys, g=g, return_lse=True, prune=2**-24, **call)
        for x, y in zip(pruned, whole, strict=True):
            torch.testing.assert_close(x, y)


def test_transforms_of_jax() -> None:
    q, k, g = (jnp.asarray(x.numpy()) for x in drawn(16))
    q, k, g = q[:, :, :600], k[:, :, :600], g[:, :600]

    def total(q: Any, k: Any, g: Any, prune: float | None) -> Any:
        o, lse = jax_forgetting(q, k, k, g=g, layout="bhsd", return_lse=True, prune=prune)
        return (o * jnp.cos(o)).sum() + lse.sum()

    pruned = jax.jit(jax.grad(total, argnums=(0, 1, 2)), static_argnums=3)(q, k, g, 2**-24)
    for x, y in zip(pruned, jax.grad(total, argnums=(0, 1, 2))(q, k, g, None), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-3)
    batch = [jnp.stack([x, x[::-1]]) for x in (q, k, g)]
    each = jax.vmap(lambda q, k, g: jax_forgetting(q, k, k, g=g, layout="bhsd", prune=0.9))(*batch)
    alone = jax_forgetting(q, k, k, g=g, layout="bhsd", prune=0.9)
    np.testing.assert_allclose(each[0], alone, rtol=1e-3, atol=1e-3)
    schedule = jax_forgetting.schedule(q, k, k, layout="bhsd")
    with pytest.raises(ArgumentError, match="schedule: expected None beside prune"):
        jax_forgetting(q, k, k, g=g, layout="bhsd", prune=0.1, schedule=schedule)


def test_what_is_left_out_is_a_mask() -> None:
    q, k, g = drawn(12)
    first = found("torch", q, k, g, 0.9)
    expected = forgetting_pruned(q, k, k, g=g, first_key=first)
    torch.testing.assert_close(forgetting(q, k, k, g=g, prune=0.9), expected, rtol=0, atol=0)
    o = torch.compile(forgetting, fullgraph=True, backend="eager")(q, k, k, g=g, prune=0.9)
    torch.testing.assert_close(o, expected, rtol=0, atol=0)
    batch = [torch.stack([x, x.flip(1)]) for x in (q, k, g)]
    mapped = torch.func.vmap(lambda q, k, g: forgetting(q, k, k, g=g, prune=0.9))(*batch)
    torch.testing.assert_close(mapped[0], expected)


@pytest.mark.parametrize("prune", [0, 1, -0.1, True, math.nan, "1e-8"])
def test_bad_shares(prune: Any) -> None:
    q, k, g = drawn(13)
    with pytest.raises(ArgumentError, match="prune: expected a number between 0 and 1"):
        forgetting(q, k, k, g=g, prune=prune)


def test_calls_that_cannot_prune() -> None:
    q, k, g = drawn(14)
    with pytest.raises(ArgumentError, match="schedule: expected None beside prune"):
        forgetting(q, k, k, g=g, prune=0.1, schedule=forgetting.schedule(q, k, k))
    small = [x.to(torch.float8_e4m3fn) for x in (q, k, k)]
    with pytest.raises(ArgumentError, match="prune: expected None where q, k and v are float8_e4m3fn, got"):
        forgetting(*small, g=g, prune=0.1, q_scale=1.0, k_scale=1.0, v_scale=1.0)
    with pytest.raises(ArgumentError, match="prune: expected None beside page_table"):
        forgetting(q, k, k, g=g, prune=0.1, page_table=torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(ArgumentError, match="forgetting: g: expected"):
        forgetting(q, k, k, prune=0.1)
