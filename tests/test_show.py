"""`show`: what it prints of a variant, and the error each bad argument gets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codegen.block_status import Status
from codegen.cli import main
from codegen.show import coarsened

ROOT = Path(__file__).resolve().parents[1]

CAUSAL = """\
causal: A query attends to itself and to what came before (Vaswani et al., 2017, section 3.2.3).

mask      q_idx >= kv_idx
score     score
tensors   -
scalars   -
extras    -
schedule  closed_form

512 queries (down) by 512 keys (across), blocks of 64 by 64, b = 0, h = 0

▒▒..............
██▒▒............
████▒▒..........
██████▒▒........
████████▒▒......
██████████▒▒....
████████████▒▒..
██████████████▒▒

. empty  ▒ partial  █ full

                      empty   partial      full
evaluated             43.8%     12.5%     43.8%
by block analysis     43.8%     12.5%     43.8%

pairs kept        50.1%
work skipped      43.8%
"""

WINDOW = """\
window: Causal with a window of `size` keys, the query's own included (Mistral 7B, arXiv:2310.06825).

mask      q_idx >= kv_idx and q_idx - kv_idx < size
score     score
tensors   -
scalars   size: int = 100
extras    -
schedule  closed_form

256 queries (down, from position 256 on) by 512 keys (across), blocks of 64 by 32, b = 1, h = 3

........++++++##++++............
............++++++##++++........
................++++++##++++....
....................++++++##++++

. empty  + partial  # full

                      empty   partial      full
evaluated             62.5%     31.2%      6.2%
by block analysis     62.5%     31.2%      6.2%

pairs kept        19.5%
work skipped      62.5%
"""

GEMMA2_LOCAL = """\
mask      q_idx >= kv_idx and q_idx - kv_idx < 4096
score     50.0 * tanh(0.02 * score)
tensors   -
scalars   -
extras    -
schedule  closed_form

8192 queries (down) by 8192 keys (across), blocks of 256 by 256, b = 0, h = 0

▒▒..............
██▒▒............
████▒▒..........
██████▒▒........
▒▒██████▒▒......
..▒▒██████▒▒....
....▒▒██████▒▒..
......▒▒██████▒▒

. empty  ▒ partial  █ full  (each for 4 by 4 blocks)

                      empty   partial      full
"""

OWN = """\
variants:
  odd:
    mask: tanh(w[h, kv_idx]) + q_idx >= kv_idx or not seen[hkv]
    tensors: {w: {dims: [h, kv_idx]}, seen: {dims: [hkv], dtype: bool}}
  sunk: {mask: causal, sink: true, decay: true, score: score + bias, tensors: {bias: {dims: [], grad: true}}}
