"""`codegen port`: entries that compute what FlexAttention's functions do, and clear lines for what cannot be ported."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from codegen.cli.main import main
from codegen.ir.evaluate import evaluate
from codegen.load.spec_file import load
from codegen.port.command import port
from codegen.spec.model import Spec, Variant
from codegen.util.errors import CodegenError
from tests.support.paths import ROOT
from tests.unit.port.reports import port_text

FILE = Path(__file__).parent / "flex_mods_file.py"
BATCH, HEADS, LENGTH = 2, 4, 120


@pytest.fixture(scope="module")
def mods() -> ModuleType:
    """The file of mods as a module: ported entries are compared with its functions."""
    spec = importlib.util.spec_from_file_location("flex_mods_file", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ported(tmp_path_factory: pytest.TempPathFactory) -> Spec:
    path = tmp_path_factory.mktemp("ported") / "ported.yaml"
    report = port(FILE)
    assert report.failures == ()
    path.write_text(report.text)
    return load(path)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=generator())


OFFSETS = torch.tensor([0, 17, 60, 61, LENGTH])
DOCUMENT = torch.repeat_interleave(torch.arange(4), OFFSETS.diff())
SLOPES = torch.rand(HEADS, generator=generator())
BIAS = torch.randn(HEADS, 33, generator=generator())

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # entry: (name in the file, arguments of its factory, names of the entry if these differ)
    "causal_capped": ("causal_mask+capped", {}, {}),
    "sliding_window": ("generate_sliding_window", {"window_size": 9}, {}),
    "fixed_window": ("fixed_window", {}, {}),
    "prefix_lm": ("generate_prefix_lm_mask", {"prefix_length": 13}, {}),
    "document": ("make_document_mask", {"document_id": integers(3, BATCH, LENGTH).sort().values}, {}),
    "packed_causal": ("generate_packed_causal", {"offsets": OFFSETS}, {"document_arg": DOCUMENT}),
    "alibi_bias": ("generate_alibi_bias", {"H": HEADS}, {}),
    "alibi_with_slopes": ("make_alibi_with_slopes", {"slopes": SLOPES}, {}),
    "tanh_softcap": ("generate_tanh_softcap", {"soft_cap": 3.0}, {}),
    "relative_bias": ("make_relative_bias", {"relative_bias": BIAS, "most": 32}, {}),
    "natten": ("natten_mask", {}, {}),
    "dilated_sliding_window": ("generate_dilated_sliding_window", {"window_size": 31, "dilation": 3}, {}),
    "causal_with_padding": ("causal_with_padding", {"lengths": torch.tensor([70, 111])}, {}),
    "scaled": ("scaled", {}, {}),
    "gpt_oss_window": ("GptOssAttention", {"sliding_window": 16}, {}),
    "everything": ("everything", {}, {}),
    "not_self": ("not_self", {}, {}),
    "hidden_by_score": ("hidden_by_score", {}, {}),
    "dropped_heads": ("dropped_heads", {}, {}),
    "partial_window": ("partial_window", {}, {}),
    "odd_functions": ("odd_functions", {}, {}),
    "sums_of_booleans": ("sums_of_booleans", {}, {}),
    "given_dtypes": ("given_dtypes", {}, {}),
    "swapped_bits": ("swapped_bits", {}, {}),
    "seen": (
        "make_seen",
        {"seen": integers(2, BATCH, LENGTH, LENGTH).bool(), "tree": integers(2, LENGTH).bool()},
        {},
    ),
}


def original(mods: ModuleType, name: str, arguments: dict[str, Any]) -> list[Any]:
    """The functions themselves: a mask, a score, or both."""
    if name == "GptOssAttention":
        return [mods.GptOssAttention(**arguments).masks()]
    made = [getattr(mods, part) for part in name.split("+")]
    return [made[0](**arguments)] if arguments else made


def test_every_mod_of_the_file_has_a_case(ported: Spec) -> None:
    """The file calls `generate_sliding_window` itself, so that only its result is ported unless the name is given."""
    assert set(ported.variants) == set(CASES) - {"sliding_window"}


@pytest.mark.parametrize("entry", CASES)
def test_a_ported_entry_computes_what_the_mod_does(entry: str, mods: ModuleType, ported: Spec, tmp_path: Path) -> None:
    name, arguments, others = CASES[entry]
    variant = ported.variants.get(entry) or _alone(name, tmp_path)
    draw = generator()
    shape = (400,)
    b, h = torch.randint(BATCH, shape, generator=draw), torch.randint(HEADS, shape, generator=draw)
    q_idx, kv_idx = (torch.randint(LENGTH, shape, generator=draw) for _ in range(2))
    score = 3 * torch.randn(shape, generator=draw, dtype=torch.float64)
    keep, wanted = torch.ones(shape, dtype=torch.bool), score
    for mod in original(mods, name, arguments):
        try:
            wanted = mod(score.clone(), b, h, q_idx, kv_idx)
        except TypeError:
            keep = keep & mod(b, h, q_idx, kv_idx)
    # A score of -inf leaves a pair out: the loader makes this a part of the mask.
    keep = keep & (wanted != -torch.inf)
    variables = {"b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx, "score": score}
    values: dict[str, Any] = {name: x.numpy() for name, x in variables.items()}
    given = {**arguments, **others}
    values |= {name: given[name] for name in variant.scalars}
    tensors = {name: given[name].numpy() for name in variant.tensors}
    got = np.ones(1, bool) if variant.mask is None else evaluate(variant.mask, values, tensors)
    np.testing.assert_array_equal(np.broadcast_to(got, shape), keep.numpy())
    assert variant.mask is None or 0 < keep.sum() < keep.numel()  # the case keeps some pairs but not all
    if variant.score is not None:
        found = np.broadcast_to(evaluate(variant.score, values, tensors), shape)
        # float32 tensors and torch's float32 exp2 of the original: a few units of 2**-24.
        np.testing.assert_allclose(found[keep], wanted[keep], rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(wanted[keep], score[keep])


def _alone(name: str, folder: Path) -> Variant:
    path = folder / "alone.yaml"
    path.write_text(port(FILE, [name]).text)
    (variant,) = load(path).variants.values()
    return variant


def test_tensors_and_scalars_are_declared_as_they_are_used(ported: Spec) -> None:
    tensors = {name: tensor for variant in ported.variants.values() for name, tensor in variant.tensors.items()}
    assert tensors["document_id"].dims == ("b", "kv_idx")
    assert tensors["document_id"].dtype == "int32"
    assert tensors["offsets"].dims == ("offsets_size",)
    assert tensors["seen"].dims == ("b", "q_idx", "kv_idx")
    assert tensors["seen"].dtype == "bool"
    assert tensors["relative_bias"].dtype == "float32"
    assert ported.variants["prefix_lm"].scalars["prefix_length"].example == 24
    assert ported.variants["tanh_softcap"].scalars["soft_cap"].type == "float"
    assert "guessed from slopes[h]" in port(FILE).text


def test_a_trained_tensor_and_a_negative_index_are_noted(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        bias = torch.nn.Parameter(torch.zeros(8, 64))
        def biased(score, b, h, q_idx, kv_idx):
            return score + bias[h, q_idx - kv_idx]
        """,
    )
    assert "bias: {dims: [h, bias_size_1], dtype: float32, grad: true}" in report.text
    assert "an index below 0 counts from the end in torch" in report.text


