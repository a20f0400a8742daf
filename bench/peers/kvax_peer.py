"""Kvax 0.1.0 with jax-triton 0.3.1, on a JAX and a Triton that they were not written for.

Kvax (github.com/nebius/kvax) was last released for JAX 0.4 and Triton 3.1. Names that JAX and Triton have removed since
are patched in while Kvax is imported or compiled, and removed again, so that nothing else in the process sees them.
Kvax runs with its own block sizes for the H100, and with its option for positions that count up, as they do here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from bench.peers.jax_peers import JaxCase, Program, draw, leaves_of, segment_ids
from generated._runtime.jax.kernels import device_arch

SPECS = ("data", None, "model", None)
"""The mesh axes that shard the axes of q, k and v; the mesh has one device."""

_hinted_kernels: dict[Any, Any] = {}


def _shard_map(f: Any, *, mesh: Any, in_specs: Any, out_specs: Any, check_rep: bool) -> Any:
    """`jax.experimental.shard_map` with the signature that it had before JAX 0.8."""
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_rep)


@functools.cache
def _modules() -> SimpleNamespace:
    """Kvax and jax-triton, imported."""
    import jax.experimental.shard_map as old_home

    with (
        # Kvax's annotations name this type, which JAX removed in 0.8.
        patch.object(old_home, "Specs", object, create=True),
        # The function and the name of its last argument are deprecated since 0.8.
        patch.object(old_home, "shard_map", _shard_map, create=True),
        # jax-triton sets TRITON_CACHE_DIR="", which breaks every other compilation in this process.
        patch.dict(os.environ),
    ):
        import jax_triton.triton_lib as triton_lib
        import kvax
        import kvax.ops.flash_attention_triton as kernels
        from kvax.utils.typing import AttentionMask
    import triton.language as tl

    # Triton since 3.3 lets a kernel read globals only where they are constexpr, and Kvax only annotates them. The other
    # remedy, TRITON_ALLOW_NON_CONSTEXPR_GLOBALS=1, would hold for all kernels.
    kernels.LOG2_CONST, kernels.NEG_INF = tl.constexpr(kernels.LOG2_CONST), tl.constexpr(kernels.NEG_INF)
    return SimpleNamespace(triton_lib=triton_lib, ops=kvax.ops, utils=kvax.utils, mask=AttentionMask)


@contextlib.contextmanager
def compiling(hints: bool) -> Iterator[None]:
    """The environment in which Kvax's kernels compile; `hints`: with the hints of jax-triton up to 0.3.0."""
    lib = _modules().triton_lib
    with contextlib.ExitStack() as stack:
        # Triton warns at each use of `and` between blocks.
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        # jax-triton asks the driver for the compute capability, and a machine without a GPU has no driver.
        capability = int(device_arch("kvax").removeprefix("sm_"))
        stack.enter_context(patch.object(lib.triton_kernel_call_lib, "get_compute_capability", lambda _: capability))
        if hints:
            stack.enter_context(patch.object(lib, "get_or_create_triton_kernel", with_hints(lib)))
            # The key of jax-triton's cache does not include the hints.
            stack.enter_context(patch.object(lib, "_COMPILED_KERNEL_CACHE", _hinted_kernels))
        yield


def with_hints(lib: Any) -> Callable[..., Any]:
    """jax-triton's compilation, with hints for the integer arguments that 16 divides.

    Triton itself adds them at every launch, and jax-triton did until 0.3.1. Without them a kernel cannot assume that
    rows start at multiples of 16 bytes: it loads 2 bytes at a time and prefetches nothing.
    """
    compile_kernel, source = lib.get_or_create_triton_kernel, lib.tc.ASTSource

    def compile_with_hints(
        backend: Any, platform: str, fn: Any, dtypes: Any, scalars: Any, **options: Any
    ) -> tuple[Any, Any]:
        integers = {i: value for i, kind, value in scalars if kind in ("i32", "u32", "i64", "u64")}
        hints = {(i,): [["tt.divisibility", 16]] for i, value in integers.items() if value % 16 == 0}

        def hinted(fn: Any, *, attrs: dict[Any, Any], **rest: Any) -> Any:
            return source(fn, attrs=attrs | hints, **rest)

        with patch.object(lib, "tc", SimpleNamespace(ASTSource=hinted)):
            kernel, attributes = compile_kernel(backend, platform, fn, dtypes, scalars, **options)
        return kernel, attributes

    return compile_with_hints


def _blocks() -> dict[str, Any]:
    """Kvax's own default block sizes for an H100."""
    config = _modules().utils.FlashAttentionParamsConfig
    return {
        "fwd_params": config(query_block_size=128, kv_block_size=128, num_warps=8, num_stages=3),
        "bwd_params": config(query_block_size=64, kv_block_size=128, num_warps=8, num_stages=3),
    }


def uncompiled(case: JaxCase) -> Program:
    """Kvax on documents, not yet compiled. Its schedule makes its block masks, which are not yet computed."""
    kvax = _modules()
    arrays, ids = draw(case), segment_ids(case)
    positions = jnp.broadcast_to(jnp.arange(case.shape.seq, dtype=jnp.int32), ids.shape)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    common = {**_blocks(), "mesh": mesh}

    def masks(positions: Any, ids: Any) -> Any:
        tokens = (positions, ids, positions, ids)
        with kvax.utils.attention_specs(SPECS, SPECS):
            made = kvax.ops.create_attention_mask(*tokens, calc_bwd_mask=True, **common)
        return tuple(mask.flatten() for mask in made)

    def op(q: Any, k: Any, v: Any, positions: Any, ids: Any, mask: Any) -> Any:
        tokens = (positions, ids, positions, ids)
        options = {"scale": q.shape[-1] ** -0.5, "assume_sequential_positions": True, **common}
        with kvax.utils.attention_specs(SPECS, SPECS):
            whole = tuple(kvax.mask.unflatten(each) for each in mask)
            return kvax.ops.flash_attention(q, k, v, *tokens, whole, **options)

    make = jax.jit(masks)
    given = {"positions": positions, "ids": ids, "mask": jax.eval_shape(masks, positions, ids)}
    return Program(op=op, leaves=leaves_of(arrays), do=arrays["do"], given=given, schedule=lambda: make(positions, ids))


def build(case: JaxCase, *, hints: bool) -> Program:
    """Kvax as installed, or with `hints`; compiled."""
    program = uncompiled(case)
    assert program.schedule is not None
    with compiling(hints):
        program = replace(program, given={**program.given, "mask": program.schedule()})
        jax.block_until_ready((program.forward(), program.both()))
    return program
