"""The caches of JAX ops: 8-bit floats with scales, sums of a log-decay, values inside keys. Bits are those of torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from codegen.testing import golden
from codegen.testing.golden_jax import array, load_op, tensor
from generated import paging
from generated._runtime.jax import backend
from tests.kernels.test_paged import draw_case
from tests.kernels.test_paged_decay import draw_case as draw_decay_case
from tests.kernels.test_paged_jax import arrays, assert_same
from tests.support.cases import DEVICE, INTERPRET
from tests.support.scaled_caches import FP8, own_scales, quantised_case

pytestmark = pytest.mark.covers(mode="paged", family="portable", dtype="float32", framework="jax")

# ------------------------------------------------------------------------------------------------------- 8-bit floats


@pytest.mark.parametrize(
    ("variant", "kinds", "queries", "dtype", "page_layout"),
    [
        ("causal", ("number", "number"), (2,) * 5, FP8[0], "pshd"),
        ("alibi", ("head", "token"), (5, 0, 1, 40, 2), FP8[1], "pshd"),
        ("window", ("token", "head"), (1,) * 5, FP8[0], "phsd"),
    ],
)
def test_scaled_caches(
    variant: str, kinds: tuple[str, str], queries: tuple[int, ...], dtype: torch.dtype, page_layout: str
) -> None:
    case = draw_case(variant, 16, queries)
    case = quantised_case(case, dtype, *own_scales(case, kinds))
    q, k, v, given = arrays(case)
    if page_layout == "phsd":
        k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
    static = {name: x for name, x in given.items() if not isinstance(x, jax.Array)} | {"page_layout": page_layout}
    op = jax.jit(partial(load_op(variant), return_lse=True, **static))
    assert_same(op(q, k, v, **{name: x for name, x in given.items() if name not in static}), case.call())


def test_steps_in_a_loop_quantise_what_they_append() -> None:
    """Tokens come one at a time into donated caches, in the body of a loop: the bits of torch."""
    tokens, size, heads, dim = 10, 8, 2, 16
    k, v = torch.randn(2, tokens, 1, heads, dim, device=DEVICE)
    q = torch.randn(tokens, 1, 1, 4, dim, device=DEVICE)
    table = torch.tensor([[2, 0]], device=DEVICE, dtype=torch.int32)
    shape = (3, size, heads, dim)
    caches = [torch.zeros(shape, device=DEVICE).to(FP8[0]) for _ in range(2)]
    caches += [torch.zeros(shape[:3], device=DEVICE) for _ in range(2)]
    names = ("k_cache", "v_cache", "k_scale", "v_scale")

    def step(op: Any, table: Any, caches: Any, place: Any, q: Any, k: Any, v: Any) -> Any:
        slots = paging.slots(table, place, page_size=size)
        caches = paging.append(k, v, slots=slots, **dict(zip(names, caches, strict=True)))
        k_cache, v_cache, k_scale, v_scale = caches
        pages = {"page_table": table, "kv_lengths": place + 1}
        return caches, op(q, k_cache, v_cache, k_scale=k_scale, v_scale=v_scale, layout="bshd", **pages)

    @partial(jax.jit, donate_argnums=0)
    def decode(caches: Any, *tokens: Any) -> Any:
        return jax.lax.scan(lambda caches, x: step(load_op("causal"), array(table), caches, *x), caches, tokens)

    given = [array(x) for x in caches]
    places = jnp.arange(tokens)[:, None]
    found, o = decode(tuple(given), places, *map(array, (q, k, v)))
    assert all(x.is_deleted() for x in given)
    for place in range(tokens):
        at = torch.tensor([place], device=DEVICE)
        _, want = step(golden.load_op("causal"), table, caches, at, q[place], k[place], v[place])
        # Division by a scale has other last digits on a GPU, so a value between two 8-bit floats may become either.
        tolerance = 0.0 if INTERPRET else 0.1
        torch.testing.assert_close(tensor(o[place]), want, atol=tolerance, rtol=tolerance)
    if INTERPRET:
        assert_same(found, caches)


# --------------------------------------------------------------------------------------------------------- log-decay


@pytest.mark.parametrize("flat", [False, True])
def test_sums_of_a_log_decay(flat: bool) -> None:
    """Log-decays are appended in chunks to donated caches; sums are in the thousands. Pages of -1 and lengths of 0 are
    skipped."""
    heads, size = 10, 16
    table = torch.tensor([[3, 1, 6], [-1, -1, -1], [5, 0, -1]], device=DEVICE, dtype=torch.int32)
    pages: dict[str, Any] = {"page_table": table}
    if flat:
        pages = {"page_table": table.flatten(), "page_starts": torch.arange(4, device=DEVICE) * 3}
    append = jax.jit(paging.append_decay, donate_argnums=(1, 2))
    caches = [torch.zeros(7, size, heads, device=DEVICE), torch.zeros(7, heads, device=DEVICE)]
    got = [array(x) for x in caches]
    for new, lengths in (((35, 0, 19), (35, 0, 19)), ((5, 0, 1), (40, 0, 20))):
        g = torch.nn.functional.logsigmoid(torch.randn(sum(new), heads, device=DEVICE)) * 300
        begins = torch.tensor([0, *new], device=DEVICE).cumsum(0).int()
        now = torch.tensor(lengths, device=DEVICE, dtype=torch.int32)
        given = pages | {"kv_lengths": now, "cu_seqlens": begins}
        paging.append_decay(g, caches[0], caches[1], **given)
        held = got
        got = list(append(array(g), *held, **{name: array(x) for name, x in given.items()}))
        assert all(x.is_deleted() for x in held)
        assert_same(got, caches)
    g = torch.randn(3, 1, heads, device=DEVICE)
    given = pages | {"kv_lengths": torch.tensor([41, 0, 21], device=DEVICE, dtype=torch.int32)}
    paging.append_decay(g, caches[0], caches[1], **given)
    assert_same(append(array(g), *got, **{name: array(x) for name, x in given.items()}), caches)


@pytest.mark.parametrize("queries", [(1,) * 5, (5, 0, 1, 40, 2)], ids=["decode", "mixed"])
def test_calls_on_sums(queries: tuple[int, ...]) -> None:
    case = draw_decay_case(16, queries, steep=16)
    given = {name: array(x) for name, x in case.kwargs.items()}
    most, op = given.pop("max_seqlen_q"), load_op("forgetting")
    call = jax.jit(lambda q, k, v, given: op(q, k, v, max_seqlen_q=most, return_lse=True, **given))
    assert_same(call(*map(array, (case.q, case.k, case.v)), given), case.call())


def test_steps_in_a_loop_continue_sums() -> None:
    """A plan and the calls that use it, in the body of a loop with donated caches."""
    tokens, size, heads = 6, 4, 4
    q, k, v = torch.randn(3, tokens, 1, 1, heads, 16, device=DEVICE)
    g = torch.nn.functional.logsigmoid(torch.randn(tokens, 1, 1, heads, device=DEVICE))
    table = torch.tensor([[2, 0]], device=DEVICE, dtype=torch.int32)
    shapes = ((3, size, heads, 16), (3, size, heads, 16), (3, size, heads), (3, heads))
    caches = [torch.zeros(shape, device=DEVICE) for shape in shapes]

    def step(op: Any, table: Any, caches: Any, place: Any, q: Any, k: Any, v: Any, g: Any) -> Any:
        k_cache, v_cache, g_cache, g_base = caches
        pages = {"page_table": table, "kv_lengths": place + 1}
        slots = paging.slots(table, place, page_size=size)
        k_cache, v_cache = paging.append(k[0], v[0], k_cache, v_cache, slots)
        g_cache, g_base = paging.append_decay(g, g_cache, g_base, **pages)
        plan = op.plan(q, k_cache, layout="bshd", **pages)
        o = op(q, k_cache, v_cache, g=g_cache, g_base=g_base, layout="bshd", schedule=plan, **pages)
        return (k_cache, v_cache, g_cache, g_base), o

    @partial(jax.jit, donate_argnums=0)
    def decode(caches: Any, *tokens: Any) -> Any:
        return jax.lax.scan(lambda caches, x: step(load_op("forgetting"), array(table), caches, *x), caches, tokens)

    given = tuple(array(x) for x in caches)
    found, o = decode(given, jnp.arange(tokens)[:, None], *map(array, (q, k, v, g)))
    assert all(x.is_deleted() for x in given)
    op = golden.load_op("forgetting")
    for place in range(tokens):
        at = torch.tensor([place], device=DEVICE)
        assert_same([o[place]], [step(op, table, caches, at, q[place], k[place], v[place], g[place])[1]])
    assert_same(found, caches)


# ---------------------------------------------------------------------------------------------------- values in keys


@pytest.mark.parametrize(
    ("dim", "dim_v", "dtype", "is_shared"),
    [(576, 512, torch.float32, True), (96, 32, torch.float32, False), (96, 64, FP8[0], False)],
)
def test_values_in_keys(dim: int, dim_v: int, dtype: torch.dtype, is_shared: bool, monkeypatch: Any) -> None:
    """The torch op takes a view of the keys as values."""
    shared = []
    launch = backend.launch

    def noted(*args: Any, **constants: Any) -> None:
        shared.append(constants.get("SHARED_KV"))
        launch(*args, **constants)

    monkeypatch.setattr(backend, "launch", noted)
    keys = torch.randn(7, 16, 1, dim, device=DEVICE).to(dtype)
    q = torch.randn(3, 16, 1, dim, device=DEVICE)
    table = torch.tensor([[3, 1, 6], [-1, -1, -1], [5, 0, -1]], device=DEVICE, dtype=torch.int32)
    pages = {"page_table": table, "kv_lengths": torch.tensor([41, 0, 20], device=DEVICE, dtype=torch.int32)}
    scales = {"k_scale": 0.5, "v_scale": 0.25} if dtype in FP8 else {}
    want = golden.load_op("causal")(q, keys, keys[..., :dim_v], **pages, **scales)
    given = {name: array(x) for name, x in pages.items()}
    op = partial(load_op("causal"), layout="bhsd", values_in_keys=dim_v, **scales)
    assert_same([jax.jit(op)(array(q), array(keys), **given)], [want])
    swapped = jax.jit(partial(op, page_layout="phsd"))
    assert_same([swapped(array(q), array(keys).transpose(0, 2, 1, 3), **given)], [want])
    assert is_shared in shared
    assert (not is_shared) not in shared
