"""The hash of a kernel's code: which code it covers, and that every version of Python computes the same hash."""

from __future__ import annotations

import re
import subprocess

import pytest

from codegen.render.code_hash import code_hash, kernel_hash
from tests.setup import pythons
from tests.support.paths import ROOT

# Each kind of string, a docstring, and f-strings with everything at which later Pythons split them into tokens: braces,
# specs, nesting, lines.
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
"""The hash of `SOURCE` by Python 3.11."""

KERNELS = ("alibi/portable.py", "causal/hopper_fwd.py", "document/hopper_bwd.py")


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
    # Run by its path: another Python does not have the packages that other modules of the generator import.
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


# ------------------------------------------------------------------------------------------------ imported definitions

KERNEL = "v/packed/portable.py"

PACKAGE = {
    KERNEL: """\
import triton
from ..._runtime.device.tl import load, store
from ...v import LIMIT

EXTRA = 7


@triton.jit
def own(x):
    return load(x) + LIMIT


@triton.jit
def fwd(x):
    store(own(x))


@triton.jit
def dq(x):
    store(own(x) + EXTRA)
""",
    "v/__init__.py": "LIMIT = 4\nOTHER = 5\n",
    "_runtime/device/tl.py": """\
import triton
from ..shared import SIZE, WIDTH
from .math import power

SCALE = 3


def scaled(x):
    '''Multiply.'''
    return x * SCALE


@triton.jit(noinline=True)
def load(x):
    return power(scaled(x), SIZE)


try:
    from triton import store
except ImportError:

    def store(x):
        return x


def unused(x):
    return WIDTH + scaled(x)
""",
    "_runtime/device/math.py": "def power(x, y):\n    return x**y\n\n\ndef root(x):\n    return x**0.5\n",
    "_runtime/shared.py": "SIZE = 1\nWIDTH = 2\n",
}


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        (KERNEL, "import triton\n", "import torch as triton\n"),
        (KERNEL, "load(x) + LIMIT", "load(x) - LIMIT"),
        (KERNEL, "    store(own(x))", "    store(-own(x))"),
        ("v/__init__.py", "LIMIT = 4", "LIMIT = 6"),
        ("_runtime/device/tl.py", "SCALE = 3", "SCALE = 4"),
        ("_runtime/device/tl.py", "x * SCALE", "x / SCALE"),
        ("_runtime/device/tl.py", "(noinline=True)", ""),
        ("_runtime/device/tl.py", "        return x", "        return -x"),
        ("_runtime/device/math.py", "x**y", "x * y"),
        ("_runtime/shared.py", "SIZE = 1", "SIZE = 3"),
    ],
)
def test_kernel_hash_covers_imported_definitions_and_what_they_use(path: str, old: str, new: str) -> None:
    changed = PACKAGE | {path: PACKAGE[path].replace(old, new)}
    assert changed != PACKAGE
    assert kernel_hash(KERNEL, ["fwd"], changed) != kernel_hash(KERNEL, ["fwd"], PACKAGE)


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        (KERNEL, "EXTRA = 7", "EXTRA = 8"),
        (KERNEL, "own(x) + EXTRA", "own(x) - EXTRA"),
        ("v/__init__.py", "OTHER = 5", "OTHER = 6"),
        ("_runtime/device/tl.py", "WIDTH +", "WIDTH -"),
        ("_runtime/device/tl.py", "Multiply.'''", "Scale.'''  # a comment"),
        ("_runtime/device/math.py", "x**0.5", "x**-0.5"),
        ("_runtime/shared.py", "WIDTH = 2", "WIDTH = 3\nMORE = 4"),
    ],
)
def test_kernel_hash_ignores_comments_and_definitions_that_the_kernel_does_not_use(
    path: str, old: str, new: str
) -> None:
    changed = PACKAGE | {path: PACKAGE[path].replace(old, new)}
    assert changed != PACKAGE
    assert kernel_hash(KERNEL, ["fwd"], changed) == kernel_hash(KERNEL, ["fwd"], PACKAGE)


def test_kernel_hash_covers_a_module_that_is_imported_as_a_whole() -> None:
    package = PACKAGE | {KERNEL: "from ..._runtime.device import tl\n\n\ndef fwd(x):\n    tl.store(x)\n"}
    path = "_runtime/device/tl.py"
    changed = package | {path: package[path].replace("WIDTH +", "WIDTH -")}
    assert kernel_hash(KERNEL, ["fwd"], changed) != kernel_hash(KERNEL, ["fwd"], package)


def test_kernel_hash_is_that_of_its_kernels_wherever_they_are() -> None:
    """Kernels keep their hash in another file with other kernels; a hash of several kernels covers each one."""
    moved = {path: text for path, text in PACKAGE.items() if path != KERNEL}
    moved["v/packed/bwd.py"] = PACKAGE[KERNEL].replace("def dq", "def dkdv")
    assert kernel_hash("v/packed/bwd.py", ["fwd"], moved) == kernel_hash(KERNEL, ["fwd"], PACKAGE)
    hashes = {kernel_hash(KERNEL, names, PACKAGE) for names in (["fwd"], ["dq"], ["fwd", "dq"])}
    assert len(hashes) == 3


def test_kernel_hash_refuses_a_kernel_that_the_file_lacks() -> None:
    with pytest.raises(ValueError, match=r"v/packed/portable.py: expected a definition of gone"):
        kernel_hash(KERNEL, ["gone"], PACKAGE)
