"""`codegen port`: mods that a file imports from other modules of its project."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from codegen.port.command import Report, port
from tests.unit.port.reports import formulas

MASKS = """
from torch.nn.attention.flex_attention import and_masks
WINDOW = 32
SHIFT = 5
def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx
def make_window(size):
    def window(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < size
    return window
unused = make_window(3)
"""
BOTH = "def both(b, h, q_idx, kv_idx):\n    return {causal}(b, h, q_idx, kv_idx) & (q_idx - kv_idx < {size})\n"
NEAR = {"both": "q_idx >= kv_idx and q_idx - kv_idx < 32"}


@pytest.mark.parametrize(
    ("statement", "causal", "size"),
    [
        ("from masks import causal, WINDOW", "causal", "WINDOW"),
        ("from masks import causal as c, WINDOW as W", "c", "W"),
        ("from masks import *", "causal", "WINDOW"),
        ("import masks", "masks.causal", "masks.WINDOW"),
        ("import masks as m", "m.causal", "m.WINDOW"),
        ("import lib.masks", "lib.masks.causal", "lib.masks.WINDOW"),
        ("import lib.masks as m", "m.causal", "m.WINDOW"),
        ("from lib import masks", "masks.causal", "masks.WINDOW"),
        ("from lib.masks import causal, WINDOW", "causal", "WINDOW"),
        ("import bare.masks", "bare.masks.causal", "bare.masks.WINDOW"),
        ("from bare import masks", "masks.causal", "masks.WINDOW"),
        ("from lib import causal, WINDOW", "causal", "WINDOW"),
        ("from . import masks", "masks.causal", "masks.WINDOW"),
        ("from .masks import causal, WINDOW", "causal", "WINDOW"),
        ("from .lib.masks import causal, WINDOW", "causal", "WINDOW"),
    ],
)
def test_names_of_modules_beside_the_file_are_followed(tmp_path: Path, statement: str, causal: str, size: str) -> None:
    """`lib` is a package whose `__init__` imports from its module, `bare` a folder without `__init__`."""
    for place in ("masks.py", "lib/masks.py", "bare/masks.py"):
        _write(tmp_path / place, MASKS)
    _write(tmp_path / "lib/__init__.py", "from .masks import causal, WINDOW\n")
    report = _port(tmp_path / "mods.py", f"{statement}\n{BOTH.format(causal=causal, size=size)}")
    assert report.failures == ()
    assert formulas(report) == NEAR


def test_absolute_imports_start_at_the_folders_of_the_project(tmp_path: Path) -> None:
    """As in a package whose modules import each other through the package itself, which imports them all."""
    _write(tmp_path / "pyproject.toml", "")
    _write(tmp_path / "src/pack/__init__.py", "from pack.masks import causal\nfrom pack.joined import both\n")
    _write(tmp_path / "src/pack/masks.py", MASKS)
    source = f"from pack import causal\nfrom pack.masks import WINDOW\n{BOTH.format(causal='causal', size='WINDOW')}"
    assert formulas(_port(tmp_path / "src/pack/joined.py", source)) == NEAR
    assert formulas(_port(tmp_path / "tests/deep/joined.py", source)) == NEAR


def test_imported_mods_get_entries_where_flex_attention_gets_them(tmp_path: Path) -> None:
    _write(tmp_path / "masks.py", MASKS)
    report = _port(
        tmp_path / "mods.py",
        """
        from torch.nn.attention.flex_attention import and_masks, create_block_mask
        import masks
        from masks import causal, make_window
        blocks = create_block_mask(causal, 1, 1, 64, 64)
        same = create_block_mask(masks.causal, 1, 1, 64, 64)
        near = create_block_mask(and_masks(causal, make_window(masks.WINDOW)), 1, 1, 64, 64)
        """,
    )
    assert report.failures == ()
    assert formulas(report) == {"causal": "q_idx >= kv_idx", "causal_make_window": NEAR["both"]}


def test_a_module_is_read_apart_from_the_file(tmp_path: Path) -> None:
    """Names and attributes of the module with names of the file say nothing about the file's."""
    _write(
        tmp_path / "masks.py",
        """
        SIZE = 3
        class Other:
            def __init__(self):
                self.table = make()
                self.blocks = create_block_mask(lambda b, h, q, kv: q > kv, 1, 1, 8, 8)
        def near(b, h, q_idx, kv_idx, size=SIZE):
            return q_idx - kv_idx < size
        """,
    )
    report = _port(
        tmp_path / "mods.py",
        """
        from masks import near
        SIZE = 7
        class Mine:
            def mask(self, b, h, q_idx, kv_idx):
                return near(b, h, q_idx, kv_idx) & (self.table[q_idx] == SIZE)
        """,
    )
    assert report.failures == ()
    assert formulas(report) == {"mask": "q_idx - kv_idx < 3 and table[q_idx] == 7"}
    assert "computes it" not in report.text


def test_attributes_of_classes_of_a_module_are_followed(tmp_path: Path) -> None:
    """A class of the file with the same name is another one."""
    _write(tmp_path / "settings.py", "class Config:\n    near = True\n    size = 3\n    odd = 1\nConfig.odd = get()\n")
    _write(tmp_path / "other.py", "class Settings:\n    size = 4\ndef early(b, h, q, k):\n    return k < 2\n")
    report = _port(
        tmp_path / "mods.py",
        """
        import settings
        from settings import Config
        from other import early
        class Settings:
            size = 5
        def near(b, h, q, k):
            return q - k < Config.size if settings.Config.near else q >= k
        def changed(b, h, q, k):
            return q - k < Config.odd
        def own(b, h, q, k):
            return early(b, h, q, k) | (q - k < Settings.size)
        """,
    )
    assert report.failures == ()
    assert formulas(report) == {
        "near": "q_idx - kv_idx < 3",
        "changed": "q_idx - kv_idx < odd",
        "own": "kv_idx < 2 or q_idx - kv_idx < 5",
    }


def test_failures_name_the_file_and_line_of_the_module(tmp_path: Path) -> None:
    _write(
        tmp_path / "lib/masks.py",
        """
        def odd(b, h, q_idx, kv_idx):
            kv_idx += 1
            kv_idx = kv_idx.sum()
            return q_idx.sum() > kv_idx
        """,
    )
    report = _port(
        tmp_path / "mods.py",
        """
        from lib.masks import odd
        def mine(b, h, q_idx, kv_idx):
            return odd(b, h, q_idx, kv_idx)
        """,
    )
    reason = "'.sum' looks at more than one pair; a mod sees one pair at a time"
    place = tmp_path / "lib/masks.py"
    assert report.failures == (f"{place}:4: mine: {reason}: kv_idx.sum()", f"{place}:5: mine: {reason}: q_idx.sum()")


def test_modules_that_are_not_there_are_named(tmp_path: Path) -> None:
    _write(tmp_path / "broken.py", "def causal(:\n")
    _write(tmp_path / "circle.py", "from round import causal\n")
    _write(tmp_path / "round.py", "from circle import causal\n")
    _write(tmp_path / "masks.py", MASKS)
    report = _port(
        tmp_path / "mods.py",
        """
        import torch.elsewhere
        from torch.nn.attention.flex_attention import and_masks, create_block_mask
        from elsewhere.masks import causal, make_window, WINDOW
        from masks import missing
        import masks, broken, circle
        blocks = create_block_mask(causal, 1, 1, 64, 64)
        def window(b, h, q_idx, kv_idx):
            return q_idx - kv_idx < WINDOW
        joined = and_masks(make_window(3), causal)
        def absent(b, h, q_idx, kv_idx):
            return missing(b, h, q_idx, kv_idx)
        def bad(b, h, q_idx, kv_idx):
            return broken.causal(b, h, q_idx, kv_idx)
        def cycle(b, h, q_idx, kv_idx):
            return circle.causal(b, h, q_idx, kv_idx)
        def of_torch(b, h, q_idx, kv_idx):
            return torch.elsewhere.causal(b, h, q_idx, kv_idx)
        """,
    )
    none = "no file of module 'elsewhere.masks' was found beside this one; copy"
    arguments = "(b, h, q_idx, kv_idx)"
    assert [line.partition("mods.py:")[2] for line in report.failures] == [
        f"7: causal: {none} 'causal' into this file: causal",
        f"9: window: {none} 'WINDOW' into this file: q_idx - kv_idx < WINDOW",
        f"10: joined: {none} 'make_window' into this file: make_window(3)",
        "12: absent: module 'masks' does not define 'missing': missing",
        "14: bad: broken.py cannot be read: invalid syntax: broken.causal",
        "16: cycle: modules import 'causal' from each other in a circle: circle.causal",
        f"18: of_torch: 'torch.elsewhere.causal' has no counterpart in the expression language: torch.elsewhere.causal"
        f"{arguments}",
    ]


def test_files_are_named_as_the_command_names_the_ported_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "lib/masks.py", "def odd(b, h, q_idx, kv_idx):\n    return q_idx.sum() > 3\n")
    _write(tmp_path / "app/mods.py", "from lib.masks import odd\nblocks = create_block_mask(odd, 1, 1, 8, 8)\n")
    _write(tmp_path / "setup.py", "")
    monkeypatch.chdir(tmp_path)
    (line,) = port(Path("app/mods.py")).failures
    assert line.startswith("lib/masks.py:2: odd: ")


