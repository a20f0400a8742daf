"""The implementations compared in torch: ours, FlexAttention, the backends of SDPA, FA4 and FLA.

Each is built for a case and its inputs. A peer that is missing or cannot compute a case raises, when it is built or at
its first call; the caller reports that.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from bench.cases.case import Case
from bench.cases.flex_mods import MODS, ScoreMod
from bench.record import OURS
from codegen.testing.calls import make_schedule
from codegen.testing.golden import Inputs, has_tables, load_op

EAGER_MASK_LIMIT = 32768
"""Longest sequence whose block mask is made eagerly, from an S x S mask of at most 1 GiB, to save seconds of
compilation."""


@dataclass(frozen=True, kw_only=True)
class Runner:
    """One implementation, ready to run.

    `forward` returns o in the runner's own layout, and `do` is the gradient of o in that layout. `leaves` are the
    tensors whose gradients are computed. `prepare` makes the schedule or block mask that `forward` uses.
    """

    forward: Callable[[], Tensor]
    do: Tensor
    leaves: dict[str, Tensor]
    seq_first: bool = False
    prepare: Callable[[], Any] | None = None

    def gradients(self, o: Tensor) -> tuple[Tensor, ...]:
        """The gradients of all leaves. The graph is kept, so that the backward can be timed repeatedly."""
        return torch.autograd.grad(o, list(self.leaves.values()), self.do, retain_graph=True)

    def results(self) -> dict[str, Tensor]:
        """o and the gradients of q, k and v, in layout "bhsd"."""
        o = self.forward()
        named = {"o": o} | {f"d{name}": grad for name, grad in zip(self.leaves, self.gradients(o), strict=True)}
        shared = {name: named[name] for name in ("o", "dq", "dk", "dv")}
        return {name: t.transpose(1, 2) if self.seq_first else t for name, t in shared.items()}


def _ours(case: Case, inputs: Inputs) -> Runner:
    op: Any = load_op(case.variant)
    if not has_tables(case.variant):
        return Runner(forward=lambda: inputs.call(op), do=inputs.do, leaves=inputs.leaves())
    return scheduled(op, inputs)


def scheduled(op: Any, inputs: Inputs) -> Runner:
    """An op of ours with a schedule that is made once, as FlexAttention's block mask is."""
    prepare = functools.partial(make_schedule, op, inputs)
    schedule = prepare()
    return Runner(
        forward=lambda: inputs.call(op, schedule=schedule), do=inputs.do, leaves=inputs.leaves(), prepare=prepare
    )


def _sdpa(backend: SDPBackend) -> Callable[[Case, Inputs], Runner]:
    def build(case: Case, inputs: Inputs) -> Runner:
        grouped = case.shape.heads != case.shape.kv_heads

        def forward() -> Tensor:
            with sdpa_kernel(backend):
                o: Tensor = scaled_dot_product_attention(
                    inputs.q, inputs.k, inputs.v, is_causal=case.variant == "causal", enable_gqa=grouped
                )
                return o

        return Runner(forward=forward, do=inputs.do, leaves=inputs.leaves())

    return build


def _block_mask(case: Case, inputs: Inputs) -> BlockMask | None:
    make = MODS[case.variant].mask
    if make is None:
        return None
    seq = case.shape.seq
    # Only a mask that reads a tensor may differ between batch rows.
    rows = case.shape.batch if {"doc", "length"} & set(inputs.tensors) else None
    create = create_block_mask if seq <= EAGER_MASK_LIMIT else torch.compile(create_block_mask)
    mask: BlockMask = create(make(inputs), rows, None, seq, seq, device=inputs.q.device)
    return mask


def forget() -> None:
    """Reset dynamo: after eight compiled versions of one function it would run the function eagerly."""
    torch.compiler.reset()


MAX_AUTOTUNE = "max-autotune-no-cudagraphs"


def _flex(case: Case, inputs: Inputs, mode: str | None = None) -> Runner:
    score = MODS[case.variant].score
    return flex(inputs, None if score is None else score(inputs), functools.partial(_block_mask, case, inputs), mode)


