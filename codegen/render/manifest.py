"""What a package's manifest says of each variant."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from codegen.analysis.call_modes import Mode
from codegen.analysis.gradients import deterministic_modes
from codegen.ir.expr import TensorSpec
from codegen.ir.printers import FormulaPrinter
from codegen.plan import kernel_files
from codegen.plan.paged.kernels import is_legal
from codegen.render.code_hash import HASH_LENGTH
from codegen.spec.model import Spec, Variant


def manifest_entries(spec: Spec) -> dict[str, Any]:
    """The manifest's entry for each variant, which tests, tuners and benchmarks read."""
    return {
        name: {
            "doc": v.doc,
            "mask": v.mask_text,
            "score": v.score_text,
            "tensors": {t.name: _tensor_entry(t) for t in v.tensors.values()},
            "scalars": {s.name: s.type.value for s in v.scalars.values()},
            "scalar_ranges": {s.name: [s.minimum, s.maximum] for s in v.scalars.values()},
            "scalar_examples": {s.name: s.example for s in v.scalars.values()},
            "sink": v.sink,
            "decay": v.decay,
            "deterministic": [mode.value for mode in deterministic_modes(v)],
            "dropout": v.dropout,
            "modes": [*(mode.value for mode in Mode), *([kernel_files.PAGED] if is_legal(v) else [])],
            "head_dims": list(spec.defaults.head_dims),
            "dtypes": list(spec.defaults.dtypes),
            "hash": entry_hash(v),
        }
        for name, v in spec.variants.items()
    }


def _tensor_entry(tensor: TensorSpec) -> dict[str, Any]:
    example = "" if tensor.example is None else FormulaPrinter().text(tensor.example)
    return {"dims": list(tensor.dims), "dtype": tensor.dtype, "grad": tensor.grad, "example": example}


def entry_hash(variant: Variant) -> str:
    """Hash of a variant's entry, and of its formulas with the file's named masks and scores filled in."""
    formulas = ["" if each is None else FormulaPrinter().text(each) for each in (variant.mask, variant.score)]
    return hashlib.sha256(json.dumps([variant.entry, *formulas]).encode()).hexdigest()[:HASH_LENGTH]
