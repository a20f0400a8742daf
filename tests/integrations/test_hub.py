"""`codegen hub --check`: the kernel as the library `kernels` loads it, and as transformers does by its repository."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("kernels", reason="kernels brings twenty packages: it is in the extra `hub` alone")

from codegen.cli.main import main
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hub") / "kernel"
    assert main(["hub", str(ROOT / "generated"), "--out", str(out)]) == 0
    return out


def test_every_op_and_layer_is_that_of_the_package(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hub", str(ROOT / "generated"), "--out", str(folder), "--check"]) == 0
    assert "ops and layers equal those of" in capsys.readouterr().out


def test_transformers_takes_it_as_an_implementation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With left padding, by flash attention's functions."""
    pytest.importorskip("transformers", reason="transformers is in the extra `test`")
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.utils import is_kernels_available

    if not is_kernels_available():
        pytest.skip("transformers does not take this version of kernels: it names those that it takes")
    monkeypatch.setenv("LOCAL_KERNELS", f"me/attention-codegen={folder}")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes))
    model.set_attn_implementation("eager")
    tokens, mask = torch.randint(0, 64, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    mask[0, :5] = 0
    want = model(tokens, attention_mask=mask).logits
    model.set_attn_implementation("me/attention-codegen@main")
    got = model(tokens, attention_mask=mask).logits
    # float32: sums of 64 terms around 1, rounded in another order.
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-5, atol=1e-5)
