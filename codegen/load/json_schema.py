"""The JSON Schema of a spec file, for editors: `python -m codegen schema > variants.schema.json`.

A schema states what a file may look like; what its expressions may say is checked by `load`.
"""

from __future__ import annotations

from typing import Any

from codegen.arch.chips import ARCHS
from codegen.arch.tile_rules import MAX_HEAD_DIM, MIN_HEAD_DIM, TILE_FIELDS
from codegen.ir.expr import INDEX_NAMES, ScalarType
from codegen.load.archs import FLOAT32, SHORT
from codegen.load.variants import INT_LIMIT, MOST_DOC, SCALAR_KEYS, SCALAR_TYPES
from codegen.spec.model import DTYPES, TENSOR_DTYPES, Pass
from codegen.spec.names import IDENTIFIER

Schema = dict[str, Any]  # a JSON document: its shape is the business of its readers

_HEAD_DIM_KEY = "^([89]|[1-9][0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-6])$"
"""`MIN_HEAD_DIM` to `MAX_HEAD_DIM`, which as keys JSON can only hold as text."""

_PASS_DOCS = {
    Pass.FWD: "The forward kernel: o and lse.",
    Pass.DKDV: "The backward kernel that loops over queries: dk and dv.",
    Pass.DQ: "The backward kernel that loops over keys: dq.",
}

_TILE_DOCS = {
    "block_m": "Query rows of a tile.",
    "block_n": "Keys of a tile.",
    "num_warps": "Warps of one program.",
    "num_stages": "Depth of the software pipeline.",
}


def json_schema() -> Schema:
    """The schema as a document of JSON Schema 2020-12."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Attention variants",
        **_object(
            "Attention variants and what they are rendered for.",
            {
                "defaults": _defaults(),
                "archs": _archs(),
                "masks": _macros("Named boolean expressions, such as `window(size): q_idx - kv_idx < size`."),
                "scores": _macros("Named score expressions, such as `softcap(cap): cap * tanh(score / cap)`."),
                "variants": _named("The variants, each one op.", {"$ref": "#/$defs/variant"}, minProperties=1),
            },
            required=["variants"],
        ),
        "$defs": {
            "variant": _variant(),
            "tensor": _tensor(),
            "scalar": _scalar(),
            "passes": _passes(),
            "tile": _tile(),
        },
    }


def _object(description: str, properties: dict[str, Schema], required: list[str] | None = None) -> Schema:
    schema: Schema = {
        "description": description,
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    return {**schema, "required": required} if required else schema


def _named(description: str, value: Schema, key: str = f"^{IDENTIFIER}$", **limits: int) -> Schema:
    """A mapping from names of the user's choice."""
    return {
        "description": description,
        "type": "object" if limits else ["object", "null"],
        "patternProperties": {key: value},
        "additionalProperties": False,
        **limits,
    }


def _list_of(description: str, items: Schema) -> Schema:
    return {"description": description, "type": "array", "items": items, "minItems": 1, "uniqueItems": True}


def _defaults() -> Schema:
    head_dim = {"type": "integer", "minimum": MIN_HEAD_DIM, "maximum": MAX_HEAD_DIM}
    return _object(
        "What variants are rendered and tuned for; a key left out keeps the library's value.",
        {
            "dtypes": _list_of("Element types of q, k and v.", {"enum": list(DTYPES)}),
            "head_dims": _list_of("Head dimensions.", head_dim),
        },
    )


def _archs() -> Schema:
    passes = {"$ref": "#/$defs/passes"}
    arch = _object(
        "Configs for 16-bit inputs, and under `float32` for 4-byte inputs.",
        {
            **{p.value: {"$ref": f"#/$defs/passes/properties/{p.value}"} for p in Pass},
            FLOAT32: passes,
            SHORT: _named(
                "Configs for 16-bit inputs of short sequences, by the longest served.", passes, key=r"^[1-9]\d*$"
            ),
        },
    )
    description = "Block sizes and launch options before tuning; an entry left out keeps the library's value."
    return _object(description, dict.fromkeys(ARCHS, arch))


