"""How the package reads tuned files, and its warnings about unusable ones."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from codegen.arch.chips import ARCHS
from codegen.cli import main as cli
from codegen.load.spec_file import load
from generated._runtime.core import configs, tuned
from generated._runtime.core.families import as_a_rule
from generated._runtime.core.options import checked_options
from tests.support.paths import DEFAULT_SPEC, ROOT
from tests.support.tuned_files import HASH, path_in, tile

SPEC = load(DEFAULT_SPEC)
ENTRY = tuned.Entry(
    "fwd", tuned.Problem("dense", "bfloat16", 128, 1, 16384), configs.Tile(64, 64, 4, 3), 1.0, 2.0, HASH, "3.6.0"
)


def problem(**changes: Any) -> Any:
    return tuned.Problem("dense", "bfloat16", 128, 1, 16384)._replace(**changes)


def write(folder: Path, **changes: Any) -> Path:
    """Write a tuned file of `causal` with one entry, in which `changes` replace fields."""
    entry = {"pass": "fwd", "mode": "dense", "dtype": "bfloat16", "head_dim": 128, "seq": 16384, "group": 1}
    entry |= {"config": tile(64, 64, 4, 3).__dict__, "ms": 1.0, "default_ms": 2.0, "kernel": HASH, "triton": "3.6.0"}
    document = {"format": 1, "variant": "causal", "gpu": "NVIDIA Imaginary 1", "arch": "sm_90", "failed": []}
    document["entries"] = [entry | {name: value for name, value in changes.items() if name in entry}]
    document |= {name: value for name, value in changes.items() if name not in entry}
    path = path_in(folder)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose tuned files the package reads."""
    monkeypatch.setattr(tuned, "tuned_path", lambda gpu, variant: tmp_path / "tuned" / gpu / f"{variant}.json")
    tuned.tuned_entries.cache_clear()
    yield tmp_path
    tuned.tuned_entries.cache_clear()


def chosen(asked: Any, config: Any = None, gpu: str = "imaginary_1", arch: str = "sm_90") -> dict[str, Any]:
    options = checked_options("causal", config)
    return configs.ladder("causal", arch, gpu, asked, options)


def test_the_ladder(package: Path) -> None:
    write(package)
    choices = chosen(problem())
    assert {name: choice.source for name, choice in choices.items()} == {
        "fwd": "tuned",
        "dkdv": "default",
        "dq": "default",
    }
    assert choices["fwd"].tile == (64, 64, 4, 3)
    assert chosen(problem(), {"fwd": configs.Tile(32, 32, 4, 1)._asdict()})["fwd"] == (
        (32, 32, 4, 1),
        "config",
        None,
        "",
        0,
    )
    for other in ({"dtype": "float32"}, {"mode": "packed"}, {"head_dim": 64}):
        assert chosen(problem(**other))["fwd"].source == "default"
    assert chosen(problem(head_dim=100, seq=700, group=8))["fwd"].source == "tuned"


def test_the_other_16_bit_dtype_stands_in_until_a_dtype_is_tuned(package: Path) -> None:
    path = write(package)
    assert chosen(problem(dtype="float16"))["fwd"].tile.block_m == 64
    document = json.loads(path.read_text())
    (entry,) = document["entries"]
    document["entries"].append(entry | {"dtype": "float16", "seq": 512, "config": tile(32, 32, 4, 2).__dict__})
    path.write_text(json.dumps(document))
    tuned.tuned_entries.cache_clear()
    assert chosen(problem(dtype="float16"))["fwd"].tile.block_m == 32
    assert chosen(problem())["fwd"].tile.block_m == 64


