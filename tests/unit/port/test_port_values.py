"""`codegen port`: tensors that a file makes, names and powers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from codegen.ir.evaluate import evaluate
from codegen.load.spec_file import load
from tests.unit.port.reports import port_text

HEADS = 4


def test_tensors_that_the_file_makes_are_arguments(tmp_path: Path) -> None:
    """The program may write into a tensor of zeros, and what a factory gets may be computed in its call."""
    report = port_text(
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
    report = port_text(
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
    report = port_text(
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


def test_captured_names_that_are_words_of_the_language(tmp_path: Path) -> None:
    """A factory may call its arguments `h` and `q_idx`; inside its mod these are not the indices."""
    report = port_text(
        tmp_path,
        """
        def make_bias(h: int, q_idx: int, score, inf: float):
            def mod(s, batch, head, row, column):
                return s + (head + 1) / h * (column - row - q_idx) + score[head] + inf
            return mod
        """,
    )
    assert report.failures == ()
    assert "score: score + (h + 1) / h_arg * (kv_idx - q_idx - q_idx_arg) + score_arg[h] + inf_arg\n" in report.text
    assert "'q_idx' is called q_idx_arg here: 'q_idx' is an index name of every expression" in report.text


def test_attributes_of_several_objects_and_names_with_underscores_stay_apart(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        class Bias:
            def score_mod(self, score, b, h, q_idx, kv_idx):
                return score + self.rows.weight[q_idx, h] - self.columns.weight[kv_idx, h] + self.offset
        def make_mask(_size, size):
            def mask_mod(b, h, q_idx, kv_idx):
                return (q_idx - kv_idx < _size) & (kv_idx - q_idx < size)
            return mask_mod
        """,
    )
    assert report.failures == ()
    assert "score: score + weight[q_idx, h] - columns_weight[kv_idx, h] + offset\n" in report.text
    assert "'self.columns.weight' is called columns_weight here: 'weight' is another argument" in report.text
    assert "mask: q_idx - kv_idx < size and kv_idx - q_idx < size_2\n" in report.text


def test_products_of_positions_that_are_floats_do_not_leave_32_bits(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        def far(score, b, h, q_idx, kv_idx):
            d = (q_idx - kv_idx).float()
            return score - d ** 2 * 1e-9 - d.square() * 1e-9 - d * d * 1e-9 - d * 100000 * -2 - torch.abs(-d) * q_idx
        """,
    )
    assert report.failures == ()
    text = " ".join(report.text.split())
    assert text.count("(1.0 * (q_idx - kv_idx)) ** 2") == 2
    assert "(q_idx - kv_idx) * 100000.0 * -2" in text
    (tmp_path / "ported.yaml").write_text(report.text)
    score = load(tmp_path / "ported.yaml").variants["far"].score
    assert score is not None
    row, column = np.array(2_000_000), np.array(3)
    d = float(row - column)
    expected = 1.0 - 3e-9 * d**2 + 200000 * d - d * float(row)
    got = evaluate(score, {"score": np.array(1.0), "q_idx": row, "kv_idx": column}, {})
    np.testing.assert_allclose(got, expected, rtol=1e-6)  # some roundings to float32


def test_what_torch_does_to_gradients_and_to_narrow_integers_is_not_ported(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        def rounded(score, b, h, q_idx, kv_idx):
            return score + (score.round() - score).detach()
        def same_byte(b, h, q_idx, kv_idx):
            return q_idx.to(torch.uint8) == kv_idx.to(dtype=torch.uint8)
        def kept(score, b, h, q_idx, kv_idx):
            return score + bias.detach()[h] * (q_idx > kv_idx).to(torch.uint8) + q_idx.float().detach() / 2
        """,
    )
    assert report.ported == ("kept",)
    assert "rounded: a part of a score cannot be left out of its derivative" in report.failures[0]
    assert "same_byte: numbers beyond uint8 wrap around" in report.failures[1]


