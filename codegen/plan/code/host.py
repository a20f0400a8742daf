"""Python source that launches hold, with the names that it reads, which can be listed and replaced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass


@dataclass(frozen=True)
class HostCode:
    """Source with a hole `{}` in `form` for each of the `holes`, the names of variables and functions.

    `others`: further names that the form reads, if a printer of expressions made a part of it.

    >>> strides = host("*{}.stride()[:3]", "q")
    >>> strides.text, strides.renamed({"q": "k"}).text
    ('*q.stride()[:3]', '*k.stride()[:3]')
    """

    form: str
    holes: tuple[str, ...] = ()
    others: frozenset[str] = frozenset()

    @property
    def text(self) -> str:
        """The source."""
        return self.form.format(*self.holes)

    @property
    def names(self) -> frozenset[str]:
        """The variables and functions that it reads."""
        return self.others.union(self.holes)

    def renamed(self, names: Mapping[str, str]) -> HostCode:
        """The source with other names in some of the holes."""
        return HostCode(self.form, tuple(names.get(name, name) for name in self.holes), self.others)

    def calling(self, *functions: str) -> HostCode:
        """The source with functions that its form calls added to `others`."""
        return HostCode(self.form, self.holes, self.others.union(functions))

    def __str__(self) -> str:
        return self.text


NONE = HostCode("")


def host(form: str, *parts: HostCode | str) -> HostCode:
    """Source with a hole `{}` for each part: the name of a variable or function, or source itself.

    >>> host("{}({}, 1)", "f", host("{} + {}", "a", "b"))
    HostCode(form='{}({} + {}, 1)', holes=('f', 'a', 'b'), others=frozenset())
    """
    pieces = [part if isinstance(part, HostCode) else HostCode("{}", (part,)) for part in parts]
    return HostCode(
        form.format(*(piece.form for piece in pieces)),
        tuple(name for piece in pieces for name in piece.holes),
        frozenset().union(*(piece.others for piece in pieces)),
    )


def printed(text: str, reads: Set[str]) -> HostCode:
    """Source that a printer of expressions made, and the names that it reads."""
    return HostCode(text, others=frozenset(reads))


def listed(parts: Iterable[HostCode | str]) -> HostCode:
    """Names or pieces of source, separated by commas.

    >>> listed(["q", "k"]).text
    'q, k'
    """
    return joined(", ", parts)


def joined(separator: str, parts: Iterable[HostCode | str]) -> HostCode:
    """Names or pieces of source with a separator, such as an operator, in between."""
    found = list(parts)
    return host(separator.join("{}" for _ in found), *found)


def sum_of_scalars(factors: Mapping[str, int], number: int = 0) -> HostCode:
    """A number plus scalars times their factors.

    >>> sum_of_scalars({"before": 1, "after": 2}, 1).text
    'before + 2 * after + 1'
    """
    terms = [host("{}", name) if factor == 1 else host(f"{factor} * {{}}", name) for name, factor in factors.items()]
    return joined(" + ", [*terms, *([HostCode(str(number))] if number or not terms else [])])


def names_of(parts: Iterable[HostCode]) -> frozenset[str]:
    """The names that pieces of source read."""
    return frozenset().union(*(part.names for part in parts))