BAD = {
    "a loop": "for i in table:\n    score = score + i\nreturn score",
    "has an effect beside its result": "table[q_idx] = score\nreturn score",
    "a statement for its effect": "score.add_(1)\nreturn score",
    "the branch depends on data": "if q_idx > kv_idx:\n    return score\nreturn score * 2",
    "FlexAttention cannot trace either; use torch.where": "return score if h > 2 else 0",
    "'helper' is no function of this file": "return helper(score)",
    "'torch.special.i0' has no counterpart": "return torch.special.i0(score)",
    "'.sum' looks at more than one pair": "return score - table[h].sum()",
    "the size of a tensor is not known": "return score + table.shape[0]",
    "not with slices": "return score + table[:, q_idx]",
    "write float('-inf')": "return torch.where(q_idx >= kv_idx, score, torch.finfo(score.dtype).min)",
    "seems to call itself without end": "return mod(score, b, h, q_idx, kv_idx)",
    "'table' is indexed with 1 and 2 indices": "return score + table[h] + table[b, h]",
    "'table' is indexed in one place and used as a number": "return score + table[h] * table",
    "exceptions have no counterpart": "raise ValueError",
    "there is no matrix product": "return score @ table",
    "the exponent or a positive base": "return score ** table[h]",
    "'exp' with out= is not": "return score.exp(out=score)",
    "an index must be an integer": "return score + table[score]",
    "counts from the end in torch": "return score + table[h, -1]",
    "these constants have no finite value": "return score + 1 / 0",
    "the entry would not load": "return score * 1e60",
}


