"""Which modules of a package a kernel of the hub contains, and which version of Python they need."""

from __future__ import annotations

import pytest

from codegen.hub.modules import accepted
from codegen.hub.python import guarded
from codegen.hub.tree import Kernel
from codegen.util.errors import CodegenError


def test_what_needs_another_library_is_left_out_and_what_imports_it() -> None:
    texts = {
        "__init__.py": "VARIANTS = ()",
        "packing.py": "import sys\nfrom torch import Tensor\nimport triton.language as tl",
        "work.py": "def f():\n    import numpy as np",
        "plans.py": "from .work import f",
        "whole.py": "from . import plans",
        "late.py": "def f():\n    from .work import f",
        "typed.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .work import f",
        "jax/__init__.py": "",
        "jax/op.py": "from ..work import f",
        "torch/__init__.py": "",
        "torch/op.py": "from ..packing import Tensor",
    }
    expected = ["__init__.py", "late.py", "packing.py", "torch/__init__.py", "torch/op.py", "typed.py"]
    assert sorted(accepted(texts)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("match x:\n    case 1: pass", r"a\.py:2: expected the grammar of Python 3\.9, as the hub does: "),
        ("try:\n    pass\nexcept* ValueError:\n    pass", r"a\.py:\d: expected the grammar of Python 3\.9"),
        ("import os\nfrom enum import StrEnum", r"a\.py:2: expected what Python 3\.10 has, got enum\.StrEnum"),
        ("import math\nx = math.exp2(3)", r"a\.py:2: expected what Python 3\.10 has, got math\.exp2"),
        ("def f():\n    import tomllib", r"a\.py:2: expected what Python 3\.10 has, got tomllib"),
        ("from tomllib import loads", r"a\.py:1: expected what Python 3\.10 has, got tomllib\.loads"),
    ],
)
def test_what_python_3_10_does_not_run_is_refused(text: str, message: str) -> None:
    with pytest.raises(CodegenError, match=message):
        accepted({"a.py": text})


def test_a_decorator_for_type_checkers_is_guarded() -> None:
    text = "from typing import Any, dataclass_transform\n\n\n@dataclass_transform()\nclass A: ...\n"
    names: dict[str, object] = {}
    before = guarded(text).replace("from typing import dataclass_transform", "raise ImportError")
    exec(compile(before, "a.py", "exec"), names)
    assert isinstance(names["A"], type)
    assert guarded("import typing\n") == "import typing\n"


@pytest.mark.parametrize("name", ["Attention", "ops", "layers", "a", "-a", "a_b", "a-"])
def test_names_that_the_hub_does_not_take(name: str) -> None:
    with pytest.raises(
        CodegenError, match=f"--name: expected lower-case letters, digits and dashes, two or more, .*got '{name}'"
    ):
        Kernel(name=name, owner="me", version=0)


@pytest.mark.parametrize("owner", ["", "bad name", "me/kernels", "-me"])
def test_owners_that_the_hub_does_not_take(owner: str) -> None:
    with pytest.raises(CodegenError, match=f"--owner: expected letters, digits, .* got '{owner}'"):
        Kernel(name="attention", owner=owner, version=0)
