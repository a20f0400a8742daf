"""Names of parameters as a call gives them, from the source of a function's decorators."""

from __future__ import annotations

import ast
from collections.abc import Iterable


def public_names(decorators: Iterable[str]) -> dict[str, str]:
    """Name in the function -> name in a call, of the parameters that `@keywords` of `runtime/core/checks.py` renames.

    >>> public_names(["replayed_op()", "keywords(keep='own_keep')"])
    {'own_keep': 'keep'}
    """
    found: dict[str, str] = {}
    for text in decorators:
        match ast.parse(text, mode="eval").body:
            case ast.Call(func=ast.Name(id="keywords"), keywords=renamed):
                found |= {ast.literal_eval(each.value): each.arg for each in renamed if each.arg}
    return found


def keywords_of(source: str, name: str) -> list[str]:
    """The keywords of a function of a module, by the names that a call gives them.

    >>> keywords_of("@keywords(keep='own_keep')\\ndef plan(q, *, own_keep=None, scale=None): ...", "plan")
    ['keep', 'scale']
    """
    functions = (each for each in ast.parse(source).body if isinstance(each, ast.FunctionDef))
    function = next(each for each in functions if each.name == name)
    names = public_names(ast.unparse(each) for each in function.decorator_list)
    return [names.get(each.arg, each.arg) for each in function.args.kwonlyargs]