def _passes() -> Schema:
    return _object(
        "Configs by pass and largest head_dim served.",
        {p.value: _named(_PASS_DOCS[p], {"$ref": "#/$defs/tile"}, key=_HEAD_DIM_KEY, minProperties=1) for p in Pass},
    )


def _tile() -> Schema:
    fields = {name: {"description": _TILE_DOCS[name], "enum": list(allowed)} for name, allowed in TILE_FIELDS.items()}
    return _object("Config of one kernel.", fields, required=list(TILE_FIELDS))


def _macros(description: str) -> Schema:
    parameters = rf"(\(\s*{IDENTIFIER}\s*(,\s*{IDENTIFIER}\s*)*\))?"
    return _named(
        description,
        _expression("An expression over the parameters and what an expression may read."),
        key=rf"^\s*{IDENTIFIER}\s*{parameters}\s*$",
    )


def _expression(description: str) -> Schema:
    return {"description": description, "type": "string", "minLength": 1}


def _flag(description: str) -> Schema:
    return {"description": description, "type": "boolean", "default": False}


def _variant() -> Schema:
    schema = _object(
        "One attention variant; an empty one is plain attention.",
        {
            "doc": {
                "description": "One sentence on what the variant is and where it comes from.",
                "type": "string",
                "maxLength": MOST_DOC,
            },
            "mask": _expression("True where a query attends to a key. Reads b h hkv q_idx kv_idx; left out: always."),
            "score": _expression("The new score from `score`: scaled, natural log. Left out: unchanged."),
            "tensors": _named("Tensors each call gives, by name.", {"$ref": "#/$defs/tensor"}),
            "scalars": _named("Numbers each call gives, by name.", {"$ref": "#/$defs/scalar"}),
            "sink": _flag("Adds an argument `sink [Hq]`: a logit per head in the denominator only."),
            "decay": _flag("Adds an argument `g [B, S, Hq]`: a log-decay, summed along the sequence."),
            "dropout": _flag("Adds arguments `dropout_p` and `seed`: dropout on the probabilities."),
            "archs": _archs(),
        },
    )
    return {**schema, "type": ["object", "null"]}


def _tensor() -> Schema:
    dim: Schema = {
        "anyOf": [
            {"enum": list(INDEX_NAMES)},
            {"type": "integer", "minimum": 1},
            {"type": "string", "minLength": 1},
        ]
    }
    dims = "Shape: a size of the call (b h hkv q_idx kv_idx), an integer, a free name whose size the call gives, or an "
    dims += (
        "expression of integers over int scalars, b h hkv q_len kv_len and names that are a dim elsewhere: `2 * r + 1`."
    )
    return _object(
        "A tensor that expressions index with one integer expression per dim.",
        {
            "dims": {"description": dims, "type": "array", "items": dim},
            "dtype": {"description": "Element type.", "enum": list(TENSOR_DTYPES), "default": "float32"},
            "grad": _flag("Whether the backward returns a gradient; float dtypes only."),
            "example": _expression("Typical contents, over the tensor's index names and i0 i1 ..., one per axis."),
        },
        required=["dims"],
    )


def _scalar() -> Schema:
    integer: Schema = {"type": "integer", "minimum": -INT_LIMIT, "maximum": INT_LIMIT}
    ranges = [
        _object(
            f"{noun} that a call gives, from `min` to `max`; tests and benchmarks give `example`.",
            {"type": {"enum": [kind.value]}, **dict.fromkeys(SCALAR_KEYS[1:], value)},
            required=["type"],
        )
        for noun, kind, value in (
            ("An integer", ScalarType.INT, integer),
            ("A number", ScalarType.FLOAT, {"type": "number"}),
        )
    ]
    return {"anyOf": [{"enum": list(SCALAR_TYPES)}, *ranges]}
