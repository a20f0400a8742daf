"""Kernels on caches of 8-bit floats and of wide heads compile, without a GPU, and fit the chip."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.arch.chips import CHIPS
from codegen.compile.offline import Compiled, compile_launches
from codegen.lint.kernels import usage
from generated._runtime.core.settings import INTERPRET

torch: Any = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 nothing is compiled")
ARCH = "sm_90"


def compiled(q: Any, k: Any, v: Any, kernel: str = "causal_paged_fwd", **options: Any) -> Compiled:
    """The forward of a decoding step on pages of 64 keys."""
    from generated.torch import causal

    table, lengths = torch.zeros(2, 8, dtype=torch.int32), torch.full((2,), 300, dtype=torch.int32)
    found = compile_launches(
        lambda: causal(q, k, v, page_table=table, kv_lengths=lengths, **options),
        "causal",
        ARCH,
        only=lambda name: name == kernel,
    )
    return found[kernel]


def drawn(heads: int, kv_heads: int, dim: int, dtype: Any) -> tuple[Any, Any]:
    q = torch.zeros(2, heads, 1, dim, dtype=torch.bfloat16)
    return q, torch.zeros(16, 64, kv_heads, dim, dtype=dtype)


@pytest.mark.parametrize("kind", ["number", "token"])
def test_8_bit_caches(kind: str) -> None:
    q, k = drawn(32, 8, 128, torch.float8_e4m3fn)
    scale = 0.1 if kind == "number" else torch.ones(k.shape[:3])
    kernel = compiled(q, k, k.clone(), k_scale=scale, v_scale=scale)
    used = usage(kernel, ARCH)
    assert used.spill_stores == 0
    # Tiles are copied ahead in the dtype that they have in memory, and converted in hardware.
    assert kernel.asm["ptx"].count("cp.async.c") > 20
    assert "cvt.rn.f16x2.e4m3x2" in kernel.asm["ptx"]


@pytest.mark.parametrize(
    ("kernel", "heads", "is_shared", "most_spills"),
    [
        *(("fwd", *case) for case in ((16, True, 16), (16, False, 16), (128, True, 512), (128, False, 512))),
        ("hopper_latent", 128, True, 32),
    ],
)
def test_latent_attention(kernel: str, heads: int, is_shared: bool, most_spills: int) -> None:
    """64 rows spill outside of the loop over keys; 16 rows take four warps, so that two programs fit a processor."""
    q, k = drawn(heads, 1, 576, torch.bfloat16)
    v = k[..., :512] if is_shared else k.clone()[..., :512]
    family = "portable" if kernel == "fwd" else None
    used = usage(compiled(q, k, v, kernel=f"causal_paged_{kernel}", family=family), ARCH)
    assert used.shared <= CHIPS[ARCH].shared_memory
    assert used.spill_stores <= most_spills


@pytest.mark.parametrize(("kind", "most_spills"), [("number", 300), ("token", 800)])
def test_latent_attention_on_8_bit_caches(kind: str, most_spills: int) -> None:
    """The producer converts keys in hardware, and has no fence: it would wait for all loads that have begun."""
    q, k = drawn(128, 1, 576, torch.float8_e4m3fn)
    scale = 0.1 if kind == "number" else torch.ones(k.shape[:3])
    kernel = compiled(q, k, k[..., :512], kernel="causal_paged_hopper_latent", k_scale=scale, v_scale=scale)
    used = usage(kernel, ARCH)
    assert used.shared <= CHIPS[ARCH].shared_memory
    assert used.spill_stores <= most_spills
    ptx = kernel.asm["ptx"]
    first, last = ptx.index("cvt.rn.f16x2.e4m3x2"), ptx.rindex("cvt.rn.f16x2.e4m3x2")
    assert "fence.proxy.async" not in ptx[first:last]


def test_caches_of_the_dtype_of_q_take_no_scale() -> None:
    q, k = drawn(32, 8, 128, torch.bfloat16)
    names = compiled(q, k, k.clone()).src.fn.arg_names
    signature = compiled(q, k, k.clone()).src.signature
    assert {signature[name] for name in names if name in ("k_scale", "v_scale")} == {"constexpr"}
