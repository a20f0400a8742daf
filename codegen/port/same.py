"""Tells whether two mods are one: made of the same code and the same arguments."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from codegen.port.values import (
    BlockMask,
    Captured,
    Closure,
    Constant,
    Joined,
    Method,
    Mod,
    Scope,
    Several,
    Symbol,
    Unread,
    Value,
    is_mod,
)


def fingerprint(value: Value) -> str:
    """A text that two values have in common if they are made of the same code and arguments, whatever their names."""
    return _Fingerprint().of(value)


class _Fingerprint:
    def __init__(self) -> None:
        self.scopes: dict[Scope, int] = {}
        """The scopes on the way: a function may be a name of its own scope."""

    def of(self, value: Value) -> str:
        match value:
            case Closure(node=node, scope=scope, bound=bound, first=first, defaults=defaults):
                given = [self.of(item) for item in first]
                given += [f"{name}={self.of(item)}" for name, item in sorted({**defaults, **bound}.items())]
                return f"function {id(node)}({', '.join(given)}) in {self.scope(scope)}"
            case Joined(is_and=is_and, parts=parts):
                return f"{'and' if is_and else 'or'}({', '.join(map(self.of, parts))})"
            case Unread(node=node, is_foreign=is_foreign):
                return f"unread {ast.dump(node) if is_foreign else id(node)}"
            case Several(items=items):
                return f"({', '.join(map(self.of, items))})"
            case BlockMask(mask=mask):
                return f"blocks of {self.of(mask)}"
            case Method(owner=owner, name=name):
                return f"{name} of {self.of(owner)}"
            case Symbol(node=node, kind=kind):
                return f"{kind.value} {ast.dump(node)}"
            case Captured(indices=indices):
                return f"{value.path}: {value.annotation}[{', '.join(map(ast.dump, indices))}]"
            case Constant(value=known):
                return repr(known)
        return repr(value)

    def scope(self, scope: Scope) -> str:
        if scope.outer is None:
            return "the module"
        if scope in self.scopes:
            return f"scope {self.scopes[scope]}"
        self.scopes[scope] = len(self.scopes)
        names = [f"{name}={self.of(value)}" for name, value in scope.names.items()]
        return f"{{{', '.join(names)}}} in {self.scope(scope.outer)}"


def parts_inside(mod: Mod) -> Iterator[Mod]:
    """The mods that a mod is made of: what it joins, and what it calls."""
    inside: list[Value] = []
    if isinstance(mod, Joined):
        inside += mod.parts
    elif isinstance(mod, Closure):
        inside += [*mod.first, *mod.bound.values()]
        if mod.scope.outer is not None:
            words = {node.id for node in ast.walk(mod.node) if isinstance(node, ast.Name)}
            inside += [value for name, value in mod.scope.names.items() if name in words]
    for value in inside:
        if is_mod(value):
            yield value
            if isinstance(value, Joined):
                yield from parts_inside(value)
