"""The spec of a model of transformers, made from its config alone, and the package that is rendered from it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="a config of transformers is read by it")

from codegen.cli.main import main  # noqa: E402
from generated.integrations import transformers as hf  # noqa: E402
from tests.support.tiny_models import SIZE, decoder  # noqa: E402

GEMMA2 = """\
# The attention of Gemma2ForCausalLM, its windows and caps compiled in.
variants:
  causal_window_8_softcap_2:
    doc: 1 of 2 layers of Gemma2ForCausalLM.
    mask: "q_idx >= kv_idx and q_idx - kv_idx < 8"
    score: 2.0 * tanh(score / 2.0)
  causal_softcap_2:
    doc: 1 of 2 layers of Gemma2ForCausalLM.
    mask: "q_idx >= kv_idx"
    score: 2.0 * tanh(score / 2.0)
"""


def saved(folder: Path, config: object) -> Path:
    config.save_pretrained(folder)  # type: ignore[attr-defined]
    return folder / "config.json"


def gemma2(folder: Path) -> Path:
    net = decoder("Gemma2")
    net.config.architectures = [type(net).__name__]
    return saved(folder, net.config)


def test_a_config_becomes_a_spec_and_a_package_whose_numbers_are_compiled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "gemma2_package"
    assert main(["render", "--from-config", str(gemma2(tmp_path)), "--out", str(out)]) == 0
    assert (tmp_path / "gemma2_package.yaml").read_text() == GEMMA2
    monkeypatch.syspath_prepend(str(tmp_path))
    own = importlib.import_module("gemma2_package.integrations.transformers")
    layers = own.explain(decoder("Gemma2")).layers
    assert [layer.text for layer in layers] == ["causal_window_8_softcap_2", "causal_softcap_2"]
    assert main(["check", "--variants", f"{out}.yaml", "--out", str(out)]) == 0


def test_dropout_of_training_is_in_the_spec(tmp_path: Path) -> None:
    from generated.integrations.transformers_spec import spec_of

    text = spec_of(saved(tmp_path, transformers.BertConfig(**{**SIZE, "num_key_value_heads": None})).parent)
    assert "full:\n    doc: 2 of 2 layers of BertModel.\n" in text
    assert "full_dropout:\n    doc: 2 of 2 layers of BertModel in training.\n    dropout: true\n" in text


def test_a_loaded_model_gives_its_spec_too() -> None:
    assert hf.explain(decoder("Gemma2")).spec() == GEMMA2


def test_an_existing_spec_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "mine.yaml"
    spec.write_text("variants: {causal: {mask: causal}}")
    out = ["--out", str(tmp_path / "mine")]
    assert main(["render", "--from-config", str(gemma2(tmp_path)), *out]) == 2
    assert capsys.readouterr().err == (
        f"error: --from-config: {spec} is there: render that with --variants {spec}, or delete it\n"
    )
    assert spec.read_text() == "variants: {causal: {mask: causal}}"


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (
            "none.json",
            ["--out", "x"],
            "expected a config.json, or a folder that holds one, got none.json, which does not exist",
        ),
        (".", ["--out", "x"], "expected a config.json, or a folder that holds one, got ., which holds none"),
        ("none.json", [], "expected --out DIR, the package of the model, got none"),
    ],
)
def test_bad_options_are_one_error(
    config: str,
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["render", "--from-config", config, *options]) == 2
    assert capsys.readouterr().err == f"error: --from-config: {message}\n"
    assert not list(tmp_path.iterdir())


def test_a_model_with_attention_of_its_own_is_one_error_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = saved(tmp_path, transformers.BloomConfig(vocab_size=99, hidden_size=64, n_layer=1, n_head=4))
    assert main(["render", "--from-config", str(config), "--out", str(tmp_path / "bloom")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --from-config {config}: spec: model: expected one whose attention can be served")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "llama", "hidden_size": "x"}', "Field 'hidden_size' expected int, got str"),
        ('{"model_type": "llama", "hidden_size": 30, "num_attention_heads": 7}', "is not a multiple of the number of"),
        ('{"model_type": "reformer", "architectures": ["ReformerModelWithLMHead"]}', "`is_decoder=True`"),
    ],
)
@pytest.mark.parametrize("command", [["render", "--from-config"], ["warm", "--gpu", "sm_90", "--model"]])
def test_a_config_that_transformers_refuses_is_one_error(
    text: str, message: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In whichever way: transformers asserts, and raises errors that are no ValueError."""
    config = tmp_path / "config.json"
    config.write_text(text, encoding="utf-8")
    out = ["--out", str(tmp_path / "x")] if command[0] == "render" else []
    assert main([*command, str(config), *out]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {command[-1]} {config}: ")
    assert message in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]
