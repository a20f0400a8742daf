"""Python's functions of lists whose items are known, such as `range(3)` and `zip(masks, sizes)`."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from codegen.port.values import Constant, Several, Value

MOST_ITEMS = 64
"""Longest list that a loop goes through: each round makes the expression longer."""

UNKNOWN_LIST = "a loop over a list that this file does not write out; write its steps one after the other"

SEQUENCES = ("range", "enumerate", "zip", "reversed", "list", "tuple", "len")


def sequence(name: str, arguments: Sequence[Value]) -> Value | None:
    """The result of one of `SEQUENCES`; None if that is not known.

    >>> sequence("range", [Constant(2)])
    Several(items=(Constant(value=0, default_of='', not_given=''), Constant(value=1, default_of='', not_given='')))
    """
    if name == "range":
        numbers = [value.value for value in arguments if isinstance(value, Constant)]
        if not 1 <= len(numbers) == len(arguments) <= 3:
            return None
        try:
            places = range(*map(operator.index, numbers))  # type: ignore[arg-type]  # TypeError for any other value
        except (TypeError, ValueError):
            return None
        return Several(tuple(map(Constant, places))) if len(places) <= MOST_ITEMS else None
    lists = [value.items for value in arguments if isinstance(value, Several)]
    if not 1 <= len(lists) == len(arguments):
        return None
    if name == "zip":
        return Several(tuple(map(Several, zip(*lists, strict=False))))
    if len(lists) > 1:
        return None
    (items,) = lists
    made: dict[str, Value] = {
        "enumerate": Several(tuple(Several((Constant(place), item)) for place, item in enumerate(items))),
        "reversed": Several(items[::-1]),
        "list": Several(items),
        "tuple": Several(items),
        "len": Constant(len(items)),
    }
    return made.get(name)
