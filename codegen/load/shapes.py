"""The kinds of value that a spec file is made of. Each both reads a value and states its rule as JSON Schema.

`codegen.load.grammar` says which kind stands where.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from codegen.arch.tile_rules import TILE_FIELDS, tile_problems
from codegen.load.yaml_tree import Document, Item
from codegen.spec.names import IDENTIFIER

Schema = dict[str, Any]  # a JSON document

T = TypeVar("T", str, int, covariant=True)


@dataclass(frozen=True, kw_only=True)
class Shape(ABC):
    """The rule for the value at one place of a spec file."""

    description: str = ""

    def schema(self) -> Schema:
        """The shape as JSON Schema 2020-12."""
        return {**({"description": self.description} if self.description else {}), **self._rules()}

    @abstractmethod
    def _rules(self) -> Schema: ...


class Value(Shape, Generic[T]):
    """A shape that is read to one Python value."""

    @abstractmethod
    def read(self, doc: Document, item: Item) -> T | None:
        """The value; None if it breaks the rule, which `doc` then notes as a problem."""


# -------------------------------------------------------------------------------------------------------------- scalars


@dataclass(frozen=True, kw_only=True)
class Flag(Shape):
    """True or false; false when left out."""

    def read(self, doc: Document, item: Item) -> bool:
        return doc.boolean(item) is True

    def _rules(self) -> Schema:
        return {"type": "boolean", "default": False}


@dataclass(frozen=True, kw_only=True)
class Text(Value[str]):
    """Text of at most `longest` characters."""

    longest: int

    def read(self, doc: Document, item: Item) -> str | None:
        text = doc.text(item)
        if text is not None and len(text) > self.longest:
            doc.note(
                item, f"must have at most {self.longest} characters, got {len(text)}; move the rest into a YAML comment"
            )
            return None
        return text

    def _rules(self) -> Schema:
        return {"type": "string", "maxLength": self.longest}


@dataclass(frozen=True, kw_only=True)
class Expression(Value[str]):
    """The text of an expression, which `codegen.ir.parse` reads."""

    def read(self, doc: Document, item: Item) -> str | None:
        text = doc.text(item, "an expression must be text")
        if text is not None and not text.strip():
            doc.note(item, "an expression must not be empty; leave the key out instead")
            return None
        return text

    def _rules(self) -> Schema:
        return {"type": "string", "minLength": 1}


@dataclass(frozen=True, kw_only=True)
class Choice(Value[str]):
    """One of some words."""

    options: Sequence[str]
    default: str | None = None

    def read(self, doc: Document, item: Item) -> str | None:
        return doc.choice(item, self.options)

    def _rules(self) -> Schema:
        return {"enum": list(self.options), **({} if self.default is None else {"default": self.default})}


@dataclass(frozen=True, kw_only=True)
class Integer(Value[int]):
    """An integer from `low` to `high`; `rule` says so in an error message."""

    rule: str
    low: int
    high: int | None = None

    def read(self, doc: Document, item: Item) -> int | None:
        value = doc.integer(item)
        if value is None or (self.low <= value and (self.high is None or value <= self.high)):
            return value
        doc.note(item, f"{self.rule}, got {value}")
        return None

    def _rules(self) -> Schema:
        limits = {"minimum": self.low, "maximum": self.high}
        return {"type": "integer", **{name: limit for name, limit in limits.items() if limit is not None}}

    @property
    def pattern(self) -> str:
        """The integers as a regular expression: JSON has only text for keys."""
        if self.high is not None:
            return f"^({_digits(self.low, self.high)})$"
        assert self.low == 1
        return r"^[1-9]\d*$"


def _digits(low: int, high: int) -> str:
    """A regular expression for the decimal integers from `low` to `high`.

    >>> _digits(8, 256)
    '[8-9]|([1-9]|1[0-9]|2[0-4])[0-9]|25[0-6]'
    """
    first, last = low // 10, high // 10
    if low == high:
        return str(low)
    if first == last:
        return f"{first or ''}[{low % 10}-{high % 10}]"
    parts = []
    if low % 10 or not first:  # a leading digit is no 0
        parts.append(_digits(low, 10 * first + 9))
        first += 1
    end = [] if high % 10 == 9 else [_digits(10 * last, high)]
    last -= len(end)
    if first <= last:
        leading = _digits(first, last)
        parts.append(f"({leading})[0-9]" if "|" in leading else f"{leading}[0-9]")
    return "|".join(parts + end)


@dataclass(frozen=True, kw_only=True)
class TileField(Value[int]):
    """A field of a tile config, of the values that `codegen.arch.tile_rules` allows."""

    name: str

    def read(self, doc: Document, item: Item) -> int | None:
        value = doc.integer(item)
        problems = [] if value is None else tile_problems({self.name: value})
        for _, message in problems:
            doc.note(item, message)
        return None if problems else value

    def _rules(self) -> Schema:
        return {"enum": list(TILE_FIELDS[self.name])}


@dataclass(frozen=True, kw_only=True)
class Number(Shape):
    """A finite number."""

    def read(self, doc: Document, item: Item) -> float | None:
        return doc.number(item)

    def _rules(self) -> Schema:
        return {"type": "number"}


# ---------------------------------------------------------------------------------------------------------- collections


@dataclass(frozen=True, kw_only=True)
class Record(Shape):
    """A mapping with fixed keys.

    `noun` is the word for a key in error messages. `missing` is the message for absent required keys, which it may name
    as `{names}`. `remedies` says for unknown keys what to write, as the tail of a message.
    """

    fields: Mapping[str, Shape]
    noun: str = "key"
    required: Sequence[str] = ()
    missing: str = ""
    may_be_empty: bool = False
    remedies: Mapping[str, str] = field(default_factory=dict)

    def items(self, doc: Document, item: Item) -> dict[str, Item]:
        """The entries by key. Absent keys are not reported beside an unknown key, which may be a misspelling of one."""
        before = len(doc.problems)
        found = doc.mapping(item, tuple(self.fields), self.noun, self.remedies)
        absent = [name for name in self.required if name not in found]
        if absent and len(doc.problems) == before:
            doc.note(item, self.missing.format(names=" ".join(absent)))
        return found

    def _rules(self) -> Schema:
        return {
            "type": ["object", "null"] if self.may_be_empty else "object",
            "properties": {name: shape.schema() for name, shape in self.fields.items()},
            "additionalProperties": False,
            **({"required": list(self.required)} if self.required else {}),
        }


@dataclass(frozen=True, kw_only=True)
class Table(Shape):
    """A mapping with keys of the user's choice that match `pattern`."""

    value: Shape
    pattern: str = f"^{IDENTIFIER}$"
    noun: str = "key"
    may_be_empty: bool = True

    def items(self, doc: Document, item: Item) -> dict[str, Item]:
        """The entries by name."""
        return doc.mapping(item, noun=self.noun)

    def _rules(self) -> Schema:
        return _mapping(self.pattern, self.value, self.may_be_empty)


