"""A YAML file as typed values that know their line, and the list of problems met while reading them.

Readers never raise: a value of the wrong kind is noted as a problem and read as None (or as an empty collection), so
that one run reports everything. Only a file that is no YAML at all ends the reading at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml

from codegen.load.yaml_errors import explain
from codegen.util.errors import Problem, SpecError, did_you_mean

_TAG = "tag:yaml.org,2002:"
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_NOUNS = {"int": "integer", "float": "number", "bool": "boolean", "str": "text", "timestamp": "date"}


@dataclass(frozen=True, kw_only=True)
class Item:
    """A value of the file: its dotted path, its line (from 1) and its node."""

    where: str
    line: int
    node: yaml.Node

    @property
    def kind(self) -> str:
        """`mapping`, `list`, or the type YAML resolved a scalar to: `str int float bool null ...`."""
        if isinstance(self.node, yaml.MappingNode):
            return "mapping"
        if isinstance(self.node, yaml.SequenceNode):
            return "list"
        return str(self.node.tag).removeprefix(_TAG)

    @property
    def got(self) -> str:
        """The value in words, for the `got ...` of an error message."""
        if self.kind in ("mapping", "list"):
            return f"a {self.kind}"
        if self.kind == "null":
            return "nothing"
        shown = self.node.value if self.kind in ("int", "float", "bool") else repr(self.node.value)
        return f"the {_NOUNS.get(self.kind, f'tag {self.kind}')} {shown}"


@lru_cache(maxsize=8)
def _composed(text: str) -> yaml.Node | None:
    """The nodes of a text, which nobody changes. Every spec file inherits from the library's, which is long."""
    node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    return node


