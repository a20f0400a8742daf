"""Loads a written kernel with the library `kernels`, without a network, and compares it with its package on the CPU."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codegen.compile.packages import find_package
from codegen.hub.tree import Layer, layers_of
from codegen.testing.calls import Inputs, Shape, draw_inputs, evaluate, load_manifest, load_op
from codegen.util.errors import CodegenError

SHAPE = Shape(batch=2, heads=4, kv_heads=2, seq=24, dim=16)


def check_kernel(package: Path, out: Path) -> str:
    """Load the kernel in `out`, call each op and each layer; returns a line on what was compared.

    Raises:
        CodegenError: a result or a gradient that is not the package's, bit for bit.
        ModuleNotFoundError: `kernels` is not installed.
    """
    # Before `kernels` is imported, which reads it: nothing is looked up on the hub.
    os.environ["HF_HUB_OFFLINE"] = "1"
    kernels: Any = importlib.import_module("kernels")
    out = out.resolve()
    kernel = kernels.get_local_kernel(out)
    name = find_package(package).name
    entries = load_manifest(name)
    for each in layers_of(entries):
        variant, entry = each.op, entries[each.op]
        inputs = draw_inputs(entry, SHAPE, dtype=torch.float32, device="cpu")
        op = load_op(variant, name)
        want, got = evaluate(op, inputs), evaluate(getattr(kernel, variant), inputs)
        # A layer with dropout takes its seed from torch's generator, like an op that is called without a seed.
        unseeded = replace(inputs, scalars={x: value for x, value in inputs.scalars.items() if x != "seed"})
        layer = kernels.LocalLayerRepository(repo_path=out, layer_name=each.name)
        want["o of its layer"] = _drawn(unseeded.call, op)
        got["o of its layer"] = _drawn(_by_layer, kernels, layer, each, unseeded)
        for result, wanted in want.items():
            if not torch.equal(got[result], wanted):
                raise CodegenError(f"{out}: {variant}: {result} differs from that of {package}")
    return f"{out}: {len(entries)} ops and layers equal those of {package}, loaded by kernels {kernels.__version__}"


def _drawn(call: Callable[..., Tensor], *args: Any) -> Tensor:
    torch.manual_seed(0)
    return call(*args)


def _by_layer(kernels: Any, repository: Any, plan: Layer, inputs: Inputs) -> Tensor:
    """The result of a module whose forward `kernelize` replaced by the layer's."""
    layer = repository.load()

    def forward(self: Any, *args: Any, **keywords: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward but that of the kernel's layer")

    forward.__dict__["__signature__"] = inspect.signature(layer.forward)
    adopted = type("Adopted", (torch.nn.Module,), {"forward": forward})
    model = kernels.use_kernel_forward_from_hub("Adopted")(adopted)()
    given = {**inputs.tensors, **inputs.scalars}
    for name in plan.held:
        setattr(model, name, given.pop(plan.arguments.get(name, name)))
    given = {name: given.pop(argument) for name, argument in plan.inputs.items()} | given
    mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
    with kernels.use_kernel_mapping({"Adopted": {"cpu": repository}}):
        kernels.kernelize(model, mode=mode, device="cpu", use_fallback=False)
    o: Tensor = model(inputs.q, inputs.k, inputs.v, **given)
    return o
