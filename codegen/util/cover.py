"""Selects a small part of a product that still has every feature of the whole, such as every pair of values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence, Set


def cover(features: Sequence[Set[Hashable]], groups: Sequence[Hashable]) -> list[int]:
    """Positions of items that together have every feature that any item has, by a greedy search.

    Each step takes the item with the most features that no item before it has; among equal ones, an item of the group
    that was chosen least often, then the first. The same items give the same positions.

    >>> cover([{1, 2}, {2, 3}, {3}, {1, 3}], ["a", "a", "b", "b"])
    [0, 2]
    """
    missing: set[Hashable] = set().union(*features)
    left, chosen = list(range(len(features))), []
    uses: Counter[Hashable] = Counter()
    while missing:
        best = max(left, key=lambda i: (len(features[i] & missing), -uses[groups[i]], -i))
        left.remove(best)
        chosen.append(best)
        missing -= features[best]
        uses[groups[best]] += 1
    return sorted(chosen)