class Document:
    """One YAML file and the problems found in it so far."""

    def __init__(self, file: str, text: str | None = None) -> None:
        """`text` is the content of the file, if it is not to be read from the disk."""
        self.file = file
        self.problems: list[Problem] = []
        self._with_problems: set[str] = set()
        self._lines: dict[str, int] = {}
        text = self._text() if text is None else text
        self._raw = text.splitlines(keepends=True)
        self.root = Item(where="", line=1, node=self._compose(text))

    # ------------------------------------------------------------------------------------------------------ problems

    def note(self, item: Item, message: str) -> None:
        """Record that `item` breaks a rule."""
        self.note_at(item.line, item.where, message)

    def note_at(self, line: int, where: str, message: str) -> None:
        self.problems.append(Problem(file=self.file, line=line, where=where, message=message))
        while where:
            self._with_problems.add(where)
            where = where.rpartition(".")[0]

    def note_below(self, item: Item, path: str, message: str) -> None:
        """Record a problem of `item`'s descendant `path`, at the line of its nearest ancestor that the file has."""
        where = f"{item.where}.{path}" if path else item.where
        known = where
        while known not in self._lines:
            known = known.rpartition(".")[0]
        self.note_at(self._lines[known], where, message)

    def note_in(self, item: Item, column: int, message: str) -> None:
        """Record a problem in a text that may run over several lines, at the line of its column (from 1).

        Columns count in the text joined to one line, which differs from the file only in white space.
        """
        line, rest = item.line, 0
        content: Iterable[tuple[int, str]] = ()
        if isinstance(item.node, yaml.ScalarNode):
            rest = len("".join(" ".join(item.node.value.split())[: column - 1].split()))
            content = self._content(item.node)
        for number, raw in content:
            line, rest = number, rest - len("".join(raw.split()))
            if rest < 0:
                break
        self.note_at(line, item.where, message)

    def _content(self, node: yaml.ScalarNode) -> Iterator[tuple[int, str]]:
        """The lines of the file that hold the text of a scalar, with their numbers from 1."""
        start, end = node.start_mark, node.end_mark
        # A block begins below its `>` or `|`, a quoted text behind its quote.
        first, skipped = (
            (start.line + 1, 0) if node.style in (">", "|") else (start.line, start.column + bool(node.style))
        )
        for line in range(first, min(end.line + 1, len(self._raw))):
            raw = self._raw[line][: end.column if line == end.line else None]
            yield line + 1, raw[skipped:] if line == first else raw

    def has_problem_in(self, item: Item) -> bool:
        """Whether a problem of `item` or of anything below it is known."""
        return item.where in self._with_problems

    def _fatal(self, line: int, message: str) -> SpecError:
        return SpecError([Problem(file=self.file, line=line, where="", message=message)])

    # ------------------------------------------------------------------------------------------------- text to nodes

    def _text(self) -> str:
        try:
            raw = Path(self.file).read_bytes()
        except FileNotFoundError:
            raise self._fatal(1, "there is no such file") from None
        except IsADirectoryError:
            raise self._fatal(1, "this is a directory; give the path of a YAML file") from None
        except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
            reason = error.strerror if isinstance(error, OSError) else error
            raise self._fatal(1, f"the file cannot be read: {reason}") from None
        try:
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            raise self._fatal(
                line, f"the file must be UTF-8 text, got the byte 0x{raw[error.start]:02x}; save it as UTF-8"
            ) from None

    def _compose(self, text: str) -> yaml.Node:
        try:
            node = _composed(text)
        except yaml.MarkedYAMLError as error:
            raise self._fatal(*explain(error, text)) from None
        except yaml.YAMLError as error:
            raise self._fatal(1, f"not valid YAML: {str(error).splitlines()[0]}") from None
        except RecursionError:
            raise self._fatal(1, "not valid YAML: nested too deeply") from None
        except (ValueError, OverflowError):  # PyYAML does not guard chr() of an escape such as "\\UFFFFFFFF"
            raise self._fatal(1, "not valid YAML: an escape sequence names no character") from None
        if node is None:
            raise self._fatal(1, "the file is empty; it needs at least 'variants:'")
        problems = [self._unprintable(line, character) for line, character in _unprintable(node)]
        if problems:
            raise SpecError(problems)
        return node

    def _unprintable(self, line: int, character: str) -> Problem:
        kind = "half of a surrogate pair" if 0xD800 <= ord(character) < 0xE000 else "a control character"
        message = f"a text cannot hold {character!a}, {kind}; write the character that is meant, or remove it"
        return Problem(file=self.file, line=line, where="", message=message)

    # --------------------------------------------------------------------------------------------------- collections

    def entries(self, item: Item) -> list[tuple[Item, Item]]:
        """Keys and values of a mapping in file order, the keys plain scalars; nothing (null) is an empty mapping."""
        if item.kind == "null":
            return []
        if item.kind != "mapping":
            self.note(item, f"must be a mapping, got {item.got}")
            return []
        self._check_tag(item, "map")
        return [self._entry(item, key, value) for key, value in item.node.value if self._is_key(item, key)]

    def _check_tag(self, item: Item, usual: str) -> None:
        """Refuse a tag in front of a mapping or a list, which would have no effect."""
        if item.node.tag != _TAG + usual:
            self.note(item, f"must be a {item.kind} without a tag, got the tag {item.node.tag.replace(_TAG, '!!')}")

    def _is_key(self, item: Item, node: yaml.Node) -> bool:
        key = Item(where=item.where, line=_line(node), node=node)
        if not isinstance(node, yaml.ScalarNode):
            self.note(key, f"a key must be text, got {key.got}; quote it if it holds braces or brackets")
        elif node.tag == _TAG + "merge":
            self.note(key, "merge keys ('<<') are not read; write the entries out, or alias whole values")
        else:
            return True
        return False

    def _entry(self, item: Item, key: yaml.Node, value: yaml.Node) -> tuple[Item, Item]:
        segment = key.value if key.value.isprintable() else repr(key.value)
        where = f"{item.where}.{segment}" if item.where else segment
        line = _line(value) if isinstance(value, yaml.ScalarNode) else _line(key)
        self._lines.setdefault(where, line)
        return Item(where=where, line=_line(key), node=key), Item(where=where, line=line, node=value)

    def mapping(
        self,
        item: Item,
        keys: Collection[str] | None = None,
        noun: str = "key",
        remedies: Mapping[str, str] | None = None,
    ) -> dict[str, Item]:
        """A mapping with text keys, only those of `keys` if given. A key met twice counts once.

        `remedies` says for keys of other libraries what to write in their place, as the tail of a message.
        """
        found: dict[str, Item] = {}
        first: dict[str, int] = {}
        for key, value in self.entries(item):
            name = self.text(key, "a key must be text")
            if name is None:
                continue
            if name in found:
                self.note(key, f"duplicate {noun} '{name}', first given in line {first[name]}")
            elif keys is not None and name not in keys:
                hint = (remedies or {}).get(name) or did_you_mean(name, keys) or f"; expected one of {' '.join(keys)}"
                if any(bracket in name for bracket in "()[]"):
                    hint = "; quote an expression that holds any of , : [ ] { }"
                self.note(key, f"unknown {noun} {name!r}{hint}")
            else:
                found[name], first[name] = value, key.line
        return found

    def sequence(self, item: Item) -> list[Item]:
        """The elements of a list."""
        if item.kind != "list":
            self.note(item, f"must be a list, got {item.got}")
            return []
        self._check_tag(item, "seq")
        return [Item(where=f"{item.where}[{n}]", line=_line(node), node=node) for n, node in enumerate(item.node.value)]

    # ------------------------------------------------------------------------------------------------------- scalars

    def text(self, item: Item, rule: str = "must be text") -> str | None:
        if item.kind == "str":
            return str(item.node.value)
        quote = "; quote it to make it text" if item.kind in ("int", "float", "bool", "timestamp") else ""
        self.note(item, f"{rule}, got {item.got}{quote}")
        return None

    def integer(self, item: Item) -> int | None:
        value = _constructed(item.node) if item.kind == "int" else None
        if isinstance(value, int):
            return value
        self.note(item, f"must be an integer, got {item.got}")
        return None

    def number(self, item: Item) -> float | None:
        """A finite number. YAML 1.1 takes `1e-3` for text; here it is the number it looks like."""
        value = _constructed(item.node) if item.kind in ("int", "float") else None
        node = item.node
        if isinstance(node, yaml.ScalarNode) and node.style is None and _EXPONENT.fullmatch(node.value):
            value = float(node.value)
        if isinstance(value, (int, float)) and math.isfinite(value):
            return float(value)
        self.note(item, f"must be a finite number, got {item.got}")
        return None

    def boolean(self, item: Item) -> bool | None:
        value = _constructed(item.node) if item.kind == "bool" else None
        if isinstance(value, bool):
            return value
        self.note(item, f"must be true or false, got {item.got}")
        return None

    def choice(self, item: Item, options: Sequence[str]) -> str | None:
        if item.kind == "str" and item.node.value in options:
            return str(item.node.value)
        hint = did_you_mean(item.node.value, options) if item.kind == "str" else ""
        self.note(item, f"must be one of {' '.join(options)}, got {item.got}{hint}")
        return None


