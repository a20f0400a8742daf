"""The JSON Schema accepts the library, refuses files of a wrong shape, and lists what the loader reads."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from codegen.arch.tile_rules import MAX_HEAD_DIM, MIN_HEAD_DIM
from codegen.ir.expr import INDEX_NAMES, ScalarType
from codegen.load.json_schema import json_schema
from codegen.load.spec_file import default_spec_path
from tests.support.paths import ROOT

BAD = ROOT / "tests" / "specs" / "bad"

JSON_TYPES: dict[str, set[type]] = {
    "object": {dict},
    "array": {list},
    "string": {str},
    "integer": {int},
    "number": {int, float},
    "boolean": {bool},
    "null": {type(None)},
}
KEYWORDS = {"$schema", "$defs", "$ref", "title", "description", "default", "type", "enum", "anyOf", "items", "pattern"}
KEYWORDS |= {"properties", "patternProperties", "additionalProperties", "required"}
KEYWORDS |= {"minItems", "uniqueItems", "minLength", "maxLength", "minimum", "maximum", "minProperties"}


def fits(value: object, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """A judge of the part of JSON Schema that `json_schema` uses; it refuses a keyword it does not know."""
    unknown = set(schema) - KEYWORDS
    assert not unknown, f"teach this test {unknown}"
    if "$ref" in schema:
        target: Any = root
        for step in schema["$ref"].removeprefix("#/").split("/"):
            target = target[step]
        return fits(value, target, root)
    if "anyOf" in schema and not any(fits(value, option, root) for option in schema["anyOf"]):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    wanted = schema.get("type", [])
    if wanted and not any(type(value) in JSON_TYPES[n] for n in ([wanted] if isinstance(wanted, str) else wanted)):
        return False
    if isinstance(value, dict):
        return fits_object(value, schema, root)
    if isinstance(value, list):
        return len(value) >= schema.get("minItems", 0) and all(fits(item, schema["items"], root) for item in value)
    if isinstance(value, str):
        fitting = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return fitting and bool(re.search(schema.get("pattern", ""), value))
    return not isinstance(value, int) or schema.get("minimum", value) <= value <= schema.get("maximum", value)


def fits_object(value: dict[object, object], schema: dict[str, Any], root: dict[str, Any]) -> bool:
    if not set(schema.get("required", [])) <= set(value) or len(value) < schema.get("minProperties", 0):
        return False
    for key, item in value.items():
        patterns = [sub for p, sub in schema.get("patternProperties", {}).items() if re.search(p, str(key))]
        named = schema.get("properties", {}).get(key)
        options = patterns + ([named] if named is not None else [])
        unheard = not options and not schema.get("additionalProperties", True)
        if unheard or not all(fits(item, option, root) for option in options):
            return False
    return True


def test_schema_accepts_the_library() -> None:
    schema = json_schema()
    assert fits(yaml.safe_load(default_spec_path().read_text(encoding="utf-8")), schema, schema)


@pytest.mark.parametrize(
    "name",
    [
        "bad_scalar",
        "bad_scalar_range",
        "bad_tensor",
        "block_sizes",
        "defaults",
        "no_variants",
        "not_a_mapping",
        "unknown_arch",
        "unknown_key",
        "variants_empty",
        "variants_list",
        "wrong_types",
    ],
)
def test_schema_refuses_what_has_a_wrong_shape(name: str) -> None:
    text = (BAD / f"{name}.yaml").read_text(encoding="utf-8").replace("? [k, l]\n  : {}", "")
    schema = json_schema()
    assert not fits(yaml.safe_load(text), schema, schema)


def test_schema_lists_what_the_loader_reads() -> None:
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    variant, tensor, scalar = (schema["$defs"][name] for name in ("variant", "tensor", "scalar"))
    assert list(schema["properties"]) == ["defaults", "archs", "masks", "scores", "variants"]
    assert {*("mask", "score", "tensors", "scalars", "archs")} <= set(variant["properties"])
    assert list(tensor["properties"]) == ["dims", "dtype", "grad", "example"]
    _, *ranges = scalar["anyOf"]
    assert [list(option["properties"]) for option in ranges] == [["type", "min", "max", "example"]] * len(ScalarType)
    assert schema["$defs"]["tensor"]["properties"]["dims"]["items"]["anyOf"][0]["enum"] == list(INDEX_NAMES)


def test_schema_head_dims() -> None:
    (pattern,) = json_schema()["$defs"]["passes"]["properties"]["fwd"]["patternProperties"]
    assert [n for n in range(1000) if re.search(pattern, str(n))] == list(range(MIN_HEAD_DIM, MAX_HEAD_DIM + 1))
