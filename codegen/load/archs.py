"""Readers of `defaults:` and `archs:`, which override the inherited values entry by entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from codegen.arch.paged import PagedPass, PagedTileConfig
from codegen.arch.tile_rules import NARROW_HEAD_DIM, TileConfig
from codegen.load.grammar import (
    ALL_PASSES,
    ARCH,
    ARCH_TABLE,
    DEFAULT_DTYPES,
    DEFAULT_HEAD_DIMS,
    DEFAULTS,
    FLOAT32,
    PAGED_TABLES,
    PAGED_TILE,
    PAGED_TILE_SHAPES,
    PASS_TABLES,
    PASSES,
    SHORT,
    SHORT_KEY,
    TILE,
    TILE_SHAPES,
)
from codegen.load.shapes import NumberedTable
from codegen.load.yaml_tree import Document, Item
from codegen.spec.model import ArchSpec, Defaults, PagedConfigs, Pass, PassConfigs

Config = TypeVar("Config", bound=TileConfig)


def read_defaults(doc: Document, item: Item, inherited: Defaults) -> Defaults:
    keys = DEFAULTS.items(doc, item)
    dtypes, head_dims = inherited.dtypes, inherited.head_dims
    if "dtypes" in keys:
        dtypes = DEFAULT_DTYPES.read(doc, keys["dtypes"])
    if "head_dims" in keys:
        head_dims = DEFAULT_HEAD_DIMS.read(doc, keys["head_dims"])
    return Defaults(dtypes=dtypes, head_dims=head_dims)


def read_archs(doc: Document, item: Item, inherited: Mapping[str, ArchSpec]) -> dict[str, ArchSpec]:
    archs = dict(inherited)
    for name, entry in ARCH_TABLE.items(doc, item).items():
        base = archs.get(name, ArchSpec(name=name, half={}, float32={}))
        keys = ARCH.items(doc, entry)
        single, brief = keys.pop(FLOAT32, None), keys.pop(SHORT_KEY, None)
        wide = ALL_PASSES.items(doc, single) if single else {}
        archs[name] = replace(
            base,
            half=_read_passes(doc, keys, base.half),
            float32=_read_passes(doc, wide, base.float32),
            short=_read_short(doc, brief, base.short) if brief else base.short,
            paged_half=_read_paged(doc, keys, base.paged_half),
            paged_float32=_read_paged(doc, wide, base.paged_float32),
        )
        _check_complete(doc, entry, archs[name])
    return archs


def _read_short(doc: Document, item: Item, base: Mapping[int, PassConfigs]) -> dict[int, PassConfigs]:
    """`length: passes` entries. A pass or head_dim that is left out takes the config of longer sequences."""
    found = dict(base)
    for _, length, value in SHORT.items(doc, item):
        passes = PASSES.items(doc, value)
        if length is not None:
            found[length] = _read_passes(doc, passes, found.get(length, {}))
    return dict(sorted(found.items()))


def _read_passes(doc: Document, passes: Mapping[str, Item], base: PassConfigs) -> PassConfigs:
    configs = {p: dict(of_pass) for p, of_pass in base.items()}
    for name, item in passes.items():
        if name in PASS_TABLES:
            merged = {**configs.get(Pass(name), {}), **_read_pass(doc, PASS_TABLES[name], item, _read_tile)}
            configs[Pass(name)] = dict(sorted(merged.items()))
    return configs


def _read_paged(doc: Document, passes: Mapping[str, Item], base: PagedConfigs) -> PagedConfigs:
    configs = {p: dict(of_pass) for p, of_pass in base.items()}
    for name, item in passes.items():
        if name in PAGED_TABLES:
            own = _read_pass(doc, PAGED_TABLES[name], item, _read_paged_tile)
            configs[PagedPass(name)] = configs.get(PagedPass(name), {}) | own
    return configs


def _read_pass(
    doc: Document, table: NumberedTable, item: Item, read: Callable[[Document, Item], Config | None]
) -> dict[int, Config]:
    """`head_dim: config` entries of one pass; a config with problems is left out."""
    found: dict[int, Config] = {}
    seen: set[int] = set()
    before, entries = len(doc.problems), list(table.items(doc, item))
    if not entries and not table.may_be_empty and len(doc.problems) == before:
        doc.note(item, "needs a config for at least one head_dim, got none; leave the key out for the library's")
    for key, head_dim, value in entries:
        if head_dim is not None and head_dim in seen:
            doc.note(key, f"duplicate head_dim {head_dim}")
            continue
        config = read(doc, value)
        if head_dim is not None:
            seen.add(head_dim)
            if config is not None:
                found[head_dim] = config
    return found


def _read_tile(doc: Document, item: Item) -> TileConfig | None:
    before = len(doc.problems)
    keys = TILE.items(doc, item)
    values = {name: TILE_SHAPES[name].read(doc, value) for name, value in keys.items()}
    found = {name: value for name, value in values.items() if value is not None}
    return TileConfig(**found) if len(doc.problems) == before else None


def _read_paged_tile(doc: Document, item: Item) -> PagedTileConfig | None:
    before = len(doc.problems)
    keys = PAGED_TILE.items(doc, item)
    values = {name: PAGED_TILE_SHAPES[name].read(doc, value) for name, value in keys.items()}
    found = {name: value for name, value in values.items() if value is not None}
    return PagedTileConfig(**found) if len(doc.problems) == before else None


def _check_complete(doc: Document, item: Item, arch: ArchSpec) -> None:
    """Every head_dim but wide ones needs a config for both element sizes; a config with a problem counts as present."""
    if doc.has_problem_in(item):
        return
    for prefix, configs in (("", arch.half), (f"{FLOAT32}.", arch.float32)):
        for p in Pass:
            largest = max(configs.get(p, {}), default=None)
            if largest is None or largest < NARROW_HEAD_DIM:
                got = "none" if largest is None else f"{largest} as the largest"
                message = (
                    f"needs a config for head_dim {NARROW_HEAD_DIM}, up to which every chip serves calls, got {got}"
                )
                doc.note_below(item, prefix + p.value, message)
