"""The values of names in a FlexAttention file while it is read."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import TypeGuard

from codegen.ir.expr import INDEX_NAMES, SCORE
from codegen.ir.language import INFINITY

LANGUAGE_NAMES = (*INDEX_NAMES, SCORE, INFINITY)
"""Names in expressions that stand for themselves; a captured value may have the same name in its file."""

SEPARATOR = "\N{MIDDLE DOT}"
"""Separates the words of a key. It may be a part of an identifier, but not of a name in a spec."""


class Kind(Enum):
    """The kind of a number; UNKNOWN if it depends on a tensor or scalar whose dtype is not known yet."""

    INT = "integer"
    FLOAT = "float"
    BOOL = "boolean"
    UNKNOWN = "unknown"


class TranslationError(Exception):
    """A part of the file has no counterpart in the expression language; `node` is None if that was reported before."""

    def __init__(self, node: ast.AST | None, reason: str = "") -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason


class UndecidedError(TranslationError):
    """What the code does depends on a condition whose value is not known. Its branches have been read."""


class ForeignError(TranslationError):
    """The code reads a name of a module whose source the project does not have."""


@dataclass(frozen=True)
class Captured:
    """A name whose value is known only when the program runs: an argument of a factory, `self.bias`, a computed tensor.

    `owner` is the object whose attribute it is: `self.query` of `self.query.weight`. `indices` are the indices of a
    read, `annotation` is the name of its type if the file gives one, `made_by` is the expression that computes it and
    `example` its default value. Of a class, `attributes` are the names of its body. `context` are the arguments of the
    call, and the items of the loops, in which it is computed: in another one the same code may give another value.
    """

    name: str
    owner: str = ""
    indices: tuple[ast.expr, ...] = ()
    annotation: str = ""
    made_by: ast.expr | None = field(default=None, compare=False)
    example: int | float | None = None
    attributes: Scope | None = field(default=None, compare=False)
    context: str = field(default="", compare=False)

    def may_differ(self, other: Captured) -> bool:
        """True if the file computes two values of one name, by other code or of other numbers."""
        made = [value.made_by for value in (self, other) if value.made_by is not None]
        return self.context != other.context or (len(made) == 2 and ast.dump(made[0]) != ast.dump(made[1]))

    @property
    def path(self) -> str:
        """The name as the file writes it: `self.query.weight`."""
        return f"{self.owner}.{self.name}" if self.owner else self.name

    @property
    def key(self) -> str:
        """An identifier for expressions that are being built: only equal paths share it, and no word of the language
        equals it. Entries have the name alone where that is clear."""
        if self.owner or self.name in LANGUAGE_NAMES:
            return SEPARATOR.join((self.name, *self.owner.split(".")))
        return self.name


@dataclass(frozen=True)
class Symbol:
    """An expression of the language. `undecided` are the keys of captured names that an UNKNOWN kind depends on.

    `alias`: the name that it was assigned to outside of a mod. If that name is indexed later, it is taken for a tensor.
    `is_converted`: torch has converted an integer to a float; `node` is still an integer, which the language converts
    beside a float.
    """

    node: ast.expr
    kind: Kind
    undecided: frozenset[str] = frozenset()
    alias: Captured | None = None
    is_converted: bool = False


@dataclass(frozen=True)
class Constant:
    """A value that is known: a number, a boolean, None or a text. `default_of`: the factory's argument that has this
    default, which a call may replace. `not_given`: the argument that a call left out, so that it has this default."""

    value: object
    default_of: str = field(default="", compare=False)
    not_given: str = field(default="", compare=False)


@dataclass(frozen=True)
class Library:
    """An imported module, function or constant, by its full name: `torch.where`.

    `importer` is the file whose project may have the module, None for a module that is never read."""

    path: str
    importer: Path | None = field(default=None, compare=False)

    @property
    def last(self) -> str:
        """The last word of the name."""
        return self.path.rpartition(".")[2]

    @property
    def not_read(self) -> str:
        """Why a name of another module has no value, "" for a library that has no source in a project."""
        module, _, name = self.path.rpartition(".")
        if self.importer is None:
            return ""
        if not module.strip("."):
            return f"no file of module '{self.path}' was found beside this one; copy what is needed into this file"
        return f"no file of module '{module}' was found beside this one; copy '{name}' into this file"


@dataclass(frozen=True)
class Several:
    """A tuple or list of values."""

    items: tuple[Value, ...]


@dataclass(frozen=True)
class Method:
    """A method of a tensor, not yet called."""

    owner: Value
    name: str


@dataclass(frozen=True)
class Undecided:
    """A name that has another value in each branch of an `if` whose condition is not known."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """The value of a name whose assignment could not be translated, which was reported already."""


@dataclass(eq=False)
class Scope:
    """Names and their values; a name that is missing here is looked up in `outer`.

    `rebound`: names that another function assigns, by `global` or `nonlocal`. When that function runs is not known, so
    that these names are captured values.
    """

    outer: Scope | None = None
    names: dict[str, Value] = field(default_factory=dict)
    rebound: frozenset[str] = frozenset()

    def find(self, name: str) -> Value | None:
        """The value of a name, None if nothing defines it."""
        if name in self.names:
            return Captured(name) if name in self.rebound else self.names[name]
        return None if self.outer is None else self.outer.find(name)


Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class Closure:
    """A function of the file. `bound` and `first`: keyword and positional arguments that `functools.partial` gave.
    `parts`: how many arguments FlexAttention gives it, where a call of FlexAttention says so. `defaults`: the values
    that its parameters' defaults had at its definition, as far as they can be read."""

    node: Function
    scope: Scope
    label: str
    bound: Mapping[str, Value] = field(default_factory=dict)
    first: tuple[Value, ...] = ()
    parts: int | None = None
    defaults: Mapping[str, Value] = field(default_factory=dict)

    @property
    def parameters(self) -> list[ast.arg]:
        """Parameters that a call gives by position, without those that are bound already."""
        arguments = self.node.args
        positional = [*arguments.posonlyargs, *arguments.args][len(self.first) :]
        return [parameter for parameter in positional if parameter.arg not in self.bound]


