"""Good tiles known before a kernel is measured: winners of other kernels, dtypes and GPUs of the same chip."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from codegen.arch.tile_rules import TileConfig
from codegen.tune.record import Group


class Priors:
    """Winning tiles, counted by the kernels that they won for."""

    def __init__(self) -> None:
        self._wins: dict[tuple[str, int], Counter[tuple[str, TileConfig]]] = {}

    @classmethod
    def read(cls, tuned: Path, arch: str) -> Priors:
        """The winners in every tuned file of an architecture; unreadable files are skipped."""
        priors = cls()
        for path in sorted(tuned.glob("*/*.json")):
            with suppress(OSError, ValueError, KeyError, TypeError):
                document = json.loads(path.read_text(encoding="utf-8"))
                if document["arch"] == arch:
                    for row in document["entries"]:
                        tile = TileConfig(**row["config"])
                        priors._add(row["pass"], row["head_dim"], document["variant"], tile)
        return priors

    def _add(self, pass_name: str, head_dim: int, variant: str, tile: TileConfig) -> None:
        self._wins.setdefault((pass_name, head_dim), Counter())[variant, tile] += 1

    def add(self, group: Group, tile: TileConfig) -> None:
        """Record that a tile won one of a group's workloads."""
        self._add(str(group.pass_), group.head_dim, group.variant, tile)

    def knows(self, group: Group) -> bool:
        """True if a group's variant was tuned before, in any dtype or on any GPU of the chip."""
        wins = self._wins.get((str(group.pass_), group.head_dim), Counter())
        return any(variant == group.variant for variant, _ in wins)

    def of(self, group: Group) -> Iterator[TileConfig]:
        """Tiles for a group: the variant's own winners first, then those that won most often for others."""
        wins = self._wins.get((str(group.pass_), group.head_dim), Counter())
        own: Counter[TileConfig] = Counter()
        others: Counter[TileConfig] = Counter()
        for (variant, tile), count in wins.items():
            (own if variant == group.variant else others)[tile] += count
        for counter in (own, others):
            yield from (tile for tile, _ in counter.most_common())
