# SPDX-License-Identifier: Apache-2.0
"""The autograd functions of kernels: that of a call, that of its gradients, and that of calls which are replayed."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import Parameter, Signature
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..core.checks import fail, refuse_gradient
from ..core.fp8 import SCALES
from .ahead import compile_backward
from .dispatch import launches_directly
from .operators import Formula
from .plans import Step
from .replay import apply
from .transforms import (
    are_mapped,
    batched,
    differentiates_backward,
    refuse_forward_mode,
    refuse_gradient_of,
    refuse_second_derivative,
)

Run: TypeAlias = Callable[..., tuple[Tensor, ...]]
"""Runs kernels: launches them, or calls the custom operator that stands for the launches."""


class _Registry:
    """Kernels as attributes, by the name that their custom operators begin with.

    torch.compile follows what a function reaches from its module, not what it encloses: the functions below enclose
    numbers and this name alone. Of a dict it would know only what the dict held when the trace first read it, and an op
    may be imported while it is traced.
    """

    def of(self, name: str) -> Any:
        found: Any = getattr(self, name)
        return found


KERNELS = _Registry()


def signature_of(parameters: Sequence[str], types: Mapping[str, Any] | None = None, num_results: int = 0) -> Signature:
    """A signature with these parameters, which are tensors unless `types` has them, that returns so many tensors."""
    kind, annotations = Parameter.POSITIONAL_OR_KEYWORD, types or {}
    found = [Parameter(name, kind, annotation=annotations.get(name, Tensor)) for name in parameters]
    return Signature(found, return_annotation=tuple.__class_getitem__((Tensor,) * num_results))


def _run_forward(name: str, q: Tensor, *args: Any) -> tuple[Tensor, ...]:
    kernels = KERNELS.of(name)
    run: Run = kernels.forward if launches_directly(q, *args) else kernels.forward_op
    return run(q, *args)


def _run_scaled_forward(name: str, q: Tensor, *args: Any) -> tuple[Tensor, ...]:
    kernels = KERNELS.of(name)
    if torch.is_grad_enabled():
        for parameter, x in zip((*kernels.parameters, *SCALES), (q, *args), strict=True):
            if isinstance(x, Tensor) and x.requires_grad:
                expected = f"a tensor without gradient: calls of {q.dtype} have none"
                fail(kernels.op, parameter, expected, "one that requires grad")
    run: Run = kernels.scaled_forward if launches_directly(q, *args) else kernels.scaled_forward_op
    return run(q, *args)


def _run_backward(name: str, do: Tensor, dlse: Tensor | None, q: Tensor, *args: Any) -> tuple[Tensor, ...]:
    kernels = KERNELS.of(name)
    is_direct = launches_directly(do, dlse, q, *args) and not are_mapped(do, dlse)
    run: Run = kernels.backward if is_direct else kernels.backward_op
    return run(do, dlse, q, *args)


def _gradients(
    name: str, order: Sequence[int], flags: Sequence[int], wanted: Sequence[bool], arguments: Sequence[Any]
) -> tuple[Tensor | None, ...]:
    """The gradients of all parameters, from the arguments of a backward."""
    if differentiates_backward():
        if torch.is_grad_enabled() and are_mapped(*arguments[:2]):
            # Autograd would return gradients without a graph.
            refuse_second_derivative(KERNELS.of(name).op)
        found = apply(KERNELS.of(name).gradient_function, *arguments)
    else:
        found = _run_backward(name, *arguments)
    gradients: list[Tensor | None] = [*found, None]
    for place, is_wanted in zip(flags, wanted, strict=True):
        if not is_wanted:
            gradients[order[place]] = None
    return tuple([gradients[place] for place in order])


def autograd_functions(kernels: Any, name: str) -> tuple[Any, Any]:
    """The autograd function of kernels, and the function of its gradients."""
    num_tensors, has_tables, results = kernels.num_tensors, kernels.has_tables, kernels.results
    num_saved = num_tensors + len(results)
    end_numbers = len(kernels.parameters) - has_tables
    # For each argument the place of its gradient among the results of a backward, to which a None is appended.
    trained = ("q", "k", "v", *kernels.gradients)
    order = tuple(trained.index(x) if x in trained else len(trained) for x in kernels.parameters)
    flags = tuple(kernels.parameters.index(x) for x in kernels.flags)

    class Attention(torch.autograd.Function):
        """o and lse, with the gradient of every tensor that has one."""

        again: Any = None
        """The autograd function that a replayed call applies in place of this one."""
        transformed: Any = None
        """The autograd function that a call inside of a transform of `torch.func` applies in place of this one."""
        compile_ahead: Any = None
        """Compiles the kernels of a first call with such arguments, and begins to compile those of its backward."""

        @staticmethod
        def kernels() -> Any:
            """The kernels: torch.compile calls a method of this class, but cannot read an attribute."""
            return KERNELS.of(name)

        @staticmethod
        def forward(*args: Any) -> tuple[Tensor, ...]:
            return _run_forward(name, *args)

        @staticmethod
        def scaled(*args: Any) -> tuple[Tensor, ...]:
            return _run_scaled_forward(name, *args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
            tables = inputs[-1] if has_tables else ()
            ctx.save_for_backward(*inputs[:num_tensors], *outputs, *tables)
            ctx.numbers = inputs[num_tensors:end_numbers]
            if len(outputs) > 2:
                ctx.mark_non_differentiable(outputs[2])
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors
            tables = [list(saved[num_saved:])] if has_tables else []
            do = torch.zeros_like(saved[num_tensors]) if do is None else do
            wanted = [ctx.needs_input_grad[place] for place in flags]
            return _gradients(
                name, order, flags, wanted, (do, dlse, *saved[:num_saved], *ctx.numbers, *tables, *wanted)
            )

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
            for tensor, reason in kernels.undeclared.items():
                refuse_gradient_of(args[kernels.parameters.index(tensor)], kernels.op, tensor, reason)
            return batched(Attention, kernels.parameters, results, kernels.folded_axes, info, in_dims, args)

    class TransformedAttention(Attention):
        """Refuses forward mode of derivatives, such as that of `torch.func.hessian`, whose tangents no check sees.

        torch.compile takes no autograd function with a `jvp`.
        """

        @staticmethod
        def jvp(_ctx: Any, *_tangents: Tensor | None) -> Any:
            refuse_forward_mode(kernels.op)

    class AttentionGradients(torch.autograd.Function):
        """The gradients of `Attention`, which have none of their own."""

        @staticmethod
        def forward(*args: Any) -> tuple[Tensor, ...]:
            return _run_backward(name, *args)

        @staticmethod
        def setup_context(_ctx: Any, _inputs: tuple[Any, ...], _outputs: tuple[Tensor, ...]) -> None:
            """Nothing is saved."""

        @staticmethod
        def backward(_ctx: Any, *_gradients: Tensor | None) -> Any:
            refuse_second_derivative(kernels.op)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
            own, names = ("q", "k", "v", *kernels.gradients), kernels.backward_parameters
            return batched(AttentionGradients, names, own, kernels.folded_axes, info, in_dims, args)

    # torch.compile counts the parameters of a forward to know whether it takes a context.
    for function, parameters in ((Attention, kernels.parameters), (AttentionGradients, kernels.backward_parameters)):
        function.forward.__dict__["__signature__"] = signature_of(parameters)
    Attention.compile_ahead = partial(compile_backward, kernels)
    Attention.transformed = TransformedAttention
    Attention.again = _replayed_function(kernels, name, order, flags)
    return Attention, AttentionGradients


def operator_formulas(kernels: Any) -> tuple[Formula, Formula]:
    """The autograd formulas of the custom operators of kernels: that of the forward, and that of the backward.

    Exported programs and other graphs hold the operators alone, without the autograd function.
    """
    function, places = kernels.function, {name: place for place, name in enumerate(kernels.parameters)}

    def setup(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
        # The tensors of this call may be others than those that were checked when it was traced.
        for tensor, reason in kernels.undeclared.items():
            if ctx.needs_input_grad[places[tensor]]:
                refuse_gradient(kernels.op, tensor, reason)
        if kernels.has_tables:
            *others, tables = inputs
            ctx.no_gradients = None if tables is None else [None] * len(tables)
            inputs = (*others, tables or [])
        function.setup_context(ctx, inputs, outputs)

    def gradients(ctx: Any, *of_results: Tensor | None) -> tuple[Any, ...]:
        found: tuple[Any, ...] = function.backward(ctx, *of_results)
        # torch wants a list in the place of a list.
        return (*found[:-1], ctx.no_gradients) if kernels.has_tables else found

    def refuse(_ctx: Any, *_: Any) -> Any:
        refuse_second_derivative(kernels.op)

    return Formula(setup, gradients), Formula(None, refuse)


def _replayed_function(kernels: Any, name: str, order: Sequence[int], flags: Sequence[int]) -> Any:
    """The autograd function of a `Step` of kernels: no transform sees it."""
    num_tensors, has_tables, num_results = kernels.num_tensors, kernels.has_tables, len(kernels.results)
    end_numbers = len(kernels.parameters) - has_tables

    class Attention(torch.autograd.Function):
        """o from the tensors of a step, its tables last; lse only if the call returns it: each result costs time."""

        @staticmethod
        def forward(ctx: Any, step: Step, pointers: list[int], *given: Tensor) -> Tensor | tuple[Tensor, ...]:
            ctx.seed = step.seed_of(pointers)
            outputs: tuple[Tensor, ...] = step.forward(given, pointers)
            if has_tables:
                ctx.save_for_backward(*given[: step.count], *outputs, *given[step.count :])
            else:
                ctx.save_for_backward(*given, *outputs)
            ctx.step = step
            ctx.set_materialize_grads(False)
            if not step.returns_tuple:
                return outputs[0]
            if num_results > 2:
                ctx.mark_non_differentiable(outputs[2])
            return outputs

        @staticmethod
        def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None = None, *_: None) -> tuple[Tensor | None, ...]:
            step, saved = ctx.step, ctx.saved_tensors
            do = torch.zeros_like(saved[step.count]) if do is None else do
            given = (do, *saved) if dlse is None else (do, dlse, *saved)
            found: tuple[Tensor | None, ...] | None = step.gradients(given, ctx.seed)
            if found is not None:
                return found
            places, end = step.places, step.count + num_results
            tensors: list[Tensor | None] = [None] * num_tensors
            for place, x in zip(places, saved, strict=False):
                tensors[place] = x
            tables = [list(saved[end:])] if has_tables else []
            wanted = [place not in places or ctx.needs_input_grad[2 + places.index(place)] for place in flags]
            numbers = step.numbers[num_tensors:end_numbers]
            if step.seed_place is not None:
                numbers[step.seed_place - num_tensors] = ctx.seed
            arguments = (do, dlse, *tensors, *saved[step.count : end], *numbers, *tables, *wanted)
            gradients = _gradients(name, order, flags, wanted, arguments)
            if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
                unwanted = [place for place, is_wanted in zip(flags, wanted, strict=True) if not is_wanted]
                returned = [-1 if place in unwanted else order[place] for place in places]
                step.learn(given, [*returned, *[-1] * len(saved[end:])], partial(_known_backward, name, arguments))
            return (None, None, *[gradients[place] for place in places], *[None] * len(saved[end:]))

    return Attention


def _known_backward(name: str, arguments: Sequence[Any]) -> Any:
    """What is known of a backward with such arguments: its plan, if there is one."""
    return KERNELS.of(name).backward.__dict__["plan_of"](arguments)
