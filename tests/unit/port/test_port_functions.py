"""`codegen port`: functions of torch that the language writes with others, beside torch itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from codegen.ir.evaluate import evaluate
from codegen.load.spec_file import load
from codegen.port.command import port

MASKS = (
    "torch.div(q - k, 7, rounding_mode='trunc') <= h",
    "(q - k).div(-7, rounding_mode='trunc') <= h",
    "torch.div(q - k, -1 - k, rounding_mode='trunc') < h - 1",
    "torch.divide((q - k) / 2, h - 2.5, rounding_mode='trunc') <= 3",
    "torch.div(q - k, 7, rounding_mode='floor') <= h",
    "torch.fix((q - k) / 8) >= 1",
    "torch.frac((q - k) / 8) >= 0.5",
    "torch.sgn(q - k) >= h - 1",
    "torch.positive(q) >= k",
    "(q / 4).type_as(k) >= k",
    "(q - k).type_as(0.5 * q) / 3 > 1",
    "torch.add(q, k, alpha=-2) > h",
    "q.sub(k, alpha=3) > 0",
    "q - k < min([9, 7, 8]) + max((1, 2))",
    "q - k < math.log(64, 2) + math.log10(100) + math.hypot(3, 4) + math.comb(4, 2)",
)
SCORES = (
    "score + torch.div(10 * score, 3, rounding_mode='trunc')",
    "score.frac() + torch.fix(3 * score)",
    "score.add(k, alpha=0.25) - torch.subtract(q, k, alpha=-2)",
    "score + (q - k).type_as(score) * 0.1",
    "score * math.sin(1.0) + math.tanh(0.3) + math.atan(2.0)",
)


@pytest.mark.parametrize("text", [*MASKS, *SCORES])
def test_functions_have_torch_values(text: str, tmp_path: Path) -> None:
    first = "score, " if text in SCORES else ""
    path = tmp_path / "mods.py"
    path.write_text(f"import math\nimport torch\ndef mod({first}b, h, q, k):\n    return {text}\n")
    report = port(path)
    assert report.failures == ()
    (tmp_path / "mods.yaml").write_text(report.text)
    (variant,) = load(tmp_path / "mods.yaml").variants.values()
    draw = torch.Generator().manual_seed(0)
    h = torch.randint(4, (500,), generator=draw)
    q, k = (torch.randint(39, (500,), generator=draw) for _ in range(2))
    score = 3 * torch.randn(500, generator=draw, dtype=torch.float64)
    values: dict[str, Any] = {"score": score, "h": h, "q": q, "k": k}
    wanted = eval(text, {"torch": torch, "math": math, **values})
    names = {"score": score.numpy(), "h": h.numpy(), "q_idx": q.numpy(), "kv_idx": k.numpy()}
    if first:
        assert variant.score is not None
        np.testing.assert_allclose(evaluate(variant.score, names, {}), wanted, rtol=1e-6, atol=1e-6)
    else:
        assert variant.mask is not None
        assert 0 < wanted.sum() < len(wanted)
        np.testing.assert_array_equal(evaluate(variant.mask, names, {}), wanted)


def test_a_rounding_mode_that_torch_does_not_have_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mods.py"
    path.write_text("def mod(b, h, q, k):\n    return torch.div(q, 7, rounding_mode='ceil') > k\n")
    assert "rounding_mode is 'floor' or 'trunc'; this one is not known" in port(path).failures[0]
