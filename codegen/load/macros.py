"""Readers of `masks:` and `scores:`, the named expressions."""

from __future__ import annotations

from collections.abc import Mapping

from codegen.ir.expr import Type
from codegen.ir.parse import Macro, check_syntax, parse_header
from codegen.load.grammar import BODY, MASKS, SCORES
from codegen.load.yaml_tree import Document, Item
from codegen.spec.names import macro_problem
from codegen.util.errors import ExprError


def read_macros(doc: Document, sections: Mapping[str, Item], inherited: Mapping[str, Macro]) -> dict[str, Macro]:
    """The named masks and scores in scope of the file: its own override the inherited ones."""
    macros = dict(inherited)
    own: dict[str, int] = {}
    for section, table, kind in (("masks", MASKS, Type.BOOL), ("scores", SCORES, Type.FLOAT)):
        if section not in sections:
            continue
        for header, item in table.items(doc, sections[section]).items():
            macro = _read_macro(doc, header, item, kind)
            if macro is None:
                continue
            known = macros.get(macro.name)
            if macro.name in own:
                doc.note(item, f"duplicate name '{macro.name}', first given in line {own[macro.name]}")
            elif known is not None and known.type is not kind:
                noun = "mask" if known.type is Type.BOOL else "score"
                doc.note(item, f"'{macro.name}' is a {noun} of the library; choose another name")
            else:
                macros[macro.name], own[macro.name] = macro, item.line
    return macros


def _read_macro(doc: Document, header: str, item: Item, kind: Type) -> Macro | None:
    body = BODY.read(doc, item)
    try:
        name, params = parse_header(header)
    except ExprError as error:
        doc.note(item, error.message)
        return None
    problems = [p for p in map(macro_problem, (name, *params)) if p is not None]
    for problem in problems:
        doc.note(item, problem)
    if body is None or problems:
        return None
    try:
        check_syntax(body)
    except ExprError as error:
        doc.note_in(item, error.column, str(error))
    # A body with a syntax error stays in scope: without it, every use of the name would be reported as well.
    return Macro(name=name, params=params, body=body, type=kind)