def test_conversions_to_floats_of_16_bits_are_not_ported(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        def rounded(score, b, h, q_idx, kv_idx):
            return score.to(torch.bfloat16) - (q_idx - kv_idx)
        def far(score, b, h, q_idx, kv_idx):
            return score - (q_idx - kv_idx).half()
        def typed(score, b, h, q_idx, kv_idx):
            return score - (q_idx > kv_idx).type(torch.float16)
        def near_a_tenth(score, b, h, q_idx, kv_idx):
            return score * torch.tensor(0.1, dtype=torch.bfloat16)
        def kept(score, b, h, q_idx, kv_idx):
            lowest = torch.tensor(-float("inf"), dtype=torch.float16)
            return torch.where(q_idx >= kv_idx, score + bias[h].half(), lowest).to(score.dtype)
        """,
    )
    assert report.ported == ("kept",)
    assert "score: where(q_idx >= kv_idx, score + bias[h], -inf)\n" in report.text
    reasons = [line.split(": ", 2)[1:] for line in report.failures]
    rounds = "rounds numbers, and the expression language computes in float32; leave the conversion out, or write"
    assert reasons == [
        ["rounded", f"bfloat16 {rounds} .float(): score.to(torch.bfloat16)"],
        ["far", f"half {rounds} .float(): (q_idx - kv_idx).half()"],
        ["typed", f"float16 {rounds} .float(): (q_idx > kv_idx).type(torch.float16)"],
        [
            "near_a_tenth",
            "bfloat16 rounds 0.1, and the expression language computes in float32: "
            "torch.tensor(0.1, dtype=torch.bfloat16)",
        ],
    ]


def test_names_that_functions_assign_as_global_or_nonlocal_are_captured(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        WIDE, NARROW, READ = 8, 2, 5
        def set_window():
            global WIDE, READ
            WIDE = READ
        set_window()
        def window(b, h, q_idx, kv_idx):
            return (q_idx - kv_idx < WIDE) & (q_idx - kv_idx > NARROW) & (kv_idx > READ)
        def make(size):
            def grow():
                nonlocal size
                size += 1
            def near(b, h, q_idx, kv_idx):
                return q_idx - kv_idx < size
            grow()
            return near
        three = make(2)
        def local():
            WIDE = 4
            return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < WIDE
        """,
    )
    assert report.failures == ()
    assert "mask: q_idx - kv_idx < WIDE and q_idx - kv_idx > 2 and kv_idx > 5\n" in report.text
    assert "WIDE: int\n" in report.text
    assert "mask: q_idx - kv_idx < size\n" in report.text
    assert "mask: q_idx - kv_idx < 4\n" in report.text


def test_the_shape_that_the_file_gives_a_tensor_is_noted(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        def make_same(ids):
            ids = ids.squeeze(0)
            return lambda b, h, q, kv: ids[q] == ids[kv]
        def make_first(ids, bias):
            flat = bias.squeeze(0).contiguous()
            def first(score, b, h, q, kv):
                return score + (ids.unsqueeze(0)[0, q] == 1) * flat[h] * bias[0, h].squeeze()
            return first
        def make_both(ids):
            return lambda b, h, q, kv: ids[b].squeeze(0)[q] == 1
        """,
    )
    text = " ".join(report.text.replace("#", "").split())
    assert "ids: dims and dtype are guessed from ids[q_idx]; the file computes it as `ids.squeeze(0)`" in text
    assert "ids: dims and dtype are guessed from ids[0, q_idx]; the file computes it as `ids.unsqueeze(0)`" in text
    assert "guessed from flat[h]; the file computes it as `bias.squeeze(0).contiguous()`" in text
    assert "tensor bias: dims and dtype are guessed from bias[0, h] " in text
    (line,) = report.failures
    assert "the shape of a tensor changes between its indices; index it once: ids[b].squeeze(0)[q]" in line


def test_dicts_are_not_read(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        CONFIG, SIZES = {"window": 3}, {0: 4}
        def named(b, h, q_idx, kv_idx):
            return q_idx - kv_idx < CONFIG["window"]
        def numbered(b, h, q_idx, kv_idx):
            return q_idx - kv_idx < SIZES[0]
        """,
    )
    reason = "entries of a dict are not read; give the value a name of its own"
    assert [line.split(": ", 2)[2] for line in report.failures] == [
        f"{reason}: CONFIG['window']",
        f"{reason}: SIZES[0]",
    ]


