"""FLA's forgetting attention replaced: `python -m examples.forgetting_attention`.

The forgetting transformer (Lin et al., 2025, arXiv:2503.02130) adds to the logit of query i and key j the sum of the
log forget gates between them, `g[j + 1] + ... + g[i]`. flash-linear-attention computes it with `parallel_attn(q, k,
v, g=g)` on `[B, S, H, D]`. Here it is `generated.torch.forgetting` with the same arguments and layout:

    from fla.ops.attn.parallel import parallel_attn        from generated.torch import forgetting
    o = parallel_attn(q, k, v, g=g)                        o = forgetting(q, k, v, g=g, layout="bshd")

The script compares output and gradients, including the gradient of g, with the formula in plain PyTorch in float64. If
FLA is installed and there is a GPU, it compares FLA's op too. `--full` uses sizes for a GPU and prints times.

The exit status is 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from generated.torch import forgetting

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
NAMES = ("o", "dq", "dk", "dv", "dg")
BOUND = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
"""Largest error relative to the largest element: sums of float32, or 4 roundings to bfloat16."""


def formula(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """The paper's equation with the S x S matrix: q `[B, S, Hq, D]`, k, v `[B, S, Hkv, D]`, g `[B, S, Hq]`."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    total = g.cumsum(1).transpose(1, 2)  # [B, Hq, S]
    decay = total[..., :, None] - total[..., None, :]
    logits = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5 + decay
    future = torch.ones_like(logits, dtype=torch.bool).triu(1)
    probabilities = torch.softmax(logits.masked_fill(future, -torch.inf), dim=-1)
    return torch.einsum("bhij,bjhd->bihd", probabilities, v)


def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """The generated op."""
    o = forgetting(q, k, v, g=g, layout="bshd")
    assert isinstance(o, Tensor)  # no lse was asked for
    return o


def fla() -> Attention | None:
    """FLA's op, or None if it is not installed."""
    if importlib.util.find_spec("fla") is None:
        return None
    from fla.ops.attn.parallel import parallel_attn

    return lambda q, k, v, g: parallel_attn(q, k, v, g=g)


def results(attention: Attention, inputs: tuple[Tensor, ...], do: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k, v and g."""
    q, k, v, g = (x.detach().clone().requires_grad_() for x in inputs)
    o = attention(q, k, v, g)
    o.backward(do.to(o.dtype))
    return [o.detach(), *(x.grad for x in (q, k, v, g) if x.grad is not None)]


def milliseconds(attention: Attention, inputs: tuple[Tensor, ...], do: Tensor) -> float:
    """Time of a forward and a backward on the GPU, the median of 20."""
    times = []
    for _ in range(25):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        results(attention, inputs, do)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(sorted(times[5:])[10])


def main() -> int:
    """Compare; returns 0 if all results are right."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.forgetting_attention", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--full", action="store_true", help="use larger sizes, for a GPU, and measure times")
    full: bool = parser.parse_args().full
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    batch, seq, heads, kv_heads, dim = (4, 2048, 16, 16, 128) if full else (2, 150, 4, 2, 64)
    torch.manual_seed(0)
    q, do = (torch.randn(batch, seq, heads, dim, device=device, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(batch, seq, kv_heads, dim, device=device, dtype=dtype) for _ in range(2))
    g = functional.logsigmoid(torch.randn(batch, seq, heads, device=device) + 2)  # float32, as FLA keeps it
    inputs = (q, k, v, g)
    # One batch row of the formula at a time, because it holds a number per pair of query and key in memory.
    want = [
        torch.cat(parts)
        for parts in zip(
            *(
                results(formula, tuple(x[i : i + 1].double() for x in inputs), do[i : i + 1].double())
                for i in range(batch)
            ),
            strict=True,
        )
    ]
    contenders: dict[str, Attention] = {"generated": ours}
    theirs = fla()
    if theirs is None or device == "cpu":
        print("FLA is not compared: it needs a GPU and `pip install flash-linear-attention`.")
    else:
        contenders["FLA"] = theirs
    print(f"Errors against the formula in float64, B{batch} S{seq} H{heads}/{kv_heads} D{dim}, {dtype}:")
    right = True
    for name, attention in contenders.items():
        found = results(attention, inputs, do)
        errors = [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, want, strict=True)]
        if name == "generated":
            right = all(error <= BOUND[dtype] for error in errors)
        shown = "  ".join(f"{result} {error:.1e}" for result, error in zip(NAMES, errors, strict=True))
        time = f"  {milliseconds(attention, inputs, do):.2f} ms, forward and backward" if device == "cuda" else ""
        print(f"  {name:10} {shown}{time}")
    print("All is well." if right else f"FAILED: an error is above {BOUND[dtype]:.0e}.")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