def flex(
    inputs: Inputs, score_mod: ScoreMod | None, prepare: Callable[[], BlockMask | None], mode: str | None = None
) -> Runner:
    """FlexAttention with the block mask that `prepare` makes once; with none if it returns None."""
    # Graphs are kept and run repeatedly, which donated buffers forbid.
    functorch_config.donated_buffer = False
    # Otherwise max-autotune prints a table of its candidates for each kernel.
    inductor_config.autotune_num_choices_displayed = 0
    block_mask = prepare()
    options: dict[str, Any] = {
        "score_mod": score_mod,
        "block_mask": block_mask,
        "enable_gqa": inputs.q.shape[1] != inputs.k.shape[1],
    }
    sink = inputs.tensors.get("sink")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if sink is None:
            plain: Tensor = flex_attention(q, k, v, **options)
            return plain
        o, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **options)
        # The sink joins the denominator: exp(lse) / (exp(lse) + exp(sink)).
        renormalised: Tensor = o * torch.sigmoid(aux.lse - sink[:, None]).unsqueeze(-1)
        return renormalised.to(q.dtype)

    run = torch.compile(attend, dynamic=False, mode=mode)
    runner = Runner(
        forward=lambda: run(inputs.q, inputs.k, inputs.v),
        do=inputs.do,
        leaves=inputs.leaves(),
        prepare=None if block_mask is None else prepare,
    )
    if mode is None:
        try:
            runner.results()
        except Exception:  # mostly: its default blocks exceed shared memory; without pipelining they may fit
            forget()
            options["kernel_options"] = {"num_stages": 1}
    return runner


def _seq_first(inputs: Inputs) -> tuple[dict[str, Tensor], Tensor]:
    """New leaves q, k, v in layout "bshd", and do in that layout."""
    q, k, v, do = (t.detach().transpose(1, 2).contiguous() for t in (inputs.q, inputs.k, inputs.v, inputs.do))
    return {"q": q.requires_grad_(), "k": k.requires_grad_(), "v": v.requires_grad_()}, do


def _fla(case: Case, inputs: Inputs) -> Runner:  # noqa: ARG001 -- the signature all builders share
    from fla.ops.attn.parallel import parallel_attn  # optional

    leaves, do = _seq_first(inputs)
    if "g" in inputs.tensors:
        leaves["g"] = inputs.tensors["g"]

    def forward() -> Tensor:
        o: Tensor = parallel_attn(leaves["q"], leaves["k"], leaves["v"], g=leaves.get("g"))
        return o

    return Runner(forward=forward, do=do, leaves=leaves, seq_first=True)


FA4_OPTIONS: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    "full": lambda inputs: {},
    "causal": lambda inputs: {"causal": True},
    # FA4's window is the number of keys before the query's own position.
    "window": lambda inputs: {"causal": True, "window_size": (int(inputs.scalars["size"]) - 1, 0)},
    "softcap": lambda inputs: {"causal": True, "softcap": 20.0},
    "gemma2_local": lambda inputs: {"causal": True, "window_size": (4095, 0), "softcap": 50.0},
}
"""The arguments of FA4 for the variants that it can compute."""


def _fa4(case: Case, inputs: Inputs) -> Runner:
    # Shares compiled kernels between processes. The module reads this when it is imported.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    from flash_attn.cute import flash_attn_func  # optional

    leaves, do = _seq_first(inputs)
    options = FA4_OPTIONS[case.variant](inputs)

    def forward() -> Tensor:
        found = flash_attn_func(leaves["q"], leaves["k"], leaves["v"], **options)
        # Most versions return the lse too, asked for or not.
        o: Tensor = found[0] if isinstance(found, tuple) else found
        return o

    return Runner(forward=forward, do=do, leaves=leaves, seq_first=True)


BUILDERS: dict[str, Callable[[Case, Inputs], Runner]] = {
    OURS: _ours,
    "flex": _flex,
    "flex-max": functools.partial(_flex, mode=MAX_AUTOTUNE),
    "fa2": _sdpa(SDPBackend.FLASH_ATTENTION),
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "efficient": _sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "fa4": _fa4,
    "fla": _fla,
}


def build(name: str, case: Case, inputs: Inputs) -> Runner:
    """Build one implementation for one case."""
    return BUILDERS[name](case, inputs)
