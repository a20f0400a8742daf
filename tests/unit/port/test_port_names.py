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


def test_a_name_of_one_function_says_nothing_about_the_same_name_elsewhere(tmp_path: Path) -> None:
    report = _port(
        tmp_path,
        """
        class Other(nn.Module):
            def forward(self, places, table, size: float):
                places = places.unsqueeze(-1)
                table = nn.Parameter(torch.zeros(3))
                return table * 0.5 + places + size * 2 + table * size
        def make(places, table, size):
            def biased(score, b, h, q_idx, kv_idx):
                return score + table[places[b, q_idx] + kv_idx % size]
            return biased
        """,
    )
    assert report.failures == ()
    assert "table: {dims: [table_size], dtype: float32}" in report.text
    assert "the file computes it" not in report.text
    assert "size: int" in report.text


def _port(folder: Path, source: str) -> Report:
    path = folder / "mods.py"
    path.write_text(textwrap.dedent(source))
    return port(path)
