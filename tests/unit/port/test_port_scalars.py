"""`codegen port`: the types of scalars, and flags that decide a branch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.port.reports import formulas, port_text


@pytest.mark.parametrize(
    ("before", "mask", "word"),
    [
        ("", "q - k < x", "int"),
        ("", "q - k < 2 * x", "int"),
        ("", "q - k < 0.5 * x", "float"),
        ("", "q - k < x / n", "float"),
        ("", "q / 2 < x", "float"),
        ("", "q * x < 1.5 * k", "float"),
        ("", "q * x < 1.5", "float"),
        ("", "1.5 > q - x", "float"),
        ("", "torch.exp((k - q) / x) > 0.5", "float"),
        ("", "torch.clamp(q - x, max=7.5) > k", "float"),
        ("", "(q // x > k // x) & (q < 0.5 * x)", "int"),
        ("import sys\nx = float(sys.argv[1])", "q - k < x", "float"),
        ("x = int(args.size)", "q - k < x", "int"),
        ("x: float = get()", "q - k < x", "float"),
        ("x: 'int' = get()", "q / 2 < x", "int"),
        ("x: float", "q - k < x", "float"),
        ("x = 2 / args.size", "q - k < x", "float"),
    ],
)
def test_the_type_of_a_scalar_follows_from_its_value_or_use(tmp_path: Path, before: str, mask: str, word: str) -> None:
    report = port_text(tmp_path, f"{before}\ndef mod(b, h, q, k):\n    return {mask}\n")
    assert report.failures == ()
    declared = re.search(r"^      (?:x|size): (\w+)$", report.text, re.MULTILINE)
    assert declared is not None
    assert declared[1] == word


def test_flags_of_the_file_decide_a_branch(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        import enum
        USE_WINDOW, MODE = True, "window"
        class Config:
            use_window = True
            size: int = 16
        class Kind(enum.Enum):
            FULL = 0
            NEAR = 1
        CHOSEN = Kind.NEAR
        def of_module(b, h, q, k):
            if USE_WINDOW:
                return (q >= k) & (q - k < 4)
            else:
                return q >= k
        def conditional(b, h, q, k):
            return q >= k if not LATER else q - k < 5
        LATER = True
        def of_class(b, h, q, k):
            return (q >= k) & (q - k < Config.size) if Config.use_window else q >= k
        def of_enum(b, h, q, k):
            return q - k < 7 if CHOSEN is Kind.NEAR else q >= k
        def of_text(b, h, q, k):
            return q - k < 8 if MODE in ("window", "near") and MODE not in ("full",) else q >= k
        def closed():
            near = True
            def mask(b, h, q, k, near=near):
                if near:
                    return q - k < 9
                return q >= k
            return mask
        """,
    )
    assert report.failures == ()
    assert formulas(report) == {
        "of_module": "q_idx >= kv_idx and q_idx - kv_idx < 4",
        "conditional": "q_idx - kv_idx < 5",
        "of_class": "q_idx >= kv_idx and q_idx - kv_idx < 16",
        "of_enum": "q_idx - kv_idx < 7",
        "of_text": "q_idx - kv_idx < 8",
        "closed": "q_idx - kv_idx < 9",
    }


def test_flags_that_init_sets_decide_a_branch_and_are_stated(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        class Attention:
            def __init__(self, size, near=True):
                self.size = size
                self.near = near
                self.mode = "causal"
            def mask(self, b, h, q, k):
                seen = q >= k if self.mode == "causal" else q == k
                return seen & (q - k < self.size) if self.near else seen
        """,
    )
    assert report.failures == ()
    assert formulas(report) == {"mask": "q_idx >= kv_idx and q_idx - kv_idx < size"}
    assert "# self.mode: its value, 'causal', is written in\n" in report.text
    assert (
        "# self.near: its value, True, is written in; change the default in the file for another one\n" in report.text
    )


@pytest.mark.parametrize(
    "flag",
    [
        "self.near = get()",
        "self.near = near",
        "self.near = True\n        if deep:\n            self.near = False",
        "self.other = True\n    def enable(self):\n        self.near = True",
        "self.near = True\n    near = False",
        "pass",
    ],
)
def test_attributes_without_one_value_do_not_decide(tmp_path: Path, flag: str) -> None:
    source = f"""
class Attention:
    def __init__(self, near, deep):
        {flag}
    def mask(self, b, h, q, k):
        return q >= k if self.near else q - k < 3
"""
    (line,) = port_text(tmp_path, source).failures
    assert "the branch depends on a value that this file does not give; write it as a constant, or add a call" in line


def test_two_classes_with_other_defaults_do_not_decide(tmp_path: Path) -> None:
    classes = "".join(
        f"class {name}:\n    def __init__(self, near={near}):\n        self.near = near\n"
        f"    def mask_{name}(self, b, h, q, k):\n        return q >= k if self.near else q - k < 3\n"
        for name, near in (("A", True), ("B", False))
    )
    assert len(port_text(tmp_path, classes).failures) == 2


def test_attributes_of_a_class_that_the_file_changes_do_not_decide(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        class Config:
            near = True
        Config.near = False
        def mask(b, h, q, k):
            return q >= k if Config.near else q - k < 3
        """,
    )
    assert len(report.failures) == 1