@pytest.mark.parametrize("reason", BAD)
def test_what_has_no_counterpart_gets_one_line(reason: str, tmp_path: Path) -> None:
    body = "".join(f"            {line}\n" for line in BAD[reason].splitlines())
    report = port_text(tmp_path, f"        def mod(score, b, h, q_idx, kv_idx):\n{body}")
    assert len(report.failures) == 1, report.failures
    assert reason in report.failures[0]
    assert report.failures[0].startswith(str(tmp_path / "mods.py"))
    assert f"  # {report.failures[0].split(': ')[1]} is not ported" in report.text


def test_several_problems_of_one_mod_are_all_reported(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        def mod(score, b, h, q_idx, kv_idx):
            near = helper(q_idx)
            far = torch.special.i0(score) + near
            return near + far
        """,
    )
    assert [line.split(": ")[0].rpartition(":")[2] for line in report.failures] == ["3", "4"]


def test_values_and_calls_that_fan_out_end_soon(tmp_path: Path) -> None:
    doubled = "".join("            score = score + score\n" for _ in range(60))
    calls = "".join(f"def f{i}(x):\n    x.a()\n    f{i + 1}(x)\n    return f{i + 1}(x)\n" for i in range(30))
    report = port_text(tmp_path, f"        def mod(score, b, h, q_idx, kv_idx):\n{doubled}            return score\n")
    assert len(report.failures) == 1
    assert "takes more operations" in report.failures[0]
    assert port_text(tmp_path, f"m = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx\n{calls}").ported == ("m",)


def test_an_assertion_is_noted_and_chained_indices_are_one(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        def mod(b, h, q_idx, kv_idx):
            assert limit > 0
            return seen[b][q_idx, kv_idx] & (q_idx < limit)
        """,
    )
    assert report.failures == ()
    assert "nothing checks `assert limit > 0`" in report.text
    assert "mask: seen[b, q_idx, kv_idx] and q_idx < limit" in report.text


def test_constants_decide_branches_and_others_give_two_entries(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        def make(kind):
            if kind == "causal":
                def mask_mod(b, h, q_idx, kv_idx):
                    return q_idx >= kv_idx
            else:
                def mask_mod(b, h, q_idx, kv_idx):
                    return q_idx <= kv_idx
            return mask_mod

        def windowed(size=None):
            def mask_mod(b, h, q_idx, kv_idx):
                if size is None:
                    return q_idx >= kv_idx
                return q_idx - kv_idx < size
            return mask_mod
        """,
    )
    assert report.failures == ()
    masks = [line.split("mask: ")[1] for line in report.text.splitlines() if "mask: " in line]
    assert masks == ["q_idx >= kv_idx", "q_idx <= kv_idx", "q_idx >= kv_idx"]


def test_a_call_of_flex_attention_pairs_what_it_uses(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        class Attention(torch.nn.Module):
            def forward(self, q, k, v, doc):
                def mask_mod(b, h, q_idx, kv_idx):
                    return doc[b, q_idx] == doc[b, kv_idx]
                def score_mod(score, b, h, q_idx, kv_idx):
                    return score + self.slopes[h] * (kv_idx - q_idx)
                blocks = create_block_mask(mask_mod, 2, None, 128, 128)
                return torch.compile(flex_attention)(q, k, v, score_mod=score_mod, block_mask=blocks)
        """,
    )
    assert len(report.ported) == 1
    assert "mask: doc[b, q_idx] == doc[b, kv_idx]" in report.text
    assert "score: score + slopes[h] * (kv_idx - q_idx)" in report.text


