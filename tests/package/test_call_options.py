"""What a call asks of its kernels: hashable, equal by value, and unchanged when an operator carried it as text."""

from __future__ import annotations

import dataclasses
import pickle
from itertools import product

import pytest

from generated._runtime.core.configs import Tile
from generated._runtime.core.options import NO_OPTIONS, CallOptions, checked_options

TILES = ((), (("fwd", Tile(128, 64, 8, 3)),), (("dkdv", Tile(64, 64, 4, 2)), ("dq", Tile(32, 16, 1, 1))))
EVERY = [
    CallOptions(family=family, fixed_order=fixed_order, tiles=tiles, plain=plain)
    for family, fixed_order, tiles, plain in product((None, "portable", "hopper"), (False, True), TILES, (False, True))
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