@dataclass(frozen=True)
class Joined:
    """`and_masks(...)` or `or_masks(...)`; without parts it is `noop_mask`, which keeps every pair."""

    is_and: bool
    parts: tuple[Mod, ...]
    label: str


@dataclass(frozen=True)
class Unread:
    """A function that cannot be translated, and why; `node` is the code to blame. `parts`: how many arguments a call of
    it has if it is a mod (4 or 5), None for any other function. `is_foreign`: another module defines it."""

    node: ast.AST
    reason: str
    label: str
    parts: int | None = 4
    is_foreign: bool = False


@dataclass(frozen=True)
class BlockMask:
    """The result of `create_block_mask`."""

    mask: Value


Mod = Closure | Joined | Unread
Value = Captured | Symbol | Constant | Library | Several | Method | Undecided | Failed | Mod | BlockMask


def parts_of_call(value: Closure) -> int | None:
    """4 for the parameters of a mask_mod, 5 for those of a score_mod, None for any other function."""
    if value.parts is not None:
        return value.parts
    parameters = value.parameters
    names = [parameter.arg.strip("_").lower() for parameter in parameters]
    required = len(names) - len(value.node.args.defaults)
    for count in (5, 4):
        is_wrapper = bool(names) and re.search(r"mod$|fn$|mask$", names[0]) is not None
        if len(names) >= count >= required and not is_wrapper and _are_indices(names[count - 4 : count]):
            return count
    return None


_NO_INDEX = re.compile(r"len|size|shape|indices|mask|mod$|fn$")
"""A part of the name of a parameter that is no index: of a size, a list of indices, or a function."""


def _are_indices(names: Sequence[str]) -> bool:
    """True for the names of a batch index, a head index and two positions; unused ones may be underscores."""
    if any(_NO_INDEX.search(name) for name in names):
        return False
    batch, head, query, key = names
    is_last = query[:1] == "q" and key[:1] == "k"
    return batch[:1] in ("", "b", "z") and (is_last or head[:1] == "h")


def is_mod(value: Value | None) -> TypeGuard[Mod]:
    """True for a mask_mod or a score_mod."""
    if isinstance(value, Unread):
        return value.parts is not None
    return isinstance(value, Joined) or (isinstance(value, Closure) and parts_of_call(value) is not None)


def defaults_around(mod: Mod) -> dict[str, object]:
    """The arguments of the factories around a mod whose defaults stand for the values of a call."""
    if isinstance(mod, Unread):
        return {}
    if isinstance(mod, Joined):
        return {name: value for part in mod.parts for name, value in defaults_around(part).items()}
    found: dict[str, object] = {}
    scope: Scope | None = mod.scope
    while scope is not None:
        defaults = [value for value in scope.names.values() if isinstance(value, Constant) and value.default_of]
        found |= {value.default_of: value.value for value in defaults}
        scope = scope.outer
    return found


def is_score(mod: Mod) -> bool:
    """True for a score_mod."""
    return (parts_of_call(mod) if isinstance(mod, Closure) else isinstance(mod, Unread) and mod.parts) == 5


@dataclass(frozen=True)
class Found:
    """A mask_mod or score_mod of the file. `title`: what its entry is called after, if that is not its name.
    `made_by`: the factory that makes it of arguments which only a call gives."""

    name: str
    mod: Mod
    line: int
    title: str = ""
    made_by: str = ""


def named(value: Value, name: str) -> Value:
    """The value after an assignment to `name`: a function or mod gets it as its label."""
    if isinstance(value, Mod):
        return replace(value, label=name)
    return value


MOST_NODES = 10_000
"""Longest value of a name, in nodes of syntax: several times what an expression of the language may have."""


def is_too_long(node: ast.expr) -> bool:
    """True if an expression, with each shared part written out, has more than `MOST_NODES` nodes."""
    return sum(1 for _ in islice(ast.walk(node), MOST_NODES + 1)) > MOST_NODES


def literal(value: object) -> ast.expr | None:
    """The syntax of a number or boolean, None for anything else."""
    if isinstance(value, bool):
        return ast.Constant(value)
    if not isinstance(value, int | float) or math.isnan(value):
        return None
    if value < 0 or (value == 0 and math.copysign(1, value) < 0):
        positive = literal(-value)
        return None if positive is None else ast.UnaryOp(ast.USub(), positive)
    return ast.Name("inf") if math.isinf(value) else ast.Constant(value)
