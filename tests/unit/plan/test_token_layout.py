"""The differences between the modes of a call, in kernels and in launches."""

from __future__ import annotations

import pytest

from codegen.analysis.call_modes import Mode
from codegen.plan.code.dialects import GL, TL
from codegen.plan.code.tree import Code
from codegen.plan.kernels.token_layout import token_layout

DENSE, PACKED, SEGMENTED = (token_layout(mode) for mode in (Mode.DENSE, Mode.PACKED, Mode.SEGMENTED))


def test_capabilities() -> None:
    assert [layout.has_sequences for layout in (DENSE, PACKED, SEGMENTED)] == [False, True, False]
    assert [layout.gives_positions for layout in (DENSE, PACKED, SEGMENTED)] == [False, False, True]
    assert [layout.keys for layout in (DENSE, PACKED, SEGMENTED)] == ["kv_idx", "kv_idx", "cols"]
    assert [TL.text(layout.ragged) for layout in (DENSE, PACKED, SEGMENTED)] == ["RAGGED", "True", "RAGGED"]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (DENSE.head_offset("o", "h", "q"), "b * stride_ob + h * stride_oh"),
        (PACKED.head_offset("o", "h", "q"), "q_start * stride_os + h * stride_oh"),
        (DENSE.aligned_head_offset("k", "hkv", "kv"), "(b * stride_kb + hkv * stride_kh) * UNIT"),
        (PACKED.aligned_head_offset("k", "hkv", "kv"), "kv_start * stride_ks + hkv * stride_kh * UNIT"),
        (DENSE.lse_offset, "(b * num_heads + h) * q_len"),
        (PACKED.lse_offset, "h * q_total + q_start"),
        (PACKED.row_offset("kv"), "h * kv_total + kv_start"),
        (DENSE.partial_sum_index, "(b * num_heads + h) * num_blocks + start_m // BLOCK_M"),
        (PACKED.partial_sum_index, "h * (tl.num_programs(0) // num_heads) + first_entry + start_m // BLOCK_M"),
        (DENSE.num_parts("q"), "tl.cdiv(q_len, PART)"),
        (PACKED.num_parts("kv"), "kv_parts"),
        (DENSE.first_part("kv"), "head * num_kv"),
        (PACKED.first_part("q"), "head * q_parts + q_start // PART + b"),
    ],
)
def test_offsets_in_kernels(code: Code, text: str) -> None:
    assert TL.text(code) == text
    assert GL.text(code) == text.replace("tl.", "gl.")


def test_launches() -> None:
    assert DENSE.query_programs("tile").text == "cdiv(q_len, tile.block_m) * num_heads * batch"
    assert PACKED.query_programs("tile").text == "block_seqs.shape[0] * num_heads"
    assert DENSE.strides("q").text == "*strides(q)"
    assert PACKED.unit_strides("q", "k").text == "*packed_unit_strides(q, k)"
