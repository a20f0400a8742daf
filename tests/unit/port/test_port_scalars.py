"""`codegen port`: the types of scalars, and flags that decide a branch."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from codegen.port.command import Report, port
from tests.unit.port.reports import formulas


@pytest.mark.parametrize(
    ("before", "mask", "word"),
    [
        ("", "q - k < x", "int"),
        ("", "q - k < 2 * x", "int"),
        ("", "q - k < 0.5 * x", "float"),
        ("", "q - k < x / n", "float"),
        ("", "q / 2 < x", "float"),
        ("", "q * x < 1.5 * k", "float"),
        ("", "q * x < 1.5", "float"),
        ("", "1.5 > q - x", "float"),
        ("", "torch.exp((k - q) / x) > 0.5", "float"),
        ("", "torch.clamp(q - x, max=7.5) > k", "float"),
        ("", "(q // x > k // x) & (q < 0.5 * x)", "int"),
        ("import sys\nx = float(sys.argv[1])", "q - k < x", "float"),
        ("x = int(args.size)", "q - k < x", "int"),
        ("x: float = get()", "q - k < x", "float"),
        ("x: 'int' = get()", "q / 2 < x", "int"),
        ("x: float", "q - k < x", "float"),
        ("x = 2 / args.size", "q - k < x", "float"),
    ],
)
def test_the_type_of_a_scalar_follows_from_its_value_or_use(
    tmp_path: Path, before: str, mask: str, word: str
) -> None:
    report = _port(tmp_path, f"{before}\ndef mod(b, h, q, k):\n    return {mask}\n")
    assert report.failures == ()
    declared = re.search(r"^      (?:x|size): (\w+)$", report.text, re.MULTILINE)
    assert declared is not None
    assert declared[1] == word


def _port(folder: Path, source: str) -> Report:
    path = folder / "mods.py"
    path.write_text(textwrap.dedent(source))
    return port(path)
