"""The implementations compared, each built for a case and its inputs: ours, FlexAttention, SDPA's two, and FLA's.

A peer that is not there, or cannot compute a case, raises when it is built or first called; the caller reports it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from bench.cases import Case
from bench.golden import Inputs, has_tables, load_op
from bench.mods import MODS

OURS = "ours"
EAGER_MASK_LIMIT = 32768
"""Up to here a block mask is made eagerly: at once, from an S x S mask of at most a GiB. Compiling it takes seconds."""


@dataclass(frozen=True, kw_only=True)
class Runner:
    """One implementation, ready to run.

    `forward` returns o in the runner's own layout, `do` is its cotangent there, `leaves` what gradients are taken of.
    """

    forward: Callable[[], Tensor]
    do: Tensor
    leaves: dict[str, Tensor]
    seq_first: bool = False

    def gradients(self, o: Tensor) -> tuple[Tensor, ...]:
        """Every gradient; the graph is kept, so that it may be timed again and again."""
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
    # As FlexAttention's block mask: made once.
    schedule = make_schedule(op, inputs)
    return Runner(forward=lambda: inputs.call(op, schedule=schedule), do=inputs.do, leaves=inputs.leaves())


def make_schedule(op: Any, inputs: Inputs, **options: Any) -> Any:
    """The schedule of an op for these inputs."""
    taken = inspect.signature(op.schedule).parameters
    own = {name: value for name, value in (inputs.tensors | inputs.scalars).items() if name in taken}
    return op.schedule(inputs.q, inputs.k, inputs.v, **own, **options)


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
    # Only a mask that reads a tensor may differ from row to row.
    rows = case.shape.batch if "doc" in inputs.tensors else None
    create = create_block_mask if seq <= EAGER_MASK_LIMIT else torch.compile(create_block_mask)
    mask: BlockMask = create(make(inputs), rows, None, seq, seq, device=inputs.q.device)
    return mask


def _flex(case: Case, inputs: Inputs) -> Runner:
    # Kept graphs are run again and again here, which donated buffers forbid.
    functorch_config.donated_buffer = False
    # Each case is a compilation of its own; past eight of one function dynamo would give up and run it eagerly.
    torch.compiler.reset()
    mods = MODS[case.variant]
    options: dict[str, Any] = {
        "score_mod": None if mods.score is None else mods.score(inputs),
        "block_mask": _block_mask(case, inputs),
        "enable_gqa": case.shape.heads != case.shape.kv_heads,
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

    run = torch.compile(attend, dynamic=False)
    runner = Runner(forward=lambda: run(inputs.q, inputs.k, inputs.v), do=inputs.do, leaves=inputs.leaves())
    try:
        runner.results()
    except Exception:  # mostly: its default blocks do not fit shared memory; without a pipeline they may
        torch.compiler.reset()
        options["kernel_options"] = {"num_stages": 1}
    return runner


def _fla(case: Case, inputs: Inputs) -> Runner:  # noqa: ARG001 -- the signature all builders share
    from fla.ops.attn.parallel import parallel_attn  # optional

    q, k, v, do = (t.detach().transpose(1, 2).contiguous() for t in (inputs.q, inputs.k, inputs.v, inputs.do))
    leaves = {"q": q.requires_grad_(), "k": k.requires_grad_(), "v": v.requires_grad_(), "g": inputs.tensors["g"]}

    def forward() -> Tensor:
        o: Tensor = parallel_attn(q, k, v, g=leaves["g"])
        return o

    return Runner(forward=forward, do=do, leaves=leaves, seq_first=True)


BUILDERS: dict[str, Callable[[Case, Inputs], Runner]] = {
    OURS: _ours,
    "flex": _flex,
    "fa2": _sdpa(SDPBackend.FLASH_ATTENTION),
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "fla": _fla,
}

TITLES = {OURS: "ours", "flex": "Flex", "fa2": "FA2", "cudnn": "cuDNN", "fla": "FLA"}
"""What tables call them. FA2 and cuDNN are the two backends of PyTorch's `scaled_dot_product_attention`."""


def build(name: str, case: Case, inputs: Inputs) -> Runner:
    """One implementation for one case."""
    return BUILDERS[name](case, inputs)
