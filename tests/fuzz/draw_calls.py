"""Random calls of a variant: lengths around the edges of tiles, every mode, layout and option."""

from __future__ import annotations

from random import Random
from typing import Any

from .attention import Entry
from .calls import FREE, Call
from .order import Verdict, reads_by_row, verdict

MODES = ("dense", "packed", "segmented")
INTERPRETED_TILES = (
    (16, 16),
    (16, 16),
    (16, 32),
    (32, 16),
    (32, 32),
    (64, 16),
    (16, 64),
    (64, 64),
    (128, 32),
    (32, 128),
)
MOST_TILES = 14
"""Blocks of scores that a call in the interpreter may have: each takes it milliseconds."""

HOPPER_DIMS = (48, 56, 64, 64, 64)
GPU_DIMS = (64, 64, 64, 64, 128, 128, 32, 96, 8, 512)


def draw_call(random: Random, entry: Entry, *, mode: str, family: str = "portable", device: str = "cpu") -> Call:
    """A call of `entry` in a mode, for kernels of a family that run interpreted, emulated or on a GPU."""
    if device == "cuda":
        sizes = _on_gpu(random, mode, family)
    elif family == "hopper":
        sizes = _emulated(random, mode)
    else:
        sizes = _interpreted(random, mode)
    if family == "reference":
        sizes |= {"tiles": None}
    if family == "hopper" and not sum(sizes["kv_lens"]):
        sizes["kv_lens"] = (1, *sizes["kv_lens"][1:])  # its copies need a key
    call = sizes | _options(random, entry, mode, sizes)
    return Call(mode=mode, family=family, seed=random.randrange(10**6), **call)


# ---------------------------------------------------------------------------------------------------------------- sizes


def _length(random: Random, tile: int, most: int) -> int:
    """Around an edge of a tile, mostly of several tiles."""
    kind = random.random()
    if kind < 0.1:
        return random.choice((1, 2, 3))
    edges = [n for k in (1, 2, 2, 3, 4, 5) for n in (k * tile - 1, k * tile, k * tile + 1) if n <= most]
    return random.choice(edges) if edges and kind < 0.85 else random.randrange(1, most + 1)


