"""Tiles and thresholds as the text of `_runtime/archs.py`: every tile is a named record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields

from codegen.arch.hopper import HopperFamily
from codegen.arch.paged import PagedPass
from codegen.arch.tile_rules import TileConfig
from codegen.spec.model import ArchSpec, PassConfigs

Passes = Sequence[tuple[str, Sequence[tuple[int, str]]]]
"""Pass -> largest head_dim served -> source of the tile."""


@dataclass(frozen=True, kw_only=True)
class ArchTable:
    """The default tiles of one architecture; `short` maps the longest sequence served to its tiles."""

    name: str
    half: Passes
    float32: Passes
    short: Sequence[tuple[int, Passes]]
    paged_half: Passes
    paged_float32: Passes


def arch_tables(archs: Mapping[str, ArchSpec]) -> list[ArchTable]:
    """Default tiles by architecture, in a fixed order."""
    return [_arch_table(arch) for _, arch in sorted(archs.items())]


def _arch_table(arch: ArchSpec) -> ArchTable:
    def passes(configs: PassConfigs) -> Passes:
        return [
            (each.value, [(head_dim, tile_source("Tile", tile)) for head_dim, tile in sorted(by_dim.items())])
            for each, by_dim in sorted(configs.items())
        ]

    short = [(length, passes(configs)) for length, configs in sorted(arch.short.items())]
    return ArchTable(
        name=arch.name,
        half=passes(arch.half),
        float32=passes(arch.float32),
        short=short,
        paged_half=_paged(arch, 2),
        paged_float32=_paged(arch, 4),
    )


def _paged(arch: ArchSpec, itemsize: int) -> Passes:
    return [
        (
            each.value,
            [(most, tile_source("PagedTile", tile)) for most, tile in arch.paged_tiles(each, itemsize).items()],
        )
        for each in PagedPass
    ]


def hopper_fields(family: HopperFamily) -> list[tuple[str, str]]:
    """The fields of the runtime's `HopperFamily`, each with the source of its value."""
    return [(field.name, _source(getattr(family, field.name))) for field in fields(family)]


def tile_source(record: str, tile: TileConfig) -> str:
    """A tile as source.

    >>> tile_source("Tile", TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=2))
    'Tile(block_m=64, block_n=32, num_warps=4, num_stages=2)'
    """
    named = zip((field.name for field in fields(tile)), astuple(tile), strict=True)
    return f"{record}({', '.join(f'{name}={value}' for name, value in named)})"


def _source(value: object) -> str:
    if isinstance(value, TileConfig):
        return tile_source("HopperTile", value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_source(key)}: {_source(each)}' for key, each in value.items())}}}"
    return f'"{value}"' if isinstance(value, str) else repr(value)
