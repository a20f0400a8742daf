"""What a call asks of its kernels: their tiles, their family, and the order in which gradients are added."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from ..archs import TILE_VALUES
from ..kernels import TRAITS
from .checks import check_deterministic, check_int, fail, is_choice, shown
from .families import FAMILIES
from .tiles import HopperTile, Tile

PASSES = ("fwd", "dkdv", "dq")

MOST_KEYS = 128
"""Most keys of a tile in Hopper's forwards: four threads share a row, and each has its mask in one word of 32 bits."""

PAGED_PASSES = ("decode", "paged_fwd")
"""The kernels on paged caches: of sequences with few rows, and of prompts."""

SPLIT_FIELD = "keys_per_split"
"""One more field that a tile of PAGED_PASSES may have: the least number of keys of a split."""


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """What a call asks of its kernels. It is hashable: a static argument in JAX, a part of every key of cached calls.

    Attributes:
        family: the family of kernels; None leaves it to the measurements and the rule.
        fixed_order: gradients must be added in a fixed order.
        tiles: the passes whose tile the call gives, with the tile.
        plain: the plain reference is computed instead of the kernels.
        wide_keys: dk and dv are float32 whatever k and v are: they are parts of sums that are rounded once, at the end.
        wide_queries: the same for dq.
        longest: the longest sequence has at least this many keys; 0 if that is not known.
    """

    family: str | None = None
    fixed_order: bool = False
    tiles: tuple[tuple[str, Tile], ...] = ()
    plain: bool = False
    wide_keys: bool = False
    wide_queries: bool = False
    longest: int = 0

    def tile(self, pass_name: str) -> Tile | None:
        """The tile that the call gives for a pass."""
        return dict(self.tiles).get(pass_name)

    def plainly(self) -> "CallOptions":
        """The options of the same call, computed by the plain reference."""
        return replace(self, plain=True)

    def widely(self, *, queries: bool) -> "CallOptions":
        """The options of the same call, with dk and dv in float32, and dq if `queries`."""
        return replace(self, wide_keys=True, wide_queries=queries)

    @property
    def text(self) -> str:
        """The options as a string, which is what a custom operator of torch can take. `parsed` is the inverse.

        >>> CallOptions(family="hopper", tiles=(("fwd", Tile(128, 64, 8, 3)),)).text
        'family=hopper fwd=128,64,8,3'
        """
        words = [f"family={self.family}"] if self.family is not None else []
        words += ["fixed_order"] if self.fixed_order else []
        words += [f"{name}={t.block_m},{t.block_n},{t.num_warps},{t.num_stages}" for name, t in self.tiles]
        words += ["plain"] if self.plain else []
        words += ["wide_keys"] if self.wide_keys else []
        words += ["wide_queries"] if self.wide_queries else []
        words += [f"longest={self.longest}"] if self.longest else []
        return " ".join(words)

    @cached_property
    def key(self) -> str:
        """`text`, computed once. Equal options have equal keys, and a key is hashed faster than the options."""
        return self.text

    @classmethod
    def parsed(cls, text: str) -> "CallOptions":
        """The options whose `text` is this."""
        fields = {name: value for name, _, value in (word.partition("=") for word in text.split())}
        tiles = ((name, Tile(*map(int, fields[name].split(",")))) for name in fields if name in PASSES)
        return cls(
            family=fields.get("family"),
            fixed_order="fixed_order" in fields,
            tiles=tuple(tiles),
            plain="plain" in fields,
            wide_keys="wide_keys" in fields,
            wide_queries="wide_queries" in fields,
            longest=int(fields.get("longest", 0)),
        )


NO_OPTIONS = CallOptions()
"""The options of a call that asks for nothing."""


def call_mode(cu_seqlens: Any, tokens: Iterable[Any]) -> str:
    """The mode of a call: packed with `cu_seqlens`, segmented with any of `tokens`, else dense.

    `tokens`: the arguments with an element for each token, such as segment ids.
    """
    if cu_seqlens is not None:
        return "packed"
    return "dense" if all(x is None for x in tokens) else "segmented"


LENGTHS = ("max_seqlen_q", "max_seqlen_k")
"""Arguments that say how many queries and keys the longest sequence of a packed or segmented call has."""


def check_family(op: str, family: object) -> str | None:
    """The family that a call asks for, checked."""
    if family is not None and not is_choice(family, FAMILIES):
        fail(op, "family", f"None or one of {', '.join(map(repr, FAMILIES))}", shown(family))
    return family


