"""The attention of a model of transformers, from its config: which variants serve it, and for which heads."""

from __future__ import annotations

from pathlib import Path

from codegen.compile.packages import read_model
from codegen.util.choices import check_config
from codegen.util.errors import CodegenError
from codegen.warm.calls import Layer


def layers_of(config: Path, package: str) -> tuple[Layer, ...]:
    """The different layers of a model, in training and not, as `package` serves them.

    Raises `CodegenError` if the package has no variant for one of them.
    """
    check_config("--model", config)
    runs = read_model(package, "explained", config, "--model")
    found: dict[Layer, None] = {}
    for run in runs:
        if not run.is_served:
            reasons = [run.refused, *(layer.refused for layer in run.layers)]
            raise CodegenError(f"--model {config}: {next(filter(None, reasons), 'no layer calls attention')}")
        for each in run.layers:
            layer = Layer(variant=each.variant, heads=each.heads, head_dim=each.head_dim, head_dim_v=each.head_dim_v)
            found[layer] = None
    return tuple(found)
