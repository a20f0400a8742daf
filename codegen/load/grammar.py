"""What a spec file may look like: each key, the kind of its value, and its limits, stated once.

The readers of this package and the JSON Schema both follow from it. `codegen.ir.parse` checks what expressions say, and
the readers check rules between entries.
"""

from __future__ import annotations

from codegen.arch.chips import ARCHS
from codegen.arch.paged import LEAST_KEYS, PagedPass
from codegen.arch.tile_rules import MAX_HEAD_DIM, MIN_HEAD_DIM, TILE_FIELDS
from codegen.ir.expr import INDEX_NAMES, ScalarType
from codegen.load.shapes import (
    AnyOf,
    Choice,
    Expression,
    Flag,
    Integer,
    ListOf,
    Number,
    NumberedTable,
    Record,
    Reference,
    Shape,
    Table,
    Text,
    TileField,
    UniqueList,
)
from codegen.spec.model import DTYPES, TENSOR_DTYPES, Pass
from codegen.spec.names import IDENTIFIER

# ------------------------------------------------------------------------------------------------ `defaults:`, `archs:`

HEAD_DIM = Integer(
    rule=f"a head_dim must be from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}", low=MIN_HEAD_DIM, high=MAX_HEAD_DIM
)
DEFAULT_DTYPES = UniqueList(description="Element types of q, k and v.", element=Choice(options=DTYPES))
DEFAULT_HEAD_DIMS = UniqueList(description="Head dimensions.", element=HEAD_DIM)
DEFAULTS = Record(
    description="What variants are rendered and tuned for; a key left out keeps the library's value.",
    fields={"dtypes": DEFAULT_DTYPES, "head_dims": DEFAULT_HEAD_DIMS},
    remedies=dict.fromkeys(("layout", "layouts"), "; every op takes both layouts, and a call chooses by layout="),
)

_TILE_DOCS = {
    "block_m": "Query rows of a tile.",
    "block_n": "Keys of a tile.",
    "num_warps": "Warps of one program.",
    "num_stages": "Depth of the software pipeline.",
}
TILE_SHAPES = {name: TileField(description=_TILE_DOCS[name], name=name) for name in TILE_FIELDS}
TILE = Record(
    description="Config of one kernel.",
    fields=TILE_SHAPES,
    required=tuple(TILE_FIELDS),
    missing=f"a config gives all of {' '.join(TILE_FIELDS)}, missing {{names}}",
)
SPLIT_FIELD = "keys_per_split"
PAGED_TILE_SHAPES: dict[str, TileField | Integer] = {
    **TILE_SHAPES,
    SPLIT_FIELD: Integer(
        rule="the keys of a split must be at least 1",
        low=1,
    ),
}
PAGED_TILE = Record(
    description=f"Config of a kernel on paged caches; `{SPLIT_FIELD}`, the least keys of a split, is {LEAST_KEYS} by "
    "default.",
    fields=PAGED_TILE_SHAPES,
    required=tuple(TILE_FIELDS),
    missing=TILE.missing,
)

_PASS_DOCS = {
    Pass.FWD: "The forward kernel: o and lse.",
    Pass.DKDV: "The backward kernel that loops over queries: dk and dv.",
    Pass.DQ: "The backward kernel that loops over keys: dq.",
}
PASS_TABLES = {
    p.value: NumberedTable(description=_PASS_DOCS[p], key=HEAD_DIM, value=Reference(path="tile"), may_be_empty=False)
    for p in Pass
}
PASSES = Record(description="Configs by pass and largest head_dim served.", noun="pass", fields=PASS_TABLES)

_PAGED_DOCS = {
    PagedPass.DECODE: "The forward on paged caches of few rows; `block_m` is raised to the rows of a sequence.",
    PagedPass.PAGED_FWD: "The forward on paged caches of prompts.",
}
PAGED_TABLES = {
    p.value: NumberedTable(
        description=_PAGED_DOCS[p], key=HEAD_DIM, value=Reference(path="paged_tile"), may_be_empty=False
    )
    for p in PagedPass
}
ALL_PASSES = Record(
    description=f"{PASSES.description} What is left out of those on paged caches has a default.",
    noun="pass",
    fields={
        **{p.value: Reference(path=f"passes/properties/{p.value}") for p in Pass},
        **PAGED_TABLES,
    },
)

FLOAT32 = "float32"
"""The key of an arch under which the configs for 4-byte inputs stand."""

SHORT_KEY = "short"
SHORT = NumberedTable(
    description="Configs for 16-bit inputs of short sequences, by the longest served.",
    key=Integer(rule="the longest sequence served must be at least 1", low=1),
    value=Reference(path="passes"),
)
ARCH = Record(
    description=f"Configs for 16-bit inputs, and under `{FLOAT32}` for 4-byte inputs.",
    noun="pass",
    fields={
        **{p.value: Reference(path=f"all_passes/properties/{p.value}") for p in (*Pass, *PagedPass)},
        FLOAT32: Reference(path="all_passes"),
        SHORT_KEY: SHORT,
    },
)
ARCH_TABLE = Record(
    description="Block sizes and launch options before tuning; an entry left out keeps the library's value.",
    noun="architecture",
    fields=dict.fromkeys(ARCHS, ARCH),
)

# -------------------------------------------------------------------------------------------------- `masks:`, `scores:`

