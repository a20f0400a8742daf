"""FlexAttention code ported line by line: `python -m examples.from_flexattention`.

The functions below are what a user of FlexAttention has: a document mask with a sliding window, and ALiBi added after a
softcap. `PORTED` is the same as an entry, with the line that each part comes from. The script asks `codegen port` for
its own version of this file, renders the entry, and compares the op with `torch.nn.attention.flex_attention` on the
same tensors. `--full` uses sizes for a GPU, where the gradients are compared too (FlexAttention has none on a CPU).

The exit status is 1 if the results differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention

from codegen.ir.evaluate import evaluate
from codegen.port.command import port
from codegen.spec.model import Variant
from examples.rendering import read, render

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

WINDOW = 64
SOFT_CAP = 20.0

# ------------------------------------------------------------------------------------------------ FlexAttention's code


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001 -- FlexAttention's signature
    return q_idx >= kv_idx


def sliding(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    return q_idx - kv_idx < WINDOW


def make_document(document_id: Tensor) -> Mask:
    def same_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return document_id[b, q_idx] == document_id[b, kv_idx]

    return and_masks(causal, sliding, same_document)


def make_capped_alibi(slopes: Tensor) -> Score:
    def capped_alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        score = SOFT_CAP * torch.tanh(score / SOFT_CAP)
        return score + slopes[h] * (kv_idx - q_idx)

    return capped_alibi


# ----------------------------------------------------------------------------------------------------- the same, ported

PORTED = """\
variants:
  ported:
    # and_masks(causal, sliding, same_document): `causal` is a mask of the library
    mask: causal and q_idx - kv_idx < 64 and document_id[b, q_idx] == document_id[b, kv_idx]
    # torch.tanh is tanh; a local variable is written out
    score: 20.0 * tanh(score / 20.0) + slopes[h] * (kv_idx - q_idx)
    # what the closures captured are arguments of each call
    tensors:
      document_id: {dims: [b, kv_idx], dtype: int32, example: kv_idx // 300}
      slopes: {dims: [h], grad: true}
"""

FUNCTIONS = "make_document+make_capped_alibi"


def agrees_with_port() -> bool:
    """True if `codegen port` of this file gives the entry above, evaluated on random indices."""
    report = port(Path(__file__), [FUNCTIONS])
    print(report.text)
    (found,) = read(report.text).variants.values()
    (written,) = read(PORTED).variants.values()
    draw = torch.Generator().manual_seed(0)
    values: dict[str, Any] = {
        name: torch.randint(high, (1000,), generator=draw).numpy()
        for name, high in (("b", 2), ("h", 4), ("q_idx", 100), ("kv_idx", 100))
    }
    values["score"] = torch.randn(1000, generator=draw).numpy()
    tensors = {"document_id": torch.randint(2, (2, 100), generator=draw).numpy(), "slopes": torch.rand(4).numpy()}

    def results(variant: Variant) -> list[Any]:
        return [evaluate(e, values, tensors) for e in (variant.mask, variant.score) if e is not None]

    return all((a == b).all() for a, b in zip(results(found), results(written), strict=True))


def compare(op: Any, device: str, seq: int) -> bool:
    """True if the op's results are those of FlexAttention."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, seq, 64, device=device, dtype=dtype)
    document_id = (torch.arange(seq, device=device, dtype=torch.int32) // 50).repeat(2, 1)
    slopes = 2.0 ** -torch.arange(1, 5, device=device)

    blocks = create_block_mask(make_document(document_id), 2, None, seq, seq, device=device)
    flex = torch.compile(flex_attention) if device == "cuda" else flex_attention
    trained = device == "cuda"
    results = {}
    for name in ("FlexAttention", "ported"):
        leaves = tuple(x.detach().clone().requires_grad_(trained) for x in (q, k, v))
        a, b, c = leaves
        if name == "ported":
            o = op(a, b, c, document_id=document_id, slopes=slopes)
        else:
            o = flex(a, b, c, score_mod=make_capped_alibi(slopes), block_mask=blocks)
        if trained:
            o.float().square().sum().backward()
        results[name] = [o.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    # float32: sums in another order. bfloat16: both sides round probabilities and results, which gradients amplify.
    bound = 3e-2 if trained else 2e-5
    right = True
    for name, a, b in zip(("o", "dq", "dk", "dv"), results["FlexAttention"], results["ported"], strict=False):
        error = ((a.double() - b.double()).abs().max() / a.double().abs().max()).item()
        right &= error <= bound
        print(f"  {name:2} difference {error:.1e} of the largest element (bound {bound:.0e})")
    return right


def main() -> int:
    """Port, render and compare; returns 0 if the results agree."""
    parser = argparse.ArgumentParser(prog="python -m examples.from_flexattention", description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="use larger sizes, for a GPU")
    full: bool = parser.parse_args().full
    print(f"What `codegen port examples/from_flexattention.py --function {FUNCTIONS}` prints:\n")
    right = agrees_with_port()
    print(f"The entry written by hand computes the same: {'yes' if right else 'NO'}\n")
    ops = render(PORTED, "ported_ops")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"\nThe op beside FlexAttention, on {'a GPU' if device == 'cuda' else 'the CPU, forward only'}:")
    right &= compare(ops.ported, device, 2048 if full else 200)
    print("\nAll is well." if right else "\nFAILED, see above.")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
