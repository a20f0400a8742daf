"""`codegen port`: decorated functions, and mods that a file makes without a name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from codegen.port.command import Report, port
from tests.unit.port.reports import formulas, port_text

CAUSAL_AND_NEAR = """\
from functools import partial
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention
def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx
def near(b, h, q_idx, kv_idx, size):
    return q_idx - kv_idx < size
"""


def test_decorators_of_the_file_are_applied(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        import functools
        def with_causal(mod):
            @functools.wraps(mod)
            def inner(b, h, q_idx, kv_idx):
                return mod(b, h, q_idx, kv_idx) & (q_idx >= kv_idx)
            return inner
        def at_most(size):
            def decorate(mod):
                return and_masks(mod, lambda b, h, q, kv: q - kv < size)
            return decorate
        @with_causal
        def window(b, h, q_idx, kv_idx):
            return q_idx - kv_idx < 4
        @at_most(9)
        @with_causal
        def even(b, h, q_idx, kv_idx):
            return kv_idx % 2 == 0
        """,
    )
    assert report.failures == ()
    assert formulas(report) == {
        "window": "q_idx - kv_idx < 4 and q_idx >= kv_idx",
        "even": "kv_idx % 2 == 0 and q_idx >= kv_idx and q_idx - kv_idx < 9",
    }


def test_decorators_that_change_no_value_are_left_out(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        from functools import cache, lru_cache
        @torch.compile(dynamic=False)
        def window(b, h, q_idx, kv_idx):
            return q_idx - kv_idx < 4
        @torch.no_grad()
        @lru_cache(8)
        def make_far(size):
            @torch.compile
            def far(b, h, q_idx, kv_idx):
                return q_idx - kv_idx >= size
            return far
        class Masks:
            @staticmethod
            @cache
            def causal(b, h, q_idx, kv_idx):
                return q_idx >= kv_idx
            @property
            def self_only(self):
                return lambda b, h, q_idx, kv_idx: q_idx == kv_idx
        """,
    )
    assert report.failures == ()
    assert formulas(report) == {
        "window": "q_idx - kv_idx < 4",
        "far": "q_idx - kv_idx >= size",
        "causal": "q_idx >= kv_idx",
        "self_only": "q_idx == kv_idx",
    }


def test_other_decorators_are_reported(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        from masks import register, shifted
        def gone(mod):
            MODS.append(mod)
        @shifted
        def window(b, h, q_idx, kv_idx):
            return q_idx - kv_idx < 4
        @register("far")
        def make_far(size):
            def far(b, h, q_idx, kv_idx):
                return q_idx - kv_idx >= size
            return far
        @gone
        def causal(b, h, q_idx, kv_idx):
            return q_idx >= kv_idx
        @torch.no_grad()
        def doubled(score, b, h, q_idx, kv_idx):
            return 2 * score
        @shifted
        def helper(x):
            return x + 1
        def ahead(b, h, q_idx, kv_idx):
            return helper(q_idx) >= kv_idx
        """,
    )
    assert report.ported == ()
    assert _lines(report) == [
        "5: window: this file does not define the decorator; if it changes no value, leave it out: shifted",
        "8: far: this file does not define the decorator; if it changes no value, leave it out: register('far')",
        "13: causal: what the decorator returns is no mask_mod or score_mod; if it changes no value, leave it out: "
        "gone",
        "16: doubled: a score cannot be left out of its derivative: torch.no_grad()",
        "19: ahead: this file does not define the decorator; if it changes no value, leave it out: shifted",
    ]


