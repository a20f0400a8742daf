"""Reads `defaults:` and `archs:` of a spec file, which change the values that the file inherits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from codegen.arch.chips import ARCHS
from codegen.arch.tile_rules import MAX_HEAD_DIM, MIN_HEAD_DIM, TILE_FIELDS, TileConfig, tile_problems
from codegen.load.yaml_tree import Document, Item
from codegen.spec.model import DTYPES, ArchSpec, Defaults, Pass, PassConfigs

FLOAT32 = "float32"
"""Key of an arch that holds the configs of 4-byte inputs."""

SHORT = "short"
"""Key of an arch that holds the configs of short sequences, by the longest sequence served."""

_PASSES = tuple(p.value for p in Pass)

T = TypeVar("T", str, int)


def read_defaults(doc: Document, item: Item, inherited: Defaults) -> Defaults:
    keys = doc.mapping(item, ("dtypes", "head_dims"))
    dtypes, head_dims = inherited.dtypes, inherited.head_dims
    if "dtypes" in keys:
        dtypes = _distinct(doc, keys["dtypes"], lambda element: doc.choice(element, DTYPES))
    if "head_dims" in keys:
        head_dims = _distinct(doc, keys["head_dims"], lambda element: _head_dim(doc, element))
    return Defaults(dtypes=dtypes, head_dims=head_dims)


def _distinct(doc: Document, item: Item, read: Callable[[Item], T | None]) -> tuple[T, ...]:
    """The values of a list that must have at least one value and none twice."""
    before = len(doc.problems)
    values: list[T] = []
    for element in doc.sequence(item):
        value = read(element)
        if value is not None and value in values:
            doc.note(element, f"each value is given once, got {value} again")
        elif value is not None:
            values.append(value)
    if not values and len(doc.problems) == before:
        doc.note(item, "must name at least one value, got an empty list; leave the key out for the library's")
    return tuple(values)


def _head_dim(doc: Document, item: Item) -> int | None:
    value = doc.integer(item)
    if value is None or MIN_HEAD_DIM <= value <= MAX_HEAD_DIM:
        return value
    doc.note(item, f"a head_dim must be from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, got {value}")
    return None


def read_archs(doc: Document, item: Item, inherited: Mapping[str, ArchSpec]) -> dict[str, ArchSpec]:
    archs = dict(inherited)
    for name, entry in doc.mapping(item, ARCHS, "architecture").items():
        base = archs.get(name, ArchSpec(name=name, half={}, float32={}))
        keys = doc.mapping(entry, (*_PASSES, FLOAT32, SHORT), "pass")
        single, brief = keys.pop(FLOAT32, None), keys.pop(SHORT, None)
        half = _read_passes(doc, keys, base.half)
        float32 = _read_passes(doc, doc.mapping(single, _PASSES, "pass"), base.float32) if single else base.float32
        short = _read_short(doc, brief, base.short) if brief else base.short
        archs[name] = ArchSpec(name=name, half=half, float32=float32, short=short)
        _check_complete(doc, entry, archs[name])
    return archs


def _read_short(doc: Document, item: Item, base: Mapping[int, PassConfigs]) -> dict[int, PassConfigs]:
    """The entries `length: passes`. A pass or head_dim that an entry leaves out has the config of longer sequences."""
    found = dict(base)
    for key, value in doc.entries(item):
        length = doc.integer(key)
        if length is not None and length < 1:
            doc.note(key, f"the longest sequence served must be at least 1, got {length}")
            continue
        passes = doc.mapping(value, _PASSES, "pass")
        if length is not None:
            found[length] = _read_passes(doc, passes, found.get(length, {}))
    return dict(sorted(found.items()))


def _read_passes(doc: Document, passes: Mapping[str, Item], base: PassConfigs) -> PassConfigs:
    configs = {p: dict(of_pass) for p, of_pass in base.items()}
    for name, item in passes.items():
        merged = {**configs.get(Pass(name), {}), **_read_pass(doc, item)}
        configs[Pass(name)] = dict(sorted(merged.items()))
    return configs


def _read_pass(doc: Document, item: Item) -> dict[int, TileConfig]:
    """The entries `head_dim: config` of one pass, without those that have problems."""
    found: dict[int, TileConfig] = {}
    seen: set[int] = set()
    for key, value in doc.entries(item):
        head_dim = _head_dim(doc, key)
        if head_dim is not None and head_dim in seen:
            doc.note(key, f"duplicate head_dim {head_dim}")
            continue
        config = _read_tile(doc, value)
        if head_dim is not None:
            seen.add(head_dim)
            if config is not None:
                found[head_dim] = config
    return found


def _read_tile(doc: Document, item: Item) -> TileConfig | None:
    before = len(doc.problems)
    keys = doc.mapping(item, tuple(TILE_FIELDS))
    missing = [name for name in TILE_FIELDS if name not in keys]
    if missing and len(doc.problems) == before:
        doc.note(item, f"a config gives all of {' '.join(TILE_FIELDS)}, missing {' '.join(missing)}")
    read = {name: doc.integer(value) for name, value in keys.items()}
    values = {name: value for name, value in read.items() if value is not None}
    for name, message in tile_problems(values):
        doc.note(keys[name], message)
    return TileConfig(**values) if len(doc.problems) == before else None


def _check_complete(doc: Document, item: Item, arch: ArchSpec) -> None:
    """Check that every head_dim has a config in both element sizes, unless other problems were found there already."""
    if doc.has_problem_in(item):
        return
    for prefix, configs in (("", arch.half), (f"{FLOAT32}.", arch.float32)):
        for p in Pass:
            largest = max(configs.get(p, {}), default=None)
            if largest is None or largest < MAX_HEAD_DIM:
                got = "none" if largest is None else f"{largest} as the largest"
                message = f"needs a config for head_dim {MAX_HEAD_DIM}, which serves all larger ones, got {got}"
                doc.note_below(item, prefix + p.value, message)
