"""Which pages of a cache belong to which sequence."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from .checks import check_int, fail


class Pool:
    """A free list of pages, on the host: for tests, demos and small servers.

    Args:
        pages: the number of pages.
        page_size: tokens of a page.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = check_int("Pool", "page_size", page_size, 1)
        self._free = list(range(check_int("Pool", "pages", pages, 1) - 1, -1, -1))
        self._pages: dict[Hashable, list[int]] = {}
        self._lengths: dict[Hashable, int] = {}
        self._users: dict[int, int] = {}  # Page -> how many sequences have it.

    @property
    def free_pages(self) -> int:
        """The number of pages that belong to no sequence."""
        return len(self._free)

    def extend(self, sequence: Hashable, tokens: int) -> list[int]:
        """Reserve room for `tokens` more tokens of a sequence, which may be new. Returns their slots.

        Raises MemoryError if too few pages are free; then nothing has changed.
        """
        count = check_int("Pool.extend", "tokens", tokens, 0)
        begin = self._lengths.get(sequence, 0)
        pages = self._pages.get(sequence, [])
        wanted = -(-(begin + count) // self.page_size) - len(pages)
        pages = [*pages, *self._taken("extend", sequence, wanted)]
        self._pages[sequence], self._lengths[sequence] = pages, begin + count
        size = self.page_size
        return [pages[at // size] * size + at % size for at in range(begin, begin + count)]

    def fork(self, source: Hashable, sequence: Hashable) -> list[tuple[int, int]]:
        """Make a new sequence that begins with all tokens of `source`, and shares its pages.

        Returns pairs of pages, from and to, that the caller must copy in each cache: at most one pair. A page that has
        room left is not shared, because both sequences will write to it.

        Raises KeyError if there is no `source`, ArgumentError if there is a `sequence`, MemoryError if no page is free;
        then nothing has changed.
        """
        pages, length = self._pages[source], self._lengths[source]
        if sequence in self._pages:
            fail("Pool.fork", "sequence", "the name of a new sequence", repr(sequence))
        whole = length // self.page_size
        own = self._taken("fork", sequence, len(pages) - whole)
        for page in pages[:whole]:
            self._users[page] += 1
        self._pages[sequence], self._lengths[sequence] = [*pages[:whole], *own], length
        return list(zip(pages[whole:], own, strict=True))

    def truncate(self, sequence: Hashable, length: int) -> list[tuple[int, int]]:
        """Keep the first `length` tokens of a sequence, and return pages that have none of these to the pool.

        Returns pairs of pages, from and to, that the caller must copy in each cache before it writes: at most one pair,
        if another sequence shares the page that then has room.

        Raises KeyError if no sequence has that name, ArgumentError for more tokens than it has, MemoryError if no page
        is free; then nothing has changed.
        """
        have, pages = self._lengths[sequence], self._pages[sequence]
        if check_int("Pool.truncate", "length", length, 0) > have:
            fail("Pool.truncate", "length", f"at most {have}, the tokens of {sequence!r}", length)
        kept = -(-length // self.page_size)
        is_shared = length % self.page_size > 0 and self._users[pages[kept - 1]] > 1
        own = self._taken("truncate", sequence, int(is_shared), pages[kept:])
        shared = pages[kept - len(own) : kept]
        self._release(shared)
        self._pages[sequence], self._lengths[sequence] = [*pages[: kept - len(own)], *own], length
        return list(zip(shared, own, strict=True))

    def free(self, sequence: Hashable) -> None:
        """Return the pages of a sequence that no other one shares. Raises KeyError if no sequence has that name."""
        self._release(self._pages.pop(sequence))
        del self._lengths[sequence]

    def _taken(self, function: str, sequence: Hashable, wanted: int, released: Sequence[int] = ()) -> list[int]:
        """Free pages, which have one user from now on, among them those that a sequence has just released."""
        free = len(self._free) + sum(self._users[page] == 1 for page in released)
        if wanted > free:
            raise MemoryError(f"Pool.{function}: {wanted} pages wanted for {sequence!r}, {free} are free")
        self._release(released)
        pages = [self._free.pop() for _ in range(wanted)]
        self._users |= dict.fromkeys(pages, 1)
        return pages

    def _release(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free.append(page)

    def page_table(self, sequences: Sequence[Hashable], most_pages: int | None = None) -> list[list[int]]:
        """The pages of some sequences, padded with -1 to the longest of these, or to `most_pages`."""
        rows = [self._pages[name] for name in sequences]
        longest = max(map(len, rows), default=0)
        width = longest if most_pages is None else check_int("Pool.page_table", "most_pages", most_pages, longest)
        return [row + [-1] * (width - len(row)) for row in rows]

    def lengths(self, sequences: Sequence[Hashable]) -> list[int]:
        """The numbers of tokens of some sequences."""
        return [self._lengths[name] for name in sequences]
