"""`reference/schema.md`: each key of a spec file, from its JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from codegen.arch.tile_rules import TILE_FIELDS
from codegen.load.json_schema import json_schema
from docs.generators.markdown import code, page, table

Schema = Mapping[str, Any]

INTRODUCTION = """A spec is a YAML file. Only `variants` is required; what a file leaves out it has from the library's
[`variants.yaml`](../../variants.yaml): named masks and scores, defaults and block sizes. The same as [JSON
Schema](variants.schema.json), for editors: `python -m codegen schema > variants.schema.json`, then in the first line
of a spec `# yaml-language-server: $schema=variants.schema.json`.

What expressions may say is in [the language](language.md); what a broken rule reports in [errors](errors.md)."""

SECTIONS = (
    ("The file", ()),
    ("A variant", ("$defs", "variant")),
    ("A tensor", ("$defs", "tensor")),
    ("A scalar", ("$defs", "scalar")),
    ("Defaults", ("properties", "defaults")),
    ("Block sizes of a chip", ("properties", "archs", "properties", "sm_90")),
    ("A config", ("$defs", "tile")),
)


def pages() -> dict[str, str | bytes]:
    schema = json_schema()
    parts = [part for title, path in SECTIONS for part in _section(title, _at(schema, path), schema)]
    return {
        "reference/schema.md": page("Spec schema", INTRODUCTION, *parts),
        "reference/variants.schema.json": (json.dumps(schema, indent=2) + "\n").encode(),
    }


def _at(schema: Schema, path: tuple[str, ...]) -> Schema:
    for key in path:
        schema = schema[key]
    return schema


def _section(title: str, schema: Schema, root: Schema) -> Iterator[str]:
    yield f"## {title}"
    if "description" in schema:
        yield str(schema["description"])
    for option in schema.get("anyOf", [schema]):
        if "enum" in option and "properties" not in option:
            yield f"The short form, {_kind(option, root)}."
        if properties := option.get("properties"):
            if option is not schema and "description" in option:
                yield str(option["description"])
            required = option.get("required", [])
            rows = [
                [code(name) + (" (required)" if name in required else ""), _kind(value, root), _text(value, root)]
                for name, value in properties.items()
            ]
            yield table(["key", "value", "meaning"], rows)


def _text(schema: Schema, root: Schema) -> str:
    own = schema.get("description") or _target(schema, root).get("description", "")
    default = f" Default: {code(json.dumps(schema['default']).strip(chr(34)))}." if "default" in schema else ""
    return f"{own}{default}"


def _target(schema: Schema, root: Schema) -> Schema:
    reference = schema.get("$ref")
    return _at(root, ("$defs", *reference.removeprefix("#/$defs/").split("/"))) if reference else schema


def _kind(schema: Schema, root: Schema) -> str:
    """What a value may be, in words."""
    if reference := schema.get("$ref"):
        return _named(str(reference))
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(option, root) for option in schema["anyOf"]))
    if "const" in schema:
        return code(schema["const"])
    if "enum" in schema:
        return "one of " + " ".join(code(value) for value in schema["enum"])
    kinds = schema.get("type", "any value")
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if "array" in kinds:
        return f"a list of: {_kind(schema['items'], root)}" if "items" in schema else "a list"
    if "object" in kinds:
        values = schema.get("patternProperties", {})
        if values:
            return "a mapping; each value: " + " or ".join(_kind(value, root) for value in values.values())
        return "a mapping"
    words = [{"string": "text", "boolean": "`true` or `false`", "null": "nothing"}.get(kind, kind) for kind in kinds]
    if kinds == ["string"] and "maxLength" not in schema:
        words = ["an expression"]  # all texts other than expressions have a maxLength
    limits = [f"from {schema['minimum']}"] if "minimum" in schema else []
    limits += [f"to {schema['maximum']}"] if "maximum" in schema else []
    return " ".join([" or ".join(words), *limits])


def _named(reference: str) -> str:
    name = reference.removeprefix("#/$defs/").split("/")[0]
    titles = {path[1]: title for title, path in SECTIONS if len(path) == 2 and path[0] == "$defs"}
    if name in titles:
        return f"[{titles[name].lower()}](#{titles[name].lower().replace(' ', '-')})"
    return f"a mapping: largest head dim -> [a config](#a-config) of {len(TILE_FIELDS)} numbers"