def checked_options(
    op: str,
    config: Any,
    family: Any = None,
    deterministic: Any = None,
    mode: str = "dense",
    lengths: tuple[Any, Any] = (None, None),
) -> CallOptions:
    """Check the arguments `config`, `family`, `deterministic` and LENGTHS of a call of this mode."""
    check_family(op, family)
    check_deterministic(op, deterministic)
    if deterministic and mode in TRAITS[op].atomic_modes:
        why = f"as {mode} calls add one of its gradients with atomics, in any order"
        fail(op, "deterministic", f"None or False, {why}", "True")
    if config is None:
        config = {}
    if not isinstance(config, dict):
        fail(op, "config", "None or a dict of pass name -> tile", shown(config))
    # One config may serve all calls of a model. Its tiles for paged caches are then checked, but not used here.
    asked = {name: checked_paged_tile(op, name, entry) for name, entry in config.items()}
    tiles = tuple([(name, found.tile) for name, found in asked.items() if name in PASSES])
    longest = _least_longest(op, mode, lengths)
    return CallOptions(family=family, fixed_order=bool(deterministic), tiles=tiles, longest=longest)


def known_lengths(max_seqlen_q: Any, max_seqlen_k: Any) -> dict[str, int]:
    """Those of LENGTHS that another library's call gives as a positive int. An op would refuse other values."""
    given = zip(LENGTHS, (max_seqlen_q, max_seqlen_k), strict=True)
    return {name: x for name, x in given if isinstance(x, int) and not isinstance(x, bool) and x > 0}


def _least_longest(op: str, mode: str, lengths: tuple[Any, Any]) -> int:
    """The keys of the longest sequence, rounded down to a power of two, so that similar calls have equal options."""
    keys = 0
    for name, value in zip(LENGTHS, lengths, strict=True):
        if value is None:
            continue
        if mode == "dense":
            fail(op, name, "None in a dense call, whose sequences have one length", shown(value))
        keys = check_int(op, name, value, 0)
    found = 1
    # Comparisons instead of `bit_length`: a length that is being traced may have no value of its own.
    while 2 * found <= keys:
        found *= 2
    return found if keys else 0


def checked_tile(op: str, name: str, entry: Any) -> Tile:
    """Check one entry of the argument `config` of a call."""
    if name not in PASSES + PAGED_PASSES:
        fail(op, "config", f"passes among {', '.join(PASSES + PAGED_PASSES)}", repr(name))
    if not isinstance(entry, Mapping) or set(entry) != set(Tile._fields):
        fail(op, f"config[{name!r}]", f"a mapping with {', '.join(Tile._fields)}", shown(entry))
    for field, value in entry.items():
        allowed = TILE_VALUES[field]
        if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
            kind = "a power of two" if all(n & (n - 1) == 0 for n in allowed) else "an int"
            fail(op, f"config[{name!r}][{field!r}]", f"{kind} from {allowed[0]} to {allowed[-1]}", shown(value))
    return Tile(**entry)


def own_forward_tile(op: str, name: str, tile: Tile, rows: int, where: str) -> HopperTile:
    """The tile that a call asks for in `config[name]` for a forward of Hopper's family, checked.

    `rows`: the rows of the kernel's tiles. `where`: which calls run the kernel, for the error.
    """
    if (tile.block_m, tile.num_warps) != (rows, 8) or tile.block_n > MOST_KEYS:
        wanted = f"block_m {rows}, block_n up to {MOST_KEYS} and num_warps 8 {where}"
        fail(op, f"config[{name!r}]", wanted, f"{tile.block_m}, {tile.block_n} and {tile.num_warps}")
    return HopperTile(*tile)


class Asked(NamedTuple):
    """The tile that a call asks for. `keys_per_split` is None if the call leaves its splits to the ladder."""

    tile: Tile
    keys_per_split: int | None


def checked_paged_tile(op: str, name: str, entry: Any) -> Asked:
    """Check one entry of the argument `config` of a call. Entries for paged caches may say how keys are split."""
    if name not in PAGED_PASSES or not isinstance(entry, Mapping) or SPLIT_FIELD not in entry:
        return Asked(checked_tile(op, name, entry), None)
    keys = entry[SPLIT_FIELD]
    if isinstance(keys, bool) or not isinstance(keys, int) or keys < 1:
        fail(op, f"config[{name!r}][{SPLIT_FIELD!r}]", "an int of at least 1", shown(keys))
    rest = {field: value for field, value in entry.items() if field != SPLIT_FIELD}
    return Asked(checked_tile(op, name, rest), keys)
