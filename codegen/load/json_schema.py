"""The JSON Schema of a spec file, for editors: `python -m codegen schema > variants.schema.json`."""

from __future__ import annotations

from codegen.load.grammar import DEFINITIONS, FILE
from codegen.load.shapes import Schema


def json_schema() -> Schema:
    """The schema as a document of JSON Schema 2020-12."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Attention variants",
        **FILE.schema(),
        "$defs": {name: shape.schema() for name, shape in DEFINITIONS.items()},
    }