"""


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    spec = tmp_path / "own.yaml"
    spec.write_text(OWN, encoding="utf-8")
    return spec


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["show", *argv]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["show", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


# --------------------------------------------------------------------------------------------------------- the picture


def test_causal(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "causal", "--q-len", "512") == CAUSAL


def test_a_window_at_the_end_on_an_ascii_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "--q-len 256 --kv-len 512 --q-offset end --set size=100 --block 64x32 --batch 1 --head 3"
    monkeypatch.setattr(type(sys.stdout), "encoding", "ascii", raising=False)
    assert shown(capsys, "window", *options.split()) == WINDOW


def test_gemma2_local_is_coarsened_to_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "16")
    out = shown(capsys, "gemma2_local", "--q-len", "8192", "--block", "256")
    assert GEMMA2_LOCAL in out


def test_without_a_mask_nothing_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "full", "--q-len", "100", "--kv-len", "70", "--block", "32")
    assert "mask      -\n" in out
    assert "schedule  dense\n" in out
    assert "\n██████\n" in out
    assert out.endswith("pairs kept        100.0%\nwork skipped      0.0%\n")


def test_a_picture_of_too_many_pairs_is_by_block_analysis(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "causal", "--q-len", "131072")
    assert "blocks of 4096 by 4096" in out
    assert "evaluated" not in out
    assert "pairs kept        not counted, there are 17179869184\nwork skipped      48.4%\n" in out


def test_examples_of_the_spec_stand_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert "scalars   length: int = 128\n" in shown(capsys, "prefix_lm")
    out = shown(capsys, "document", "--q-len", "900", "--block", "300")  # documents of 300
    assert "\n▒▒....\n..▒▒..\n....▒▒\n" in out


def test_what_block_analysis_cannot_see_is_drawn_beside(capsys: pytest.CaptureFixture[str], own: Path) -> None:
    out = shown(capsys, "odd", "--variants", str(own), "--q-len", "128")
    assert "tensors   w[h, kv_idx] float32\n          seen[hkv] bool\n" in out
    assert "evaluated:" in out
    assert "by block analysis:" in out


def test_arguments_besides_the_mask_are_named(capsys: pytest.CaptureFixture[str], own: Path) -> None:
    out = shown(capsys, "sunk", "--variants", str(own), "--q-len", "64")
    assert "score     score + bias\ntensors   bias[] float32 (grad)\n" in out
    assert "\nextras    decay: log-decay g [B, S, Hq]; " in out
    assert "\n          sink: a logit per head" in out


def test_tensors_are_read_from_files_and_decide_the_heads(
    capsys: pytest.CaptureFixture[str], own: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "w.npy", np.full((4, 128), 1e9))
    np.save(tmp_path / "seen.npy", np.array([True, False]))
    files = [f"--tensor={name}={tmp_path / name}.npy" for name in ("w", "seen")]
    options = ["odd", "--variants", str(own), "--q-len", "128", "--block", "64"]
    out = shown(capsys, *options, *files, "--head", "1")
    assert "h = 1, hkv = 0\n" in out
    assert "\n██▒▒\n" not in out
    assert "pairs kept        51.2%" in out  # tanh(1e9) is 1: causal, and one key more
    out = shown(capsys, *options, *files, "--head", "2")
    assert "h = 2, hkv = 1\n" in out
    assert "pairs kept        100.0%" in out


def test_a_coarse_block_is_partial_where_its_blocks_differ() -> None:
    e, p, f = Status.EMPTY, Status.PARTIAL, Status.FULL
    fine = np.array([[e, e, f, f, e], [e, e, f, f, f], [p, e, e, f, p]])
    np.testing.assert_array_equal(coarsened(fine, 2), [[e, f, p], [p, p, p]])


def test_an_image_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, length in (("small", 200), ("large", 4096)):
        shown(capsys, "window", "--q-len", str(length), "--png", str(tmp_path / f"{name}.png"))
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------------------------------------------------- bad inputs


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["causl"], " has no variant 'causl'; did you mean 'causal'?"),
        (["window", "--set", "sise=3"], "the variant has no scalar 'sise'; did you mean 'size'?"),
        (["causal", "--set", "size=3"], "the variant has no scalar 'size'; it has none"),
        (["window", "--set", "size=1.5"], "--set size: expected int, got '1.5'"),
        (["window", "--set", "size=0"], "--set size: expected at least 1, got 0"),
        (["document", "--tensor", "docs=x.npy"], "the variant has no tensor 'docs'; did you mean 'doc'?"),
        (["document", "--tensor", "doc=none.npy"], "none.npy: No such file or directory"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_a_bad_name_or_value_is_one_error(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where there is no spec, the library is shown
    (line,) = error(capsys, *argv).splitlines()
    assert line.startswith("error: ")
    assert line.endswith(message)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (np.zeros((1, 10), np.int32), "expected shape [b, kv_idx] with kv_idx of at least 1024, got [1, 10]"),
        (np.zeros(1024, np.int32), "expected shape [b, kv_idx], got [1024]"),
        (np.zeros((1, 1024)), "expected dtype int32 or another int, got float64"),
        (np.array([{}]), "Object arrays cannot be loaded when allow_pickle=False"),
        (None, "expected a .npy file, as numpy.save writes it"),
    ],
    ids=["short", "rank", "dtype", "objects", "text"],
)
def test_a_bad_tensor_is_one_error(
    tensor: Any, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "doc.npy"
    if tensor is None:
        path.write_text("0 0 1 1")
    else:
        np.save(path, tensor)
    (line,) = error(capsys, "document", "--tensor", f"doc={path}").splitlines()
    assert line.startswith("error: --tensor doc: ")
    assert line.endswith(message)


def test_a_head_that_the_tensors_lack_is_an_error(
    capsys: pytest.CaptureFixture[str], own: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "w.npy", np.zeros((3, 1024)))
    np.save(tmp_path / "seen.npy", np.ones(2, dtype=bool))
    options = ["odd", "--variants", str(own), "--tensor", f"w={tmp_path / 'w.npy'}"]
    assert error(capsys, *options, "--head", "3") == (
        "error: --head must be below 3, the size of the given tensors, got 3\n"
    )
    assert error(capsys, *options, "--tensor", f"seen={tmp_path / 'seen.npy'}") == (
        "error: query heads must be a multiple of key heads, got tensors for 3 and 2\n"
    )


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--block", "0", "expected a positive size such as 128 or 128x64, got '0'"),
        ("--block", "64x0", "expected a positive size such as 128 or 128x64, got '64x0'"),
        ("--q-len", "0", "expected an integer of at least 1, got '0'"),
        ("--head", "x", "expected an integer of at least 0, got 'x'"),
        ("--q-offset", "start", "expected an integer or 'end', got 'start'"),
        ("--set", "size", "expected NAME=VALUE, got 'size'"),
    ],
)
def test_a_bad_option_is_one_error(option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["show", "causal", option, value])
    assert exit_.value.code == 2
    assert capsys.readouterr().err.endswith(f"codegen show: error: argument {option}: {message}\n")


@pytest.mark.parametrize(("package", "options"), [("matplotlib", ["--png", "x.png"]), ("numpy", [])])
def test_a_missing_package_is_one_error_that_names_the_extra(package: str, options: list[str]) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from codegen.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "show", "causal", *options]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    message = f"error: {package} is not installed: pip install 'attention-codegen[show]'\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", message)


def test_numpy_is_imported_by_show_alone() -> None:
    code = "import sys; from codegen.cli import main; main(['list']); sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False).returncode == 0
