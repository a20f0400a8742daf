"""The hash of a kernel's code: what it sees of a module, and that every Python gives the same one."""

from __future__ import annotations

import re
import subprocess

import pytest

from codegen.render.code_hash import code_hash
from tests.setup import pythons
from tests.support.paths import ROOT

# One of each kind of string, f-strings with what later Pythons cut at: braces, specs, nesting, lines, a docstring.
SOURCE = '''\
"""A docstring."""
import triton


def kernel(x, N: int):
    """Another."""
    print(f"{x!r:>{N}} and {{braces}} {x + 1:.2f}" "plain")  # a comment
    f"an expression {x} that begins a line"
    text = rf"""first {x}
    second {'nested' + f"{N}"} third"""
    return (
        text,
        b"bytes", u"text", r"raw\\n",
        x if x != 1e-5 else -0x10,
    )
'''

HASH = "458317724e62163b"
"""Of `SOURCE`, by Python 3.11."""

KERNELS = ("alibi/fwd.py", "causal/hopper_fwd.py", "document/bwd_dq.py")


def test_code_hash_of_fstrings_is_that_of_python_311() -> None:
    assert code_hash(SOURCE) == HASH


@pytest.mark.parametrize(
    ("old", "new"), [("# a comment", ""), ("Another.", "One more."), ("begins a line", "is never used")]
)
def test_code_hash_ignores_comments_and_lone_strings(old: str, new: str) -> None:
    assert code_hash(SOURCE.replace(old, new)) == HASH


@pytest.mark.parametrize(("old", "new"), [("{{braces}}", "{{brackets}}"), (":.2f", ":.3f"), ("third", "fourth")])
def test_code_hash_sees_every_part_of_an_fstring(old: str, new: str) -> None:
    assert code_hash(SOURCE.replace(old, new)) != HASH


def test_code_hash_is_the_same_on_every_python_found(capsys: pytest.CaptureFixture[str]) -> None:
    sources = [SOURCE, *((ROOT / "generated" / path).read_text(encoding="utf-8") for path in KERNELS)]
    # By its path alone: another Python has none of the packages that other modules of the generator import.
    code = (
        f"import runpy; code_hash = runpy.run_path({str(ROOT / 'codegen/render/code_hash.py')!r})['code_hash']\n"
        f"for source in {sources!r}: print(code_hash(source))"
    )
    with capsys.disabled():
        print(f"\n{pythons.summary()}")
    expected = [code_hash(source) for source in sources]
    for version, interpreter in pythons.found().items():
        done = subprocess.run([interpreter, "-I", "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.split() == expected, f"Python {version}"
    assert re.fullmatch("[0-9a-f]{16}", HASH)
