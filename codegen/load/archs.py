"""Readers of `defaults:` and `archs:`, which override the inherited values entry by entry."""

from __future__ import annotations

from collections.abc import Mapping

from codegen.arch.tile_rules import MAX_HEAD_DIM, TileConfig
from codegen.load.grammar import (
    ARCH,
    ARCH_TABLE,
    DEFAULT_DTYPES,
    DEFAULT_HEAD_DIMS,
    DEFAULTS,
    FLOAT32,
    PASS_TABLES,
    PASSES,
    SHORT,
    SHORT_KEY,
    TILE,
    TILE_SHAPES,
)
from codegen.load.shapes import NumberedTable
from codegen.load.yaml_tree import Document, Item
from codegen.spec.model import ArchSpec, Defaults, Pass, PassConfigs


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
        half = _read_passes(doc, keys, base.half)
        float32 = _read_passes(doc, PASSES.items(doc, single), base.float32) if single else base.float32
        short = _read_short(doc, brief, base.short) if brief else base.short
        archs[name] = ArchSpec(name=name, half=half, float32=float32, short=short)
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
        merged = {**configs.get(Pass(name), {}), **_read_pass(doc, PASS_TABLES[name], item)}
        configs[Pass(name)] = dict(sorted(merged.items()))
    return configs


def _read_pass(doc: Document, table: NumberedTable, item: Item) -> dict[int, TileConfig]:
    """`head_dim: config` entries of one pass; a config with problems is left out."""
    found: dict[int, TileConfig] = {}
    seen: set[int] = set()
    for key, head_dim, value in table.items(doc, item):
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
    keys = TILE.items(doc, item)
    values = {name: TILE_SHAPES[name].read(doc, value) for name, value in keys.items()}
    found = {name: value for name, value in values.items() if value is not None}
    return TileConfig(**found) if len(doc.problems) == before else None


def _check_complete(doc: Document, item: Item, arch: ArchSpec) -> None:
    """Every head_dim needs a config for both element sizes; a config with a problem of its own counts as present."""
    if doc.has_problem_in(item):
        return
    for prefix, configs in (("", arch.half), (f"{FLOAT32}.", arch.float32)):
        for p in Pass:
            largest = max(configs.get(p, {}), default=None)
            if largest is None or largest < MAX_HEAD_DIM:
                got = "none" if largest is None else f"{largest} as the largest"
                message = f"needs a config for head_dim {MAX_HEAD_DIM}, which serves all larger ones, got {got}"
                doc.note_below(item, prefix + p.value, message)