def test_masks_without_a_name_are_ported(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        CAUSAL_AND_NEAR
        + """
block_mask = create_block_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < 9), None, None, 64, 64)
part = create_block_mask(partial(near, size=5), None, None, 64, 64)
parts = [causal, partial(near, size=7)]
both = create_block_mask(and_masks(*parts), None, None, 64, 64)
either = or_masks(*parts)
""",
    )
    assert report.failures == ()
    assert formulas(report) == {
        "causal": "q_idx >= kv_idx",
        "lambda_8": "q_idx >= kv_idx and q_idx - kv_idx < 9",
        "near": "q_idx - kv_idx < 5",
        "causal_near": "q_idx >= kv_idx and q_idx - kv_idx < 7",
        "either": "q_idx >= kv_idx or q_idx - kv_idx < 7",
    }
    alone = port(tmp_path / "mods.py", ["either"])
    assert formulas(alone) == {"either": "q_idx >= kv_idx or q_idx - kv_idx < 7"}


def test_a_file_with_a_lambda_alone_has_a_mod(tmp_path: Path) -> None:
    report = port_text(tmp_path, "create_block_mask(lambda x, y, i, j: i >= j, 1, 1, 64, 64)\n")
    assert formulas(report) == {"lambda_1": "q_idx >= kv_idx"}


def test_a_call_of_flex_attention_pairs_mods_without_names(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        CAUSAL_AND_NEAR
        + """
def make_window(size):
    def window(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < size
    return window
class Attention:
    def __init__(self, reach):
        self.mask = partial(near, size=reach)
    def forward(self, q, k, v, size, **options):
        blocks = create_block_mask(partial(near, size=5), None, None, 64, 64)
        flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 2, block_mask=blocks)
        flex_attention(q, k, v, lambda s, b, h, i, j: s * 3, create_block_mask(make_window(size), 1, 1, 8, 8))
        self.blocks = create_block_mask(self.mask, None, None, 64, 64)
        flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 4, block_mask=self.blocks, **options)
""",
    )
    assert report.failures == ()
    assert formulas(report) == {
        "causal": "q_idx >= kv_idx",
        "near_lambda_17": "q_idx - kv_idx < 5 | score * 2",
        "window_lambda_18": "q_idx - kv_idx < size | score * 3",
        "near_lambda_20": "q_idx - kv_idx < reach | score * 4",
    }


def test_mods_inside_of_code_that_cannot_be_read_are_ported(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        CAUSAL_AND_NEAR
        + """
MASKS = {"ahead": lambda b, h, q, kv: q > kv, "near": partial(near, size=3)}
for mask in [lambda b, h, q, kv: q > kv + 1, lambda b, h, q, kv: q > kv + 2]:
    compare(create_block_mask(mask, 1, 1, 64, 64))
windows = [partial(near, size=w) for w in (4, 5)]
blocks = None if is_full() else create_block_mask(lambda b, h, q, kv: q > kv + 3, 1, 1, 64, 64)
""",
    )
    assert report.failures == ()
    assert formulas(report) == {
        "causal": "q_idx >= kv_idx",
        "lambda_8": "q_idx > kv_idx",
        "near": "q_idx - kv_idx < 3",
        "lambda_9": "q_idx > kv_idx + 1",
        "lambda_9_2": "q_idx > kv_idx + 2",
        "near_2": "q_idx - kv_idx < 4",
        "near_3": "q_idx - kv_idx < 5",
        "lambda_12": "q_idx > kv_idx + 3",
    }


def test_masks_that_are_not_known_get_one_line_each(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        CAUSAL_AND_NEAR
        + """
from masks import documents, padded
def masked(mask, cached_mask):
    create_block_mask(mask, 1, 1, 64, 64)
    create_block_mask(padded, 1, 1, 64, 64)
    create_block_mask(padded, 1, 1, 128, 128)
    create_block_mask(documents(3), 1, 1, 64, 64)
    create_block_mask(partial(near, **sizes), 1, 1, 64, 64)
    create_block_mask(and_masks(causal, *others), 1, 1, 64, 64)
    create_block_mask(lambda q, kv: q >= kv, 1, 1, 64, 64)
later = and_masks(*others)
""",
    )
    elsewhere = "no file of module 'masks' was found beside this one; copy"
    dicts = "arguments are written one by one, not with **"
    stars = (
        "what * stands for is not known; write the arguments one by one, or loop over a list that the file writes out"
    )
    assert formulas(report) == {"causal": "q_idx >= kv_idx"}
    assert _lines(report) == [
        f"11: padded: {elsewhere} 'padded' into this file: padded",
        f"13: documents: {elsewhere} 'documents' into this file: documents(3)",
        f"14: near: {dicts}: partial(near, **sizes)",
        f"15: and_15: {stars}: and_masks(causal, *others)",
        "16: mod_16: a function of 4 arguments was expected here, got one of 2: lambda q, kv: q >= kv",
        f"17: later: {stars}: and_masks(*others)",
    ]