@dataclass(frozen=True, kw_only=True)
class NumberedTable(Shape):
    """A mapping whose keys are integers."""

    key: Integer
    value: Shape
    may_be_empty: bool = True

    def items(self, doc: Document, item: Item) -> Iterator[tuple[Item, int | None, Item]]:
        """Each key, its integer (None if it breaks the rule), and its value."""
        for key, value in doc.entries(item):
            yield key, self.key.read(doc, key), value

    def _rules(self) -> Schema:
        return _mapping(self.key.pattern, self.value, self.may_be_empty)


def _mapping(pattern: str, value: Shape, may_be_empty: bool) -> Schema:
    return {
        "type": ["object", "null"] if may_be_empty else "object",
        "patternProperties": {pattern: value.schema()},
        "additionalProperties": False,
        **({} if may_be_empty else {"minProperties": 1}),
    }


@dataclass(frozen=True, kw_only=True)
class UniqueList(Shape, Generic[T]):
    """A list of at least one value, each given once."""

    element: Value[T]

    def read(self, doc: Document, item: Item) -> tuple[T, ...]:
        before = len(doc.problems)
        values: list[T] = []
        for element in doc.sequence(item):
            value = self.element.read(doc, element)
            if value is not None and value in values:
                doc.note(element, f"each value is given once, got {value} again")
            elif value is not None:
                values.append(value)
        if not values and len(doc.problems) == before:
            doc.note(item, "must name at least one value, got an empty list; leave the key out for the library's")
        return tuple(values)

    def _rules(self) -> Schema:
        return {"type": "array", "items": self.element.schema(), "minItems": 1, "uniqueItems": True}


@dataclass(frozen=True, kw_only=True)
class ListOf(Shape):
    """A list."""

    element: Shape

    def items(self, doc: Document, item: Item) -> list[Item]:
        return doc.sequence(item)

    def _rules(self) -> Schema:
        return {"type": "array", "items": self.element.schema()}


# ------------------------------------------------------------------------------------------------- of the schema alone


@dataclass(frozen=True, kw_only=True)
class AnyOf(Shape):
    """One of several shapes. The reader of the place chooses one by the kind of the YAML node."""

    options: Sequence[Shape]

    def _rules(self) -> Schema:
        return {"anyOf": [option.schema() for option in self.options]}


@dataclass(frozen=True, kw_only=True)
class Reference(Shape):
    """A shape that the schema states at this path below `$defs`."""

    path: str

    def _rules(self) -> Schema:
        return {"$ref": f"#/$defs/{self.path}"}