BODY = Expression(description="An expression over the parameters and what an expression may read.")
_HEADER = rf"^\s*{IDENTIFIER}\s*(\(\s*{IDENTIFIER}\s*(,\s*{IDENTIFIER}\s*)*\))?\s*$"
MASKS = Table(
    description="Named boolean expressions, such as `window(size): q_idx - kv_idx < size`.", pattern=_HEADER, value=BODY
)
SCORES = Table(
    description="Named score expressions, such as `softcap(cap): cap * tanh(score / cap)`.",
    pattern=_HEADER,
    value=BODY,
)

# --------------------------------------------------------------------------------------------------------- `variants:`

DIM_SIZE = Integer(rule="a dim must be at least 1", low=1)
DIMS = ListOf(
    description="Shape: a size of the call (b h hkv q_idx kv_idx), an integer, a free name whose size the call gives, "
    "or an expression of integers over int scalars, b h hkv q_len kv_len and names that are a dim elsewhere: "
    "`2 * r + 1`.",
    element=AnyOf(options=(Choice(options=INDEX_NAMES), DIM_SIZE, Expression())),
)
DTYPE = Choice(description="Element type.", options=TENSOR_DTYPES, default="float32")
GRAD = Flag(description="Whether the backward returns a gradient; float dtypes only.")
EXAMPLE = Expression(description="Typical contents, over the tensor's index names and i0 i1 ..., one per axis.")
TENSOR = Record(
    description="A tensor that expressions index with one integer expression per dim.",
    fields={"dims": DIMS, "dtype": DTYPE, "grad": GRAD, "example": EXAMPLE},
    required=("dims",),
    missing="a tensor needs dims, such as {{dims: [h]}}",
)

SCALAR_TYPE = Choice(options=tuple(kind.value for kind in ScalarType))
SCALAR_LIMITS = ("min", "max", "example")
SCALAR_VALUES: dict[ScalarType, Integer | Number] = {
    # Half of 32 bits leaves room for sums.
    ScalarType.INT: Integer(rule="an int is at most 2**30 either way", low=-(2**30), high=2**30),
    ScalarType.FLOAT: Number(),
}
_SCALAR_NOUNS = {ScalarType.INT: "An integer", ScalarType.FLOAT: "A number"}
SCALAR_RANGES = {
    kind: Record(
        description=f"{_SCALAR_NOUNS[kind]} that a call gives, from `min` to `max`; tests and benchmarks give "
        "`example`.",
        fields={"type": Choice(options=(kind.value,)), **dict.fromkeys(SCALAR_LIMITS, value)},
        required=("type",),
        missing=f"a scalar needs a type, one of {' '.join(SCALAR_TYPE.options)}",
    )
    for kind, value in SCALAR_VALUES.items()
}
"""All have the same keys; only the kind of number differs."""

DOC = Text(
    description="One sentence on what the variant is and where it comes from.",
    longest=10_000,  # it stands in each file of the variant
)
MASK = Expression(description="True where a query attends to a key. Reads b h hkv q_idx kv_idx; left out: always.")
SCORE = Expression(description="The new score from `score`: scaled, natural log. Left out: unchanged.")
TENSORS = Table(description="Tensors each call gives, by name.", value=Reference(path="tensor"))
SCALARS = Table(description="Numbers each call gives, by name.", value=Reference(path="scalar"))
SINK = Flag(description="Adds an argument `sink [Hq]`: a logit per head in the denominator only.")
DECAY = Flag(description="Adds an argument `g [B, S, Hq]`: a log-decay, summed along the sequence.")
DROPOUT = Flag(description="Adds arguments `dropout_p` and `seed`: dropout on the probabilities.")
PRUNE = Flag(description="Adds an argument `prune`: the share of each row's weight that a call may leave out.")
_OTHER_KEYS = {
    **dict.fromkeys(("scale", "softmax_scale"), "; a call gives scale="),
    **dict.fromkeys(("rope", "rotary", "qk_norm"), "; rotate or normalise q and k before the call"),
    **dict.fromkeys(("window", "window_size", "sliding_window"), "; write mask: causal and window(128)"),
    "causal": "; write mask: causal",
    "softcap": "; write score: softcap(50.0)",
    "bias": "; declare it under tensors: and add it: score + bias[h, q_idx, kv_idx]",
    "softmax_plus_one": "; write sink: true, and give zeros as sink= in the call",
    "dropout_p": "; write dropout: true, and give dropout_p= in the call",
}
"""Key that a variant lacks -> where its content belongs."""

VARIANT = Record(
    description="One attention variant; an empty one is plain attention.",
    fields={
        "doc": DOC,
        "mask": MASK,
        "score": SCORE,
        "tensors": TENSORS,
        "scalars": SCALARS,
        "sink": SINK,
        "decay": DECAY,
        "dropout": DROPOUT,
        "prune": PRUNE,
        "archs": ARCH_TABLE,
    },
    may_be_empty=True,
    remedies=_OTHER_KEYS,
)
VARIANTS = Table(
    description="The variants, each one op.", value=Reference(path="variant"), noun="variant", may_be_empty=False
)

# ------------------------------------------------------------------------------------------------------- the whole file

FILE = Record(
    description="Attention variants and what they are rendered for.",
    fields={"defaults": DEFAULTS, "archs": ARCH_TABLE, "masks": MASKS, "scores": SCORES, "variants": VARIANTS},
    required=("variants",),
    missing="the file needs the key 'variants'",
)

DEFINITIONS: dict[str, Shape] = {
    "variant": VARIANT,
    "tensor": TENSOR,
    "scalar": AnyOf(options=(SCALAR_TYPE, *SCALAR_RANGES.values())),
    "passes": PASSES,
    "all_passes": ALL_PASSES,
    "tile": TILE,
    "paged_tile": PAGED_TILE,
}
"""The shapes that a `Reference` points to."""
