"""`show`: the error of each bad argument."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codegen.cli.main import main
from tests.support.paths import ROOT
from tests.support.shown import error


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["causl"], " has no variant 'causl'; did you mean 'causal'?"),
        (["recent"], ", band_images; --variants FILE names another spec"),
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
    monkeypatch.chdir(tmp_path)  # a folder without a spec: the library is shown
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


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("doc", np.zeros(18, np.int32), "expected shape [kv_idx] with kv_idx of 17, got [18]"),
        ("doc", np.zeros((1, 17), np.int32), "expected shape [kv_idx], got [1, 17]"),
        ("length", np.zeros(2, np.int32), "expected shape [b] with b of 3, got [2]"),
    ],
    ids=["long", "rank", "sequences"],
)
def test_a_bad_tensor_of_a_packed_call_is_one_error(
    name: str, tensor: Any, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", tensor)
    variant = {"doc": "document", "length": "padding"}[name]
    options = ["--segments", "5,3,9", "--tensor", f"{name}={tmp_path / 'x.npy'}"]
    (line,) = error(capsys, variant, *options).splitlines()
    assert line.startswith(f"error: --tensor {name}: ")
    assert line.endswith(message)


@pytest.mark.parametrize("option", ["--q-len", "--kv-len", "--batch"])
def test_lengths_and_a_batch_row_are_no_options_of_a_packed_call(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = f"error: {option} is no option of a packed call: leave it out, or --segments\n"
    assert error(capsys, "causal", "--segments", "5,3,9", option, "1") == message


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
        ("--segments", "5,-3", "expected lengths such as 5,3,9, not all of them 0, got '5,-3'"),
        ("--segments", "a,b", "expected lengths such as 5,3,9, not all of them 0, got 'a,b'"),
        ("--segments", "", "expected lengths such as 5,3,9, not all of them 0, got ''"),
        ("--segments", "5,,9", "expected lengths such as 5,3,9, not all of them 0, got '5,,9'"),
        ("--segments", "0,0", "expected lengths such as 5,3,9, not all of them 0, got '0,0'"),
        ("--set", "size", "expected NAME=VALUE, got 'size'"),
    ],
)
def test_a_bad_option_is_one_error(option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["show", "causal", option, value])
    assert exit_.value.code == 2
    assert capsys.readouterr().err.endswith(f"codegen show: error: argument {option}: {message}\n")


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("matplotlib", ["show", "causal", "--png", "x.png"]),
        ("numpy", ["show", "causal"]),
        ("numpy", ["explain", "causal", "--gpu", "h100"]),
    ],
)
def test_a_missing_package_is_one_error_that_names_what_to_install(package: str, arguments: list[str]) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; from codegen.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    message = f"error: {package} is not installed: pip install {package}\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", message)


@pytest.mark.parametrize("arguments", [["list"], ["check"]])
def test_a_bare_installation_needs_no_numpy(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "variants.yaml").write_text("variants: {causal: {mask: causal}}")
    places = ["--variants", str(tmp_path / "variants.yaml")]
    out = ["--out", str(tmp_path / "bare")]
    if arguments == ["check"]:
        assert main(["render", *places, *out]) == 0
        places += out
    code = "import sys; sys.modules['numpy'] = None; from codegen.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *arguments, *places]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
