"""Custom operators: what torch.compile, torch.export and fake tensors see in place of launches.

`torch.ops.<package>` registers each when its name is first read.

The module of a variant's op defines `torch.ops.<package>.<variant>_fwd` and `_bwd`; importing the package imports no
op. Whoever reads an operator of `torch.ops` gets it, in a fresh process too: `torch.export.load`, compiled
code from a cache on disk, a graph from a pickle. A program that finds operators by name in C++, as an AOTInductor
package does, must read `torch.ops.<package>.<variant>_fwd` before.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from inspect import Signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

_LISTS = (list[int], list[Tensor])

_OWN = ("fwd", "bwd", "fp8")
MODES = {"": _OWN, "_packed": _OWN, "_segmented": _OWN, "_paged": ("fwd", "plan")}
"""What a mode of calls adds to the name of an operator, and which operators it has."""


def namespace_of(package: str) -> str:
    """The namespace of the operators of a package: two packages can live in one process.

    >>> namespace_of("generated"), namespace_of("model.attention")
    ('generated', 'model_attention')

    A package that is part of a kernel of Hugging Face's hub has the kernel's namespace in its `NAMESPACE`.
    """
    name: str = getattr(sys.modules.get(package), "NAMESPACE", package)
    return name.replace(".", "_")


def register_when_read(package: str, variants: Sequence[str]) -> None:
    """Make `torch.ops.<package>` import the module that defines an operator when the operator is first read.

    Raises ImportError if another package has the same namespace, as `model.attention` and `model_attention` would.
    """
    modules = {
        f"{variant}{mode}_{name}": f"{package}.{variant}.torch_op"
        for variant in variants
        for mode, names in MODES.items()
        for name in names
    }
    modules |= {"append": f"{package}._runtime.torch.paging", "append_decay": f"{package}._runtime.torch.paged_decay"}
    name = namespace_of(package)
    namespace: Any = getattr(torch.ops, name)
    kind = type(namespace)
    owner = getattr(kind, "owner_of_operators", package)
    if owner != package and name == package.replace(".", "_"):
        raise ImportError(
            f"{package}: the operators of the package {owner} are torch.ops.{name}, too; rename one of both"
        )

    class LazyOperators(kind):  # type: ignore[misc, valid-type]
        """A namespace of operators that are registered when they are first read."""

        # torch saves an operator under the module that is named here.
        __module__ = kind.__module__
        owner_of_operators = package

        def __getattr__(self, name: str) -> Any:
            if name in modules:
                importlib.import_module(modules[name])
            return super().__getattr__(name)

    namespace.__class__ = LazyOperators


def register_writer(module: str, name: str, write: Callable[..., None], changed: Sequence[str]) -> Callable[..., None]:
    """Register `write`, a function of a module of `torch` that changes the `changed` tensors in place and returns
    nothing, as an operator of the package. Returns a function that calls it."""
    from torch.library import custom_op

    registered = custom_op(f"{namespace_of(module.rsplit('.', 3)[0])}::{name}", write, mutates_args=changed)
    registered.register_fake(lambda *_: None)
    return registered


class Formula(NamedTuple):
    """How autograd differentiates an operator, as `torch.library.register_autograd` takes it.

    Attributes:
        setup: keeps in a context what `gradients` needs, from the operator's arguments and results.
        gradients: the gradients of all arguments, from those of the results.
    """

    setup: Callable[..., None] | None
    gradients: Callable[..., Any]


def register_operator(
    name: str,
    launch: Callable[..., Any],
    fake: Callable[..., Any],
    signature: Signature,
    vmap: Callable[..., Any] | None = None,
    formula: Formula | None = None,
) -> Callable[..., Any]:
    """Register a custom operator that calls `launch`, which has this signature; return a function that calls it.

    `fake` allocates what `launch` returns. `vmap(operator, size, in_dims, args)` is the operator's rule for
    `torch.func.vmap`; it is not needed inside an autograd function, which has its own rule. `formula` is used outside
    of an autograd function only; a list in its inputs may be None. An operator cannot take `CallOptions`, so they are
    passed as their text. Nor can one that an AOTInductor package calls take an empty list, so that is passed as None.
    """
    from torch.library import custom_op, infer_schema

    from ..core.options import CallOptions
    from .plain import recording_gradients
    from .transforms import refuse_tangents

    names, op = [*signature.parameters], name.partition("::")[2].rpartition("_")[0]
    places = [place for place, each in enumerate(signature.parameters) if each == "options"]
    lists = [place for place, each in enumerate(signature.parameters.values()) if each.annotation in _LISTS]

    def parsed(args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([CallOptions.parsed(x) if place in places else x for place, x in enumerate(args)])

    def taken(args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([[] if x is None and place in lists else x for place, x in enumerate(parsed(args))])

    def run(*args: Any) -> Any:
        # A graph was traced without derivatives in forward mode, but a call of it may have some.
        if forward_ad._current_level >= 0:
            with recording_gradients():
                refuse_tangents(op, **{each: x for each, x in zip(names, args, strict=True) if isinstance(x, Tensor)})
        return launch(*taken(args))

    def allocate(*args: Any) -> Any:
        return fake(*taken(args))

    parameters = [x.replace(annotation=str) if x.name == "options" else x for x in signature.parameters.values()]
    run.__dict__["__signature__"] = signature.replace(parameters=parameters)
    # No annotation says that a list of tensors may be None.
    schema = infer_schema(run, mutates_args=()).replace("[] ", "[]? ")
    registered = custom_op(name, run, mutates_args=(), schema=schema)
    registered.register_fake(allocate)
    if formula is not None:
        setup, gradients = formula
        registered.register_autograd(
            gradients,
            setup_context=None if setup is None else lambda ctx, inputs, output: setup(ctx, parsed(inputs), output),
        )
    if vmap is not None:
        registered.register_vmap(lambda info, in_dims, *args: vmap(registered, info.batch_size, in_dims, args))

    def passed(place: int, x: Any) -> Any:
        if place in places:
            return x.text
        return (x or None) if place in lists else x

    def call(*args: Any) -> Any:
        return registered(*(passed(place, x) for place, x in enumerate(args)))

    return call