def test_a_method_may_be_a_mod(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        class Attention(torch.nn.Module):
            def score_mod(self, score, b, h, q_idx, kv_idx):
                return score + self.bias[h, q_idx]
            def mask_mod(self, b, h, q_idx, kv_idx):
                return (q_idx >= kv_idx) & (q_idx - kv_idx < self.reach)
            @staticmethod
            def plain(b, h, q_idx, kv_idx):
                return q_idx >= kv_idx
        """,
    )
    assert report.failures == ()
    assert report.ported == ("score", "mask", "plain")
    assert "score: score + bias[h, q_idx]" in report.text
    assert "mask: q_idx >= kv_idx and q_idx - kv_idx < reach" in report.text
    assert "reach: int" in report.text


def test_names_of_the_library_are_changed(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        def mod(b, h, q_idx, kv_idx):
            return q_idx - kv_idx < window
        """,
    )
    assert "q_idx - kv_idx < window_arg" in report.text
    assert "'window' is the name of a mask or score" in report.text


def test_the_file_is_never_run(tmp_path: Path) -> None:
    source = "import sys\nsys.exit(9)\nraise SystemExit\nm = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx\n"
    assert port_text(tmp_path, source).ported == ("m",)
    assert "mods" not in sys.modules


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, none = (tmp_path / f"{name}.py" for name in ("good", "bad", "none"))
    good.write_text("m = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx\n")
    bad.write_text("m = lambda b, h, q_idx, kv_idx: unknown(q_idx)\n")
    none.write_text("print('no mods')\n")
    out = tmp_path / "ported.yaml"
    assert main(["port", str(good), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 1 entry\n"
    assert load(out).variants["m"].mask_text == "q_idx >= kv_idx"
    assert main(["port", str(bad)]) == 1
    shown = capsys.readouterr()
    assert "unknown(q_idx)" in shown.err
    assert "# m is not ported" in shown.out
    for arguments in ([none], [tmp_path / "absent.py"], [good, "--function", "n"], [good, "--function", "m+m"]):
        assert main(["port", *map(str, arguments)]) == 2
        assert capsys.readouterr().err.startswith("error: ")
    bad.write_text("def f(:\n")
    assert main(["port", str(bad)]) == 2
    assert "this is no Python" in capsys.readouterr().err
    bad.write_bytes(b"x = '\xff'\n")
    assert main(["port", str(bad)]) == 2
    assert "this is no Python: " in capsys.readouterr().err


@pytest.mark.parametrize("head", [b"\xef\xbb\xbf", b"# -*- coding: latin-1 -*-\nNAME = '\xe9'\n"])
def test_the_encoding_of_a_file_is_found_as_python_finds_it(head: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mods.py"
    path.write_bytes(head + b"def causal(b, h, q_idx, kv_idx):\n    return q_idx >= kv_idx\n")
    assert port(path).ported == ("causal",)


def test_the_ported_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mods.py"
    shutil.copy(FILE, path)
    assert main(["port", str(path), "--out", str(tmp_path / "." / "mods.py")]) == 2
    assert capsys.readouterr().err == f"error: --out: expected another file than the one to port, got {path}\n"
    assert path.read_bytes() == FILE.read_bytes()


def test_a_name_is_offered_for_a_slip() -> None:
    with pytest.raises(CodegenError, match="did you mean 'natten_mask'"):
        port(FILE, ["nattenmask"])


def test_the_how_to_page_shows_what_port_prints(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "how-to" / "port-from-flexattention.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (entry,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "mods.py").write_text(source)
    assert port(tmp_path / "mods.py", ["make_document+make_softcap"]).text == entry