def test_folders_named_like_a_library_are_not_read(tmp_path: Path) -> None:
    """In PyTorch's own repository, torch is such a folder."""
    _write(tmp_path / "torch/nn/attention/flex_attention.py", "def and_masks(*masks):\n    return masks[0]\n")
    report = _port(
        tmp_path / "mods.py",
        """
        from torch.nn.attention.flex_attention import and_masks
        def causal(b, h, q_idx, kv_idx):
            return q_idx >= kv_idx
        near = and_masks(causal, lambda b, h, q, kv: q - kv < 4)
        """,
    )
    assert formulas(report) == {"causal": "q_idx >= kv_idx", "near": "q_idx >= kv_idx and q_idx - kv_idx < 4"}


def test_wrappers_of_flex_attention_in_another_module_are_flex_attention(tmp_path: Path) -> None:
    _write(
        tmp_path / "wrapped.py",
        """
        import torch
        from torch.nn.attention.flex_attention import create_block_mask as make, flex_attention
        flex_attention = torch.compile(flex_attention)
        create_block_mask = load(make)
        """,
    )
    report = _port(
        tmp_path / "mods.py",
        """
        from wrapped import create_block_mask, flex_attention
        def run(q, k, v):
            blocks = create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, 8, 8)
            return flex_attention(q, k, v, block_mask=blocks, score_mod=lambda score, b, h, q, kv: score * 2)
        """,
    )
    assert report.failures == ()
    assert formulas(report) == {"lambda_4_lambda_5": "q_idx >= kv_idx | score * 2"}


def _write(path: Path, source: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))


def _port(path: Path, source: str) -> Report:
    _write(path, source)
    return port(path)
