"""The options of a call for its kernels: hashable, equal by value, and the same after an operator got them as text."""

from __future__ import annotations

import dataclasses
import pickle
import re
from itertools import product

import pytest
import torch

from codegen.testing.calls import load_op
from generated._runtime.core.checks import ArgumentError
from generated._runtime.core.configs import Tile
from generated._runtime.core.options import NO_OPTIONS, CallOptions, checked_options, known_lengths

TILES = ((), (("fwd", Tile(128, 64, 8, 3)),), (("dkdv", Tile(64, 64, 4, 2)), ("dq", Tile(32, 16, 1, 1))))
EVERY = [
    CallOptions(family=family, fixed_order=fixed_order, tiles=tiles, plain=plain, longest=longest)
    for family, fixed_order, tiles, plain, longest in product(
        (None, "portable", "hopper"), (False, True), TILES, (False, True), (0, 4096)
    )
]


def test_text_and_parsed_are_inverse() -> None:
    assert [CallOptions.parsed(options.text) for options in EVERY] == EVERY
    assert len({options.text for options in EVERY}) == len(set(EVERY)) == len(EVERY)
    assert (NO_OPTIONS.text, CallOptions.parsed("")) == ("", NO_OPTIONS)


def test_options_are_frozen_and_pickled_by_value() -> None:
    options = checked_options("causal", {"fwd": TILES[1][0][1]._asdict()}, "hopper", True)
    assert pickle.loads(pickle.dumps(options)) == options
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.family = None  # type: ignore[misc]


def test_checked_options_hold_what_the_call_says() -> None:
    options = checked_options("causal", {"fwd": TILES[1][0][1]._asdict()}, "hopper", True)
    assert options == CallOptions(family="hopper", fixed_order=True, tiles=TILES[1])
    assert (options.tile("fwd"), options.tile("dq")) == (Tile(128, 64, 8, 3), None)
    assert options.plainly() == dataclasses.replace(options, plain=True)
    assert checked_options("causal", None) == checked_options("causal", {}, None, False) == NO_OPTIONS


@pytest.mark.parametrize(
    ("lengths", "longest"),
    [
        ((None, None), 0),
        ((0, None), 0),
        ((1, None), 1),
        ((4096, None), 4096),
        ((4095, None), 2048),
        ((64, 70000), 65536),
    ],
)
def test_the_longest_sequence_is_rounded_down_to_a_power_of_two(
    lengths: tuple[int | None, int | None], longest: int
) -> None:
    for mode in ("packed", "segmented"):
        assert checked_options("causal", None, mode=mode, lengths=lengths) == CallOptions(longest=longest)


@pytest.mark.parametrize(
    ("mode", "lengths", "text"),
    [
        ("dense", (8, None), "max_seqlen_q: expected None in a dense call, whose sequences have one length, got 8"),
        ("dense", (None, 8), "max_seqlen_k: expected None in a dense call, whose sequences have one length, got 8"),
        ("packed", (-1, None), "max_seqlen_q: expected an int of at least 0, got -1"),
        ("packed", (8, 8.0), "max_seqlen_k: expected an int of at least 0, got 8.0"),
    ],
)
def test_bad_lengths_are_named(mode: str, lengths: tuple[object, object], text: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(text)):
        checked_options("causal", None, mode=mode, lengths=lengths)


def test_lengths_of_other_libraries_are_taken_where_they_are_ints() -> None:
    assert known_lengths(7, 9) == {"max_seqlen_q": 7, "max_seqlen_k": 9}
    assert known_lengths(7, torch.tensor(9)) == {"max_seqlen_q": 7}
    assert known_lengths(0, None) == known_lengths(True, 7.0) == {}


@pytest.mark.parametrize("name", ["schedule", "plan"])
def test_errors_of_python_name_a_function_as_it_is_called(name: str) -> None:
    function = getattr(load_op("causal"), name)
    with pytest.raises(TypeError, match=rf"causal\.{name}\(\) got an unexpected keyword argument 'siez'"):
        function(siez=1)
    assert pickle.loads(pickle.dumps(function)) is function