def _lengths(random: Random, mode: str, tiles: tuple[int, int], most: int) -> dict[str, Any]:
    block_m, block_n = tiles
    if mode != "packed":
        q_len, kv_len = _length(random, block_m, most), _length(random, block_n, most)
        kv_len = q_len if random.random() < 0.3 else kv_len
        return {"q_lens": (q_len,), "kv_lens": (0 if random.random() < 0.01 else kv_len,)}
    count = random.choice((1, 2, 3, 3, 4, 5))
    each = max(most * 2 // (count + 1), 4)

    def lens(tile: int) -> tuple[int, ...]:
        return tuple(0 if random.random() < 0.12 else _length(random, tile, each) for _ in range(count))

    q_lens = lens(block_m)
    return {"q_lens": q_lens, "kv_lens": q_lens if random.random() < 0.35 else lens(block_n)}


def _heads(random: Random, *, few: bool) -> dict[str, int]:
    kv_heads, group = random.choice(
        ((1, 1), (1, 1), (2, 1), (1, 2), (1, 3), (2, 2)) + (() if few else ((1, 6), (2, 3)))
    )
    return {"heads": kv_heads * group, "kv_heads": kv_heads}


def _interpreted(random: Random, mode: str) -> dict[str, Any]:
    while True:
        most = random.choice((40, 70, 100, 200))
        each = most // 2 if mode == "packed" else most
        # Of several tiles: most of what may go wrong does where one ends and the next begins.
        fitting = [tile for tile in INTERPRETED_TILES if max(tile) <= each // 2]
        tiles = random.choice(fitting if fitting and random.random() < 0.85 else INTERPRETED_TILES)
        call: dict[str, Any] = {"batch": 1 if mode == "packed" else random.choice((1, 1, 2, 3)), "tiles": tiles}
        call |= _lengths(random, mode, tiles, most) | _heads(random, few=False)
        sequences = zip(call["q_lens"], call["kv_lens"], strict=True)
        blocks = sum((-(-q // tiles[0])) * (-(-kv // tiles[1])) for q, kv in sequences)
        if blocks * call["batch"] * call["heads"] <= MOST_TILES:
            break
    dim = random.choice((16, 16, 16, 24, 32, 32, 40, 48, 64, 80, 17, 33, 8, 8))
    return call | {
        "dim": dim,
        "dim_v": dim if random.random() < 0.7 else random.choice((8, 16, 20, 32, 48)),
        "dtype": random.choice(("float32", "float32", "float16")),
        "deterministic": False,
    }


def _emulated(random: Random, mode: str) -> dict[str, Any]:
    most = random.choice((70, 140, 200, 270))
    call: dict[str, Any] = {"batch": 1 if mode == "packed" else random.choice((1, 1, 2)), "tiles": None}
    call |= _lengths(random, mode, (64, 128), most) | _heads(random, few=True)
    if call["heads"] * call["batch"] > 3:
        call |= {"heads": 2, "kv_heads": 1}
    dim, dim_v = random.choice(HOPPER_DIMS), random.choice(HOPPER_DIMS)
    if random.random() < 0.1:
        dim, dim_v = random.choice(((96, 96), (128, 64), (192, 128), (64, 128), (264, 264), (320, 72)))
    return call | {"dim": dim, "dim_v": dim_v, "dtype": "float16", "deterministic": random.random() < 0.4}


def _on_gpu(random: Random, mode: str, family: str) -> dict[str, Any]:
    most = random.choice((130, 300, 400))
    call: dict[str, Any] = {"batch": 1 if mode == "packed" else random.choice((1, 1, 2)), "tiles": None}
    call |= _lengths(random, mode, (128, 128), most) | _heads(random, few=most > 300)
    dim = random.choice(GPU_DIMS)
    dim_v = dim if random.random() < 0.85 else random.choice(GPU_DIMS)
    dtypes = ("bfloat16", "bfloat16", "float16", "float16", "float32")
    dtype = random.choice(dtypes[:4] if family == "hopper" else dtypes)
    if family == "hopper":
        # Where less than three quarters of a tile would be filled, its kernels refuse.
        dim, dim_v = (64 if each in (8, 32) else each for each in (dim, dim_v))
    return call | {"dim": dim, "dim_v": dim_v, "dtype": dtype, "deterministic": False}


# -------------------------------------------------------------------------------------------------------------- options


def _options(random: Random, entry: Entry, mode: str, sizes: dict[str, Any]) -> dict[str, Any]:
    dim = sizes["dim"]
    call: dict[str, Any] = {
        "scale": None if random.random() < 0.6 else round(random.choice((0.4, 1.3, 2.0, -0.8)) / dim**0.5, 4),
        "layout": random.choice(("bhsd", "bshd")) if mode != "packed" else "bhsd",
        "memory": random.choice(("rows", "rows", "tokens", "columns", "odd")),
        "with_lse": random.random() < 0.6,
        "free": random.choice((1, 3, FREE, FREE, 40, 200)),
        "q_offset": _offset(random, mode, sizes),
    }
    if mode == "segmented":
        call |= _tokens(random, sizes)
        if "q_positions" in call and random.random() < 0.9:
            call |= _legal(random, entry, Call(mode=mode, **sizes, **call))
    for name, scalar in entry.get("scalars", {}).items():
        kind = scalar if isinstance(scalar, str) else scalar["type"]
        value = random.choice((0, 1, 3, 15, 16, 17, 40, 64, -3)) if kind == "int" else random.choice((0.5, 1.7, -0.4))
        call.setdefault("scalars", {})[name] = value
    tensors = entry.get("tensors", {})
    integers = [name for name, x in tensors.items() if x.get("dtype", "float32").startswith("int")]
    if integers:
        kinds = ("low", "low", "runs", "positions", "far", "bits")
        call["contents"] = {name: random.choice(kinds) for name in integers}
    given = _given(random, entry, call.get("contents", {}))
    call |= {"given": given} if given else {}
    trained = [name for name, x in tensors.items() if x.get("grad")]
    trained += [name for name, key in (("sink", "sink"), ("g", "decay")) if entry.get(key)]
    if trained and random.random() < 0.15:
        call["trained"] = ("q", "k", "v", *random.sample(trained, random.randrange(len(trained))))
    if entry.get("dropout"):
        call |= {
            "dropout_p": random.choice((0.0, 0.1, 0.5)),
            "dropout_seed": random.choice((0, 7, 2**31 + 5, 2**40 + 3)),
        }
    return call


FLOATS = ("float32", "float16", "bfloat16", "float64")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


def _given(random: Random, entry: Entry, contents: dict[str, str]) -> dict[str, str]:
    """Dtypes of some tensors, each one that holds what the tensor does."""
    declared = {name: x.get("dtype", "float32") for name, x in entry.get("tensors", {}).items()}
    declared |= {name: "float32" for name, key in (("sink", "sink"), ("g", "decay")) if entry.get(key)}
    found = {}
    for name, dtype in declared.items():
        if dtype != "bool" and random.random() < 0.15:
            small = contents.get(name) in ("low", "bits")
            found[name] = random.choice(FLOATS if name not in contents else INTEGERS if small else INTEGERS[:3])
    return {name: dtype for name, dtype in found.items() if dtype != declared[name]}


def _legal(random: Random, entry: Entry, call: Call) -> dict[str, Any]:
    """Positions that agree with rows, where the entry asks for that: of each segment its own, or the rows."""
    if verdict(entry, call) is Verdict.LEGAL:
        return {}
    if call.q_lens == call.kv_lens and (not reads_by_row(entry) or random.random() < 0.3):
        ids = call.q_segment_ids or ((0,) * call.q_lens[0],) * call.batch
        shared = {"kv_segment_ids": None, "kv_positions": None, "kv_lengths": None}
        return shared | {"q_positions": tuple(_rising(random, row) for row in ids)}
    rows = {side: (tuple(range(lens[0])),) * call.batch for side, lens in (("q", call.q_lens), ("kv", call.kv_lens))}
    return {"q_positions": rows["q"], "kv_positions": rows["kv"]}


def _rising(random: Random, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Positions that rise by one in each run of an id, from anywhere."""
    found: list[int] = []
    for i, segment in enumerate(ids):
        continues = i > 0 and ids[i - 1] == segment
        found.append(found[-1] + 1 if continues else random.choice((0, 0, 1, 17, -3, 40)))
    return tuple(found)


def _offset(random: Random, mode: str, sizes: dict[str, Any]) -> int | str | tuple[int, ...]:
    if random.random() < 0.5:
        return 0
    count = len(sizes["q_lens"]) if mode == "packed" else sizes["batch"]
    kind = random.random()
    if kind < 0.4:
        return "end"
    if kind < 0.7:
        return random.choice((1, 3, 17, 64, -1, -4, -20))
    return tuple(random.choice((0, 1, 5, 20, -3, -17, 33)) for _ in range(count))


def _tokens(random: Random, sizes: dict[str, Any]) -> dict[str, Any]:
    """Segment ids, positions and lengths, some of them at least."""
    batch, q_len, kv_len = sizes["batch"], sizes["q_lens"][0], sizes["kv_lens"][0]
    call: dict[str, Any] = {}
    padding = random.choice((-1, -1, 0, 2, 7))

    def ids(length: int) -> tuple[tuple[int, ...], ...]:
        return tuple(_ids(random, length, padding) for _ in range(batch))

    def places(length: int) -> tuple[tuple[int, ...], ...]:
        return tuple(_positions(random, length) for _ in range(batch))

    kinds = random.choice(("ids", "ids", "positions", "lengths", "all", "ids positions", "ids lengths"))
    if "ids" in kinds or kinds == "all":
        call |= {"padding_id": padding, "q_segment_ids": ids(q_len)}
        if q_len != kv_len or random.random() < 0.3:
            call["kv_segment_ids"] = ids(kv_len)
    if "positions" in kinds or kinds == "all":
        call |= {"q_positions": places(q_len), "q_offset": 0}
        if q_len != kv_len or random.random() < 0.3:
            call["kv_positions"] = places(kv_len)
    if "lengths" in kinds or kinds == "all":
        call["kv_lengths"] = tuple(random.choice((0, kv_len, random.randrange(kv_len + 1))) for _ in range(batch))
    return call


def _ids(random: Random, length: int, padding: int) -> tuple[int, ...]:
    """Runs of ids, some of padding, an id sometimes twice; or an id for each token."""
    if random.random() < 0.2:
        return tuple(random.choice((0, 1, 2, padding)) for _ in range(length))
    found: list[int] = []
    while len(found) < length:
        number = padding if random.random() < 0.15 else random.randrange(4)
        found += [number] * random.choice((1, 3, 16, 17, 40))
    return tuple(found[:length])


def _positions(random: Random, length: int) -> tuple[int, ...]:
    kind = random.choice(("restarting", "shuffled", "apart", "falling", "in order"))
    if kind == "restarting":
        period = random.choice((3, 7, 16, 30))
        return tuple(i % period for i in range(length))
    if kind == "shuffled":
        return tuple(random.sample(range(length), length))
    if kind == "apart":
        return tuple(5 * i - 20 for i in range(length))
    return tuple(range(length, 0, -1)) if kind == "falling" else tuple(range(length))
