"""A variant from the formula in its paper to a training run: `python -m examples.paper_to_training`.

KERPLE (Chi et al., 2022, arXiv:2205.09921) subtracts `r1 log(1 + r2 |i - j|)` from the logits, with two positive
numbers learned per head. The script writes that as an entry, renders its kernels, compares output and gradients with
the formula in plain PyTorch, and trains a small language model with the bias and one without. `--full` uses sizes for
a GPU.

The exit status is 1 if the op is wrong, if r1 and r2 are not trained, or if the loss does not fall.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from examples.rendering import render
from examples.train import Size, train
from generated.torch import causal

Op = Callable[..., Tensor]
plain: Op = causal  # type: ignore[assignment]  # without return_lse it returns o alone

# Step 1. The formula as an entry. `score` is q.k * scale; `grad: true` asks for a gradient kernel.
SPEC = """\
variants:
  kerple:
    doc: Logarithmic kernel bias, two positive numbers learned per head (Chi et al., 2022, arXiv:2205.09921).
    mask: causal
    score: score - r1[h] * log(1 + r2[h] * abs(q_idx - kv_idx))
    tensors:
      r1: {dims: [h], grad: true, example: 0.5 + 0.1 * h}
      r2: {dims: [h], grad: true, example: 1 + 0.5 * h}
"""

SMALL = Size(layers=2, heads=4, kv_heads=2, head_dim=16, seq=48, batch=6, steps=48, learning_rate=6e-3)
FULL = Size(layers=6, heads=8, kv_heads=2, head_dim=64, seq=1024, batch=16, steps=300, learning_rate=1e-3)

BOUND = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
"""Largest error relative to the largest element: of sums in float32, and of 4 roundings to bfloat16."""


def formula(q: Tensor, k: Tensor, v: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
    """The paper's attention in plain PyTorch, with the S x S matrix. Shapes as those of the op."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    place = torch.arange(q.shape[2], device=q.device)
    distance = place[:, None] - place
    bias = r1[:, None, None] * torch.log(1 + r2[:, None, None] * distance.abs())
    logits = (q @ k.mT) * q.shape[3] ** -0.5 - bias
    probabilities = torch.softmax(logits.masked_fill(distance < 0, -torch.inf), dim=-1)
    out: Tensor = probabilities @ v
    return out


# Step 2. The op against the formula in float64.
def compare(op: Op, device: str, seq: int) -> bool:
    """True if the output and every gradient of the op are those of the formula."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    shapes = {"q": (2, 4, seq, 64), "k": (2, 2, seq, 64), "v": (2, 2, seq, 64)}
    inputs = {name: torch.randn(shape, device=device).to(dtype).requires_grad_() for name, shape in shapes.items()}
    own = {name: (0.5 + torch.rand(4, device=device)).requires_grad_() for name in ("r1", "r2")}
    exact = {name: x.detach().double().requires_grad_() for name, x in {**inputs, **own}.items()}
    o, want = op(**inputs, **own), formula(**exact)
    do = torch.randn_like(want)
    o.backward(do.to(o.dtype))
    want.backward(do)
    pairs = {"o": (o, want), **{f"d{name}": (x.grad, exact[name].grad) for name, x in {**inputs, **own}.items()}}
    right = True
    for name, (got, wanted) in pairs.items():
        assert got is not None
        assert wanted is not None
        error = ((got.double() - wanted).abs().max() / wanted.abs().max()).item()
        right &= error <= BOUND[dtype]
        print(f"  {name:4} error {error:.1e}")
    print(f"  {'OK' if right else 'WRONG'} (bound {BOUND[dtype]:.0e}, largest error / largest element)")
    return right


class Kerple(nn.Module):
    """The op with its trained numbers, stored as logarithms to keep them positive, as the paper requires."""

    def __init__(self, op: Op, heads: int) -> None:
        super().__init__()
        self.op = op
        self.log_r1 = nn.Parameter(torch.linspace(-2, 0, heads))
        self.log_r2 = nn.Parameter(torch.zeros(heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of q `[B, Hq, S, D]` and k, v `[B, Hkv, S, D]`."""
        return self.op(q, k, v, r1=self.log_r1.exp(), r2=self.log_r2.exp())


# Step 3. A model with it, and one without.
def compare_training(op: Op, size: Size, device: str) -> bool:
    """True if r1 and r2 were trained, and the loss fell."""

    def report(step: int, loss: float) -> None:
        print(f"    step {step:4}/{size.steps}  loss {loss:.3f}")

    attend = Kerple(op, size.heads)
    before = attend.log_r1.detach().clone()
    print("  with the bias:")
    ours = train(size, attend, device, report, size.steps // 4)
    print("  the same model without it:")
    theirs = train(size, plain, device, report, size.steps // 4)
    moved = (attend.log_r1.detach().cpu() - before).abs().max().item()
    print(f"  loss on text held out of training: {ours.held_out:.3f} with the bias, {theirs.held_out:.3f} without")
    print(f"  r1 per head: {[round(x, 2) for x in attend.log_r1.exp().tolist()]}, moved by up to {moved:.2f} in log")
    return moved > 1e-3 and ours.losses[-1] < 0.75 * ours.losses[0]


def main() -> int:
    """Run the three steps; returns 0 if all pass."""
    parser = argparse.ArgumentParser(prog="python -m examples.paper_to_training", description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="use larger sizes, for a GPU")
    full: bool = parser.parse_args().full
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print("Step 1 of 3: render the entry.\n")
    print(SPEC)
    op = render(SPEC, "kerple_ops").kerple
    print("\nStep 2 of 3: compare the op with the paper's formula in float64.")
    right = compare(op, device, 1000 if full else 150)
    print("\nStep 3 of 3: train a byte-level language model.")
    right &= compare_training(op, FULL if full else SMALL, device)
    print("\nAll is well." if right else "\nFAILED, see above.")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