def test_the_nearest_length_counts_before_the_group(package: Path) -> None:
    path = write(package)
    document = json.loads(path.read_text())
    (entry,) = document["entries"]
    document["entries"].append(entry | {"seq": 2048, "group": 4, "config": tile(32, 32, 4, 2).__dict__})
    path.write_text(json.dumps(document))
    assert chosen(problem(seq=3000))["fwd"].tile.block_m == 32
    assert chosen(problem(seq=100_000, group=4))["fwd"].tile.block_m == 64


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kernel": "0123"}, "its fwd were measured on other kernels"),
        ({"gpu": "NVIDIA H200"}, "it was made on NVIDIA H200"),
        ({"format": 7}, "its format is 7"),
        ({"config": {"block_m": 64}}, "lacks or misspells"),
        ({"seq": 0}, "no positive int"),
        ({"entries": 5}, "a value has another type than in a tuned file: 'int' object"),
        ({"config": {"block_m": 48, "block_n": 64, "num_warps": 4, "num_stages": 2}}, "block_m of "),
        ({"config": {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 99}}, "num_stages of "),
        ({"mode": ["dense"]}, "measured on other kernels"),
    ],
)
def test_unusable_tuned_files_warn_once(package: Path, changes: dict[str, Any], reason: str) -> None:
    path = write(package, **changes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sources = [chosen(problem(seq=seq))["fwd"].source for seq in (512, 16384)]
    assert sources == ["default", "default"]
    (message,) = [str(warning.message) for warning in caught]
    assert str(path) in message
    assert reason in message
    assert "codegen tune causal" in message


def test_a_file_that_is_no_json_is_ignored_aloud(package: Path) -> None:
    write(package).write_text('{"format": 1, "gpu"')
    with pytest.warns(RuntimeWarning, match="it cannot be read"):
        assert chosen(problem())["fwd"].source == "default"


def test_a_gpu_without_files_is_no_warning(package: Path, recwarn: pytest.WarningsRecorder) -> None:
    del package
    assert chosen(problem())["fwd"].source == "default"
    assert not recwarn.list


def test_other_gpus_of_the_architecture_stand_in(package: Path, recwarn: pytest.WarningsRecorder) -> None:
    """For kernels that were not measured on a GPU itself. Nothing is said about files of another GPU."""
    path = write(package)
    assert chosen(problem(), gpu="imaginary_2")["fwd"][:4] == ((64, 64, 4, 3), "tuned", ENTRY, "imaginary_1")
    for nowhere in ({"gpu": "imaginary_2", "arch": "sm_80"}, {"gpu": ""}):
        assert chosen(problem(), **nowhere)["fwd"].source == "default"
    own = path.parents[1] / "imaginary_0" / path.name
    own.parent.mkdir()
    document = json.loads(path.read_text())
    (entry,) = document["entries"]
    of_float32 = entry | {"dtype": "float32", "config": tile(32, 32, 4, 2).__dict__}
    own.write_text(json.dumps(document | {"gpu": "Imaginary 0", "entries": [of_float32]}))
    choices = [chosen(problem(dtype=dtype), gpu="imaginary_0")["fwd"] for dtype in ("float32", "bfloat16")]
    assert [choice.gpu for choice in choices] == ["imaginary_0", "imaginary_1"]
    tuned.tuned_entries.cache_clear()
    path.write_text(json.dumps(document | {"entries": [entry | {"kernel": "0123"}]}))
    assert chosen(problem(), gpu="imaginary_2")["fwd"].source == "default"
    assert not recwarn.list


@pytest.mark.parametrize(("gpu", "other"), [("h100", "h200"), ("h200", "h100")])
def test_another_gpu_is_closer_than_the_defaults(gpu: str, other: str) -> None:
    """The reason for `measurements`: one GPU's choices, judged by the times that were measured on the other."""
    agree, kernels = [], []
    for path in sorted((ROOT / "generated" / "tuned" / gpu).glob("*.json")):
        here, there = (tuned.tuned_entries(each, path.stem) for each in (gpu, other))
        tiles = {(entry.pass_name, entry.problem): entry.tile for entry in there.entries}
        agree += [
            tiles[key] == entry.tile for entry in here.entries if (key := (entry.pass_name, entry.problem)) in tiles
        ]
        for verdict in here.verdicts:
            problem = verdict.problem
            if configs.nearest(there.verdicts, verdict.pass_name, problem) is not None:
                asked = verdict.pass_name, path.stem
                head_dims = problem.head_dim, problem.head_dim
                guess = configs.decision(*asked, other, problem, head_dims).kernels
                ruled = as_a_rule(*asked, problem.mode, head_dims, problem.seq)
                kernels.append([math.log(verdict.ms[name]) for name in (guess, ruled)])
    assert sum(agree) > 0.8 * len(agree) > 800
    by_guess, by_rule = map(sum, zip(*kernels, strict=True))
    assert by_guess < by_rule


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100_pcie"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx_6000_ada"),
        ("Tesla T4", "t4"),
        ("AMD Instinct MI300X OAM", "mi300x"),
    ],
)
def test_the_folder_of_a_gpu(name: str, key: str) -> None:
    assert tuned.gpu_key(name) == key


@pytest.mark.parametrize("path", sorted((ROOT / "generated" / "tuned").glob("*/*.json")), ids=lambda p: p.stem)
def test_tuned_files_are_sound(path: Path) -> None:
    measured = tuned.read(path)
    entries, verdicts = measured.entries, measured.verdicts
    assert measured.folder == path.parent.name
    assert measured.arch in ARCHS
    assert path.stem in SPEC.variants
    assert entries or verdicts
    for entry in entries:
        assert entry.pass_name in configs.PASSES
        assert entry.default_ms is None or entry.ms <= entry.default_ms
    for verdict in verdicts:
        wanted = configs.PASSES[:1] if verdict.pass_name == "fwd" else configs.PASSES[1:]
        assert verdict.pass_name in ("fwd", "bwd")
        assert set(wanted) < verdict.kernels.keys()
        assert not verdict.ms.keys() & verdict.failed.keys()


def test_check_notes_what_was_measured_on_other_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("variants: {mine: {mask: causal}}")
    wanted = ["--variants", str(tmp_path / "mine.yaml"), "--out", str(tmp_path / "stale_ops")]
    assert cli.main(["render", *wanted]) == cli.EXIT_OK
    folder = tmp_path / "stale_ops" / "tuned" / "imaginary_1"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = ROOT / "generated" / "tuned" / "h200" / "causal.json"
    (folder / "mine.json").write_text(source.read_text())
    assert cli.main(["check", *wanted]) == cli.EXIT_OK
    out = capsys.readouterr().out
    (note,) = [line for line in out.splitlines() if line.startswith("note: tuned/imaginary_1/mine.json: ")]
    found, _, _ = note.partition(": ")[2].partition(": ")[2].partition(" measured on other kernels")
    assert {"dkdv", "dq", "fwd", "families of bwd", "families of fwd"} <= set(found.split(", "))
    (folder / "mine.json").write_text("{")
    assert cli.main(["check", *wanted]) == cli.EXIT_OK
    assert "note: tuned/imaginary_1/mine.json: cannot be read" in capsys.readouterr().out
    assert cli.main(["explain", "--gpu", "imaginary_1", *wanted]) == cli.EXIT_ERROR
    assert "mine.json: cannot be read" in capsys.readouterr().err
