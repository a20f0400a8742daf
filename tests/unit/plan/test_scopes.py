"""Every name that a rendered kernel reads is defined before, whatever scores and masks a file has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from codegen.load.spec_file import load
from codegen.render.package import render
from tests.support.paths import ROOT
from tests.support.scopes import scope_problems

GENERATED = ROOT / "generated"
KERNELS = ("portable.py", "hopper_fwd.py", "hopper_bwd.py")

W, U, PLACE = "w: {dims: [q_idx]}", "u: {dims: [q_idx]}", "place: {dims: [q_idx], dtype: int32}"
SLOPES = "a: {dims: [h], grad: true}, c: {dims: [b], grad: true}"
SOFT = "log(1.0 + exp(min(score, 8.0)))"
FAR = "where(q_idx - kv_idx < 128, score, 0.5 * score)"

# score: (mask, tensors). They have derivatives next to reads per row, the same read in scores and gradients, or two
# terms of distance.
SCORES = {
    "softcap(3.0)": ("causal", ""),
    "score * log(1.0 + q_idx)": ("causal", ""),
    FAR: ("", ""),
    "score * log(1.0 + q_idx) + w[q_idx]": ("causal", W),
    f"{FAR} * w[q_idx] + log(1.0 + w[q_idx])": ("", W),
    f"{SOFT} - {SOFT} * w[q_idx]": ("", W),
    f"{SOFT} * exp(w[q_idx] * log(1.0 + q_idx)) + u[q_idx] * u[q_idx] * (q_idx - kv_idx)": ("causal", f"{W}, {U}"),
    "score * w[place[q_idx]] + u[place[q_idx]] * exp(w[q_idx])": ("causal", f"{W}, {U}, {PLACE}"),
    "score + a[h] * (kv_idx - q_idx) + c[b] * (kv_idx - q_idx)": ("causal", SLOPES),
    "score * (1.0 + a[h] * (kv_idx - q_idx)) + c[b] * (kv_idx - q_idx)": (
        "w[q_idx] * w[q_idx] > kv_idx",
        f"{SLOPES}, {W}",
    ),
    "tanh(score) * u[q_idx]": ("q_idx >= 5", U),
}


def entries() -> dict[str, str]:
    """Name -> entry: each score with a log-decay, and scores that read `w` or `a` also without a log-decay."""
    found = {}
    for i, (score, (mask, tensors)) in enumerate(SCORES.items()):
        for decay in ("false", "true") if "w[" in score or "a[" in score else ("true",):
            fields = [f'score: "{score}"', f"decay: {decay}", f"tensors: {{{tensors}}}"]
            fields += [f'mask: "{mask}"'] if mask else []
            found[f"odd_{i}_{decay}"] = f"{{{', '.join(fields)}}}"
    return found


@pytest.fixture(scope="module")
def odd_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the kernels of `entries`."""
    folder = tmp_path_factory.mktemp("odd")
    spec = folder / "spec.yaml"
    spec.write_text("variants:\n" + "".join(f"  {name}: {entry}\n" for name, entry in entries().items()))
    for path, text in render(load(spec)).items():
        if path.endswith(KERNELS):
            (folder / path.replace("/", "_")).write_text(text)
    return folder


def test_kernels_of_odd_scores_define_what_they_read(odd_kernels: Path) -> None:
    found = {path.name: problems for path in odd_kernels.glob("*.py") if (problems := scope_problems(path.read_text()))}
    assert not found
    # Each of three modes has the files KERNELS. Paged caches have one more, and some have one of Hopper's family.
    of_hopper = list(odd_kernels.glob("*_paged_hopper_fwd.py"))
    assert of_hopper
    assert len(list(odd_kernels.glob("*.py"))) == (3 * len(KERNELS) + 1) * len(entries()) + len(of_hopper)


def test_kernels_of_odd_scores_pass_the_linter(odd_kernels: Path) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F", str(odd_kernels)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_checked_in_kernels_define_what_they_read() -> None:
    paths = [path for path in sorted(GENERATED.rglob("*.py")) if path.name in KERNELS]
    found = {str(path): problems for path in paths if (problems := scope_problems(path.read_text()))}
    assert not found
    assert len(paths) > 100


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("for i in range(3):\n        y = x\n        x = i", "x is not defined"),
        ("for i in range(3):\n        x = i\n    return x", "x is not defined"),
        ("if n > 1:\n        x = n\n    return x", "x is not defined"),
        ("term = n\n    for i in range(3):\n        term = i", "term of outside the loop is overwritten"),
    ],
)
def test_scopes_are_checked(body: str, problem: str) -> None:
    found = scope_problems(f"def kernel(n):\n    {body}\n")
    assert [text.partition(": ")[2] for text in found] == [problem]


@pytest.mark.parametrize(
    "body",
    [
        "if FLAG:\n        x = n\n    return x",
        "total = 0\n    for i in range(n):\n        total += i\n    return total",
    ],
)
def test_sound_scopes_pass(body: str) -> None:
    assert not scope_problems(f"def kernel(n, FLAG):\n    {body}\n")