def test_flags_that_are_taken_as_their_defaults_are_named(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        def make_window(size: int, causal: bool = True, bias=None, device: str = "cuda"):
            if causal:
                def window(b, h, q_idx, kv_idx):
                    return (q_idx >= kv_idx) & (q_idx - kv_idx < size)
            else:
                def window(b, h, q_idx, kv_idx):
                    return q_idx - kv_idx < size
            return window
        both_sides = make_window(9, causal=False)
        def make_bias(bias=None):
            def mod(score, b, h, q_idx, kv_idx):
                if bias is not None:
                    score = score + bias[h]
                return score * 2
            return mod
        """,
    )
    assert report.failures == ()
    assert "mask: q_idx - kv_idx < 9\n" in report.text
    assert "causal: its default" not in report.text  # make_window is called in the file
    assert "# argument bias: its default, None, is written in; port a call of the factory for another" in report.text
    assert "device" not in report.text
    alone = port_text(tmp_path, "def make(causal=True):\n    return lambda b, h, q, kv: (q >= kv) | (not causal)\n")
    assert "# argument causal: its default, True, is written in" in alone.text


def test_parameters_of_a_module_are_trained(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        class Bias(nn.Module):
            def __init__(self, heads, window):
                super().__init__()
                self.window = window
                self.table = nn.Parameter(torch.zeros(heads, 64))
                self.ids = torch.zeros(64, dtype=torch.int64)
                self.either = nn.Parameter(torch.zeros(heads))
            def freeze(self):
                self.either = torch.zeros(4)
            def score_mod(self, score, b, h, q_idx, kv_idx):
                near = torch.where(q_idx - kv_idx < self.window, score, score / 2)
                return near + self.table[h, self.ids[kv_idx]] + self.either[h]
        """,
    )
    assert report.failures == ()
    assert "table: {dims: [h, table_size_1], dtype: float32, grad: true}" in report.text
    assert "either: {dims: [h], dtype: float32}" in report.text  # assigned twice: what it is depends on the call
    assert "ids: {dims: [kv_idx], dtype: int64" in report.text
    assert "window_arg: int\n" in report.text


def test_a_factory_of_masks_that_are_not_known_is_reported(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        def causal(b, h, q_idx, kv_idx):
            return q_idx >= kv_idx
        def both(f, g):
            return and_masks(f, g)
        twice = both(causal, causal)
        def any_of(masks):
            return or_masks(*masks)
        """,
    )
    assert report.ported == ("causal", "twice")
    (line,) = report.failures
    assert "any_of: what * stands for is not known; write the arguments one by one" in line
    assert line.endswith(": or_masks(*masks)")
    assert f"  # any_of is not ported:\n  #   {line}\n" in report.text


def test_attribute_with_the_name_of_a_tensor_method_is_a_scalar(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        class Attention(torch.nn.Module):
            def mask_mod(self, b, h, q_idx, kv_idx):
                return (q_idx - kv_idx < self.size) & (kv_idx.clamp(max=self.max) >= 0)
        """,
    )
    assert report.failures == ()
    assert "mask: q_idx - kv_idx < size and min(kv_idx, max_arg) >= 0" in report.text


def test_masks_joined_in_a_call_are_ported_as_one(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        def near(b, h, q, kv):
            return q - kv < 5
        def prefix(b, h, q, kv):
            return kv < 3
        def twice(score, b, h, q, kv):
            return score * 2
        def plain(q, k, v):
            return flex_attention(q, k, v, block_mask=create_block_mask(or_masks(near, prefix), 1, 1, 4, 4))
        def doubled(q, k, v):
            mask = create_block_mask(and_masks(near, prefix), 1, 1, 4, 4)
            return flex_attention(q, k, v, score_mod=twice, block_mask=mask)
        """,
    )
    assert report.failures == ()
    assert "mask: q_idx - kv_idx < 5 or kv_idx < 3" in report.text
    assert "mask: q_idx - kv_idx < 5 and kv_idx < 3\n    score: score * 2" in report.text