def one_line(item: Item, leave_out: Iterable[str] = ()) -> str:
    """A mapping in flow style on one line, without the keys of `leave_out`."""
    if item.kind != "mapping":
        return "{}"
    dropped = frozenset(leave_out)
    kept = [(_folded(key), _folded(value)) for key, value in item.node.value if key.value not in dropped]
    node = yaml.MappingNode(item.node.tag, kept, flow_style=True)
    return str(yaml.serialize(node, Dumper=yaml.SafeDumper, width=10**9, allow_unicode=True)).strip()


def _folded(node: yaml.Node) -> yaml.Node:
    """A copy of the node in flow style, its text on one line, sharing nothing (a shared node would print an alias)."""
    if isinstance(node, yaml.MappingNode):
        pairs = [(_folded(key), _folded(value)) for key, value in node.value]
        return yaml.MappingNode(node.tag, pairs, flow_style=True)
    if isinstance(node, yaml.SequenceNode):
        return yaml.SequenceNode(node.tag, [_folded(element) for element in node.value], flow_style=True)
    return yaml.ScalarNode(node.tag, " ".join(node.value.split()))


def _constructed(node: yaml.Node) -> object:
    """The Python value of a scalar, None if its text does not fit its tag (`!!int x`)."""
    try:
        return yaml.constructor.SafeConstructor().construct_object(node)
    except (ValueError, KeyError):
        return None


_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff]")


def _unprintable(root: yaml.Node) -> Iterator[tuple[int, str]]:
    """Line and character, one for each scalar with a character that no file can hold: escapes make such text."""
    stack, seen = [root], set()
    while stack:
        node = stack.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.ScalarNode):
            found = _UNPRINTABLE.search(node.value)
            if found:
                yield _line(node), found[0]
        elif isinstance(node, yaml.MappingNode):
            stack += [part for pair in node.value for part in pair]
        else:
            stack += node.value


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
