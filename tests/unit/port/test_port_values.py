"""`codegen port`: tensors that a file makes, names and powers."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import torch

from codegen.ir.evaluate import evaluate
from codegen.load.spec_file import load
from codegen.port.command import Report, port

HEADS = 4


def test_tensors_that_the_file_makes_are_arguments(tmp_path: Path) -> None:
    """The program may write into a tensor of zeros, and what a factory gets may be computed in its call."""
    report = _port(
        tmp_path,
        """
        offset = torch.zeros((), dtype=torch.int32)
        speaker = torch.zeros(64, dtype=torch.int32, device="cuda")
        def causal(b, h, q_idx, kv_idx):
            return q_idx + offset >= kv_idx
        def make_documents(mask_mod, document_id):
            def mod(b, h, q_idx, kv_idx):
                return (document_id[q_idx] == document_id[kv_idx]) & mask_mod(b, h, q_idx, kv_idx)
            return mod
        given = make_documents(causal, torch.tensor([0, 0, 1]))
        read = make_documents(mask_mod=causal, document_id=load_ids("ids.bin"))
        named = make_documents(causal, speaker)
        """,
    )
    assert report.failures == ()
    assert report.ported == ("causal", "given", "read", "named")
    assert "mask: q_idx + offset >= kv_idx" in report.text
    assert "offset: {dims: [], dtype: int32}" in report.text
    assert "mask: speaker[q_idx] == speaker[kv_idx] and q_idx + offset >= kv_idx" in report.text
    assert report.text.count("mask: document_id[q_idx] == document_id[kv_idx] and q_idx + offset >= kv_idx") == 2
    assert "the file computes it as\n  #   `load_ids('ids.bin')`" in report.text


def test_names_that_yaml_takes_for_booleans_are_quoted(tmp_path: Path) -> None:
    report = _port(
        tmp_path,
        """
        def off(score, b, h, q_idx, kv_idx):
            return score + on[h] * no + null[q_idx]
        """,
    )
    assert report.failures == ()
    for line in ('  "off":', '      "on": {', '      "null": {', '      "no": float'):
        assert line in report.text


def test_powers_of_two_of_integers_are_integers(tmp_path: Path) -> None:
    """As in torch, a negative exponent gives 0."""
    report = _port(
        tmp_path,
        """
        def near(b, h, q_idx, kv_idx):
            return (q_idx // 2**h - kv_idx // 2**h) < 2 ** (h - 2)
        """,
    )
    (tmp_path / "ported.yaml").write_text(report.text)
    mask = load(tmp_path / "ported.yaml").variants["near"].mask
    assert mask is not None
    h, q, k = np.indices((HEADS, 30, 30))
    head, row, column = map(torch.from_numpy, (h, q, k))
    expected = (row // 2**head - column // 2**head) < 2 ** (head - 2)
    got = evaluate(mask, {"b": np.zeros_like(h), "h": h, "q_idx": q, "kv_idx": k}, {})
    np.testing.assert_array_equal(got, expected.numpy())


def _port(folder: Path, source: str) -> Report:
    path = folder / "mods.py"
    path.write_text(textwrap.dedent(source))
    return port(path)