def test_a_list_that_the_file_changes_is_followed_or_not_known(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        CAUSAL_AND_NEAR
        + """
def add(masks):
    masks.append(causal)
known, looped, chosen, given, replaced = [causal], [causal], [causal], [causal], [causal]
known.append(partial(near, size=3))
for size in sizes:
    looped.append(partial(near, size=size))
if is_near:
    chosen.append(partial(near, size=3))
add(given)
replaced[0] = partial(near, size=3)
first = and_masks(*known)
second = and_masks(*looped)
third = and_masks(*chosen)
fourth = and_masks(*given)
fifth = and_masks(*replaced)
""",
    )
    assert formulas(report)["first"] == "q_idx >= kv_idx and q_idx - kv_idx < 3"
    assert [line.split(": ")[1] for line in _lines(report)] == ["second", "third", "fourth", "fifth"]
    assert "it depends on `if is_near` in line 14" in _lines(report)[1]


def test_a_function_that_partial_completes_is_ported_with_its_arguments(tmp_path: Path) -> None:
    source = """
        def blocks(b, h, q_idx, kv_idx, block_size=None, n=None):
            return (q_idx // block_size == kv_idx // block_size) & (q_idx < n)
        """
    report = port_text(tmp_path, source)
    assert _lines(report)[0] == (
        "3: blocks: argument block_size has the default None; port a `partial` of the function that gives it: "
        "q_idx // block_size"
    )
    used = """
        def generate(seqlen, block_size):
            mask = partial(blocks, block_size=block_size, n=seqlen)
            return create_block_mask(partial(blocks, block_size=block_size, n=8), 1, 1, seqlen, seqlen)
        """
    report = port_text(tmp_path, source + used)
    assert report.failures == ()
    assert formulas(report) == {
        "mask": "q_idx // block_size == kv_idx // block_size and q_idx < seqlen",
        "blocks": "q_idx // block_size == kv_idx // block_size and q_idx < 8",
    }
    assert "block_size: int" in report.text
    factory = port_text(tmp_path, "def make(n=None):\n    return lambda b, h, q, kv: q - kv < n\n")
    assert "argument n has the default None; port a call of the factory that gives it" in factory.failures[0]


def test_calls_that_fan_out_do_not_hide_what_follows(tmp_path: Path) -> None:
    calls = "".join(f"def f{i}(x):\n    f{i + 1}(x)\n    f{i + 1}(x)\n    return f{i + 1}(x)\n" for i in range(12))
    report = port_text(tmp_path, f"{calls}f0(1)\ndef causal(b, h, q_idx, kv_idx):\n    return q_idx >= kv_idx\n")
    assert report.ported == ("causal",)


def test_a_factory_that_gets_an_unknown_value_of_its_own_name_is_ported(tmp_path: Path) -> None:
    """What this call gives and what the factory gives are one mod, of which neither stands for the other."""
    report = port_text(
        tmp_path,
        """
        def window(size):
            return lambda b, h, q, k: q - k < size
        size = get()
        blocks = create_block_mask(window(size), 1, 1, 8, 8)
        """,
    )
    assert formulas(report) == {"window": "q_idx - kv_idx < size"}


def _lines(report: Report) -> Sequence[str]:
    """The failures, each from its line on."""
    return [line.partition("mods.py:")[2] for line in report.failures]
