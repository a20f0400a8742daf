"""Default tiles as the generated package has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from codegen.spec.model import ArchSpec, PassConfigs

Rows = Sequence[tuple[str, Sequence[tuple[int, int, int, int, int]]]]
"""Pass -> rows."""


@dataclass(frozen=True, kw_only=True)
class ArchTable:
    """One architecture's default tiles as rows of `(largest head_dim, block_m, block_n, num_warps, num_stages)`.

    `short`: of sequences up to a length.
    """

    name: str
    half: Rows
    float32: Rows
    short: Sequence[tuple[int, Rows]]


def arch_tables(archs: Mapping[str, ArchSpec]) -> list[ArchTable]:
    """Default tiles by architecture, in a fixed order."""
    return [_arch_table(arch) for _, arch in sorted(archs.items())]


def _arch_table(arch: ArchSpec) -> ArchTable:
    def rows(configs: PassConfigs) -> Rows:
        return [
            (p.value, [(d, c.block_m, c.block_n, c.num_warps, c.num_stages) for d, c in sorted(by_dim.items())])
            for p, by_dim in sorted(configs.items())
        ]

    short = [(length, rows(configs)) for length, configs in sorted(arch.short.items())]
    return ArchTable(name=arch.name, half=rows(arch.half), float32=rows(arch.float32), short=short)
