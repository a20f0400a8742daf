"""`codegen port`: which functions of a file are mods, and what their names stand for."""

from __future__ import annotations

import textwrap
from pathlib import Path

from codegen.port.command import Report, port


def test_integers_that_are_converted_to_integers_stay_integers(tmp_path: Path) -> None:
    report = _port(
        tmp_path,
        """
        def halves(b, h, q_idx, kv_idx):
            return (q_idx.to(torch.int64) * 3) // 2 >= kv_idx
        def make_sides(table, half: int):
            return lambda score, b, h, q, kv: score + table[(q < kv).to(torch.int32) * half, h]
        """,
    )
    assert report.failures == ()
    assert "mask: q_idx * 3 // 2 >= kv_idx" in report.text
    assert "score: score + table[where(q_idx < kv_idx, 1, 0) * half, h]" in report.text


def _port(folder: Path, source: str) -> Report:
    path = folder / "mods.py"
    path.write_text(textwrap.dedent(source))
    return port(path)
