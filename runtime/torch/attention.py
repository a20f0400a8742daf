"""The kernels of an op in one mode of calls, as PyTorch knows them: an autograd function, and two custom operators."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..core.configs import PASSES, Tiles
from ..core.fp8 import SCALES
from ..core.launches import empty_gradients, gradient_sizes, tiles_of
from ..core.options import CallOptions
from ..kernels import TRAITS
from . import backend
from .ahead import Ahead, wait_for_backward
from .devices import interprets
from .dispatch import launches_directly
from .dtypes import FP32, result_dtype
from .flops import of_backward, of_forward, register_flops
from .functions import KERNELS, autograd_functions, operator_formulas, signature_of
from .gradients import sequence_of_rows
from .operators import namespace_of, register_operator
from .plain import plain_backward, plain_forward
from .replay import replayed
from .strides import batch_row, empty_like_layout, in_memory, packed_rows
from .transforms import folded_axes

_TYPES = {
    "row_offsets": Tensor | None,
    "q_positions": Tensor | None,
    "kv_positions": Tensor | None,
    "padding_id": int,
    "row_offset": int,
    "seed": int,
    "first_head": int,
    "all_heads": int,
    "row_origin": int,
    "key_origin": int,
    "dropout_p": float,
    "scale": float,
    "options": CallOptions,
    "block_tables": list[Tensor],
}
"""Types of the parameters that any op may have. All others are tensors, except the scalars of the variant."""

_ROWS = ("q", "k", "v", "o", "do")

_DENSE = ("lse", "dlse", "decay", "row_offsets", "cu_seqlens_q", "cu_seqlens_k")
"""Arguments that kernels read without strides."""

_DENSE_ROWS = ("q_positions", "kv_positions")
"""Arguments of which kernels know the stride of rows alone."""


class Kernels:
    """The kernels of a variant in one mode of calls.

    Attributes:
        op: the variant's name, with which error messages begin. mode: dense, packed or segmented.
        parameters: names of the parameters of the forward's launch, which the autograd `function` takes: tensors, then
            numbers, then the tables of blocks. backward_parameters: names of those of the backward's launch.
        function: the autograd function: o and lse from q, k and v `[B, H, S, D]`, or `[total, H, D]` in a packed call.
        forward, backward: launch the kernels. forward_op, backward_op: do the same as custom operators, which
            torch.compile, torch.export and fake tensors see in place of the launches.
    """

    def __init__(
        self,
        *,
        op: str,
        mode: str,
        modules: Any,
        reference: Callable[..., Any],
        parameters: Sequence[str],
        dims: Mapping[str, tuple[str | int, ...]] | None = None,
        scalars: Mapping[str, type] | None = None,
        flags: Mapping[str, str] | None = None,
        gradients: Sequence[str] = (),
        sums: Sequence[str] = (),
        own_gradients: Callable[..., tuple[Tensor, ...]] | None = None,
        undeclared: Mapping[str, str] | None = None,
        splits_batch: bool = True,
    ) -> None:
        """`modules` is the package of the mode, whose `launch` is imported by the first call.

        Args:
            reference: the plain reference.
            dims: dimensions of the variant's own tensors in this mode. scalars: its own numbers, with their types.
            gradients: the tensors that have a gradient besides q, k and v. flags: tensor -> the parameter that asks for
                its gradient, if any.
            sums: names of what the launch of the backward returns after dq, dk and dv. own_gradients: computes the
                `gradients`, in their order, from these sums; without it the sums are the gradients.
            undeclared: float tensors without a gradient -> why they have none.
            splits_batch: True if the index of a batch row only selects the elements that the row reads.
        """
        self.op, self.mode, self.modules, self.reference = op, mode, modules, reference
        self.parameters = tuple(parameters)
        self.gradients, self.flags, self.undeclared = tuple(gradients), dict(flags or {}), dict(undeclared or {})
        self._sums, self._own_gradients = tuple(sums), own_gradients
        self._types = dict.fromkeys(self.parameters, Tensor) | _TYPES | dict(scalars or {})
        self.num_tensors = sum(self._types[name] in (Tensor, Tensor | None) for name in self.parameters)
        self.has_tables = "block_tables" in self.parameters
        self.results = ("o", "lse", *(["decay"] if "g" in self.parameters else []))
        tensors, numbers = self.parameters[: self.num_tensors], self.parameters[self.num_tensors :]
        self.backward_parameters = ("do", "dlse", *tensors, *self.results, *numbers, *self.flags.values())
        self.folded_axes = folded_axes(mode, tensors, self.results, dims or {}) if splits_batch else {}
        self.forward = replayed(self._forward, parameters=self.parameters)
        self.backward = replayed(self._backward, parameters=self.backward_parameters)
        self.forward_kernels, self.backward_kernels = self._forward, self._backward
        self.compiled, self.ahead = set[Any](), list[Ahead]()
        name = f"{NAMESPACE}::{op}" if mode == "dense" else f"{NAMESPACE}::{op}_{mode}"
        setattr(KERNELS, name, self)
        self.function, self.gradient_function = autograd_functions(self, name)
        forward_formula, backward_formula = operator_formulas(self)
        types = self._types | {"dlse": Tensor | None} | dict.fromkeys(self.flags.values(), bool)
        signature = signature_of(self.parameters, types, len(self.results))
        operator = (f"{name}_fwd", self._forward, self.fake_forward, signature)
        self.forward_op = register_operator(*operator, formula=forward_formula)
        register_flops(operator[0], self.parameters, of_forward)
        signature = signature_of(self.backward_parameters, types, 3 + len(self.gradients))
        operator = (f"{name}_bwd", self._backward, self.fake_backward, signature)
        self.backward_op = register_operator(*operator, formula=backward_formula)
        register_flops(operator[0], self.backward_parameters, of_backward)
        if TRAITS[op].takes_fp8:
            self.scaled_forward = replayed(self._scaled_forward)
            signature = signature_of((*self.parameters, *SCALES), types, 2)
            operator = (f"{name}_fp8", self._scaled_forward, self.fake_scaled_forward, signature)
            self.scaled_forward_op = register_operator(*operator)
            register_flops(operator[0], self.parameters, of_forward)

    def tiles(
        self,
        q: Tensor,
        v: Tensor,
        options: CallOptions,
        tokens: Tensor | None = None,
        runs: Sequence[int | Tensor] = (),
    ) -> Tiles:
        """The tiles of each pass. q and v are `[B, H, S, D]`; `tokens` are cu_seqlens_q or q_segment_ids. `runs`: as in
        `tiles_of`."""
        return tiles_of(backend, self.op, self.mode, q, v, options, tokens, runs=runs)

    def tables(self, *args: Any, backward: bool) -> list[Tensor]:
        """The tables of a schedule, by the mode's `make_tables`: for all passes if `backward`, else for the forward.

        Of fake tensors there are none, as of meta tensors.
        """
        if isinstance(args[0], FakeTensor):
            return []
        read = map(in_memory, args)
        tables: list[Tensor] = self.modules.launch.make_tables(backend, *read, PASSES if backward else PASSES[:1])
        return tables

    def _as_rows(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a launch, in which packed tensors become one batch row."""
        if self.mode != "packed":
            return given
        return {name: batch_row(x) if name in _ROWS else x for name, x in given.items()}

    def _of_rows(self, *results: Tensor) -> tuple[Tensor, ...]:
        """The inverse of `_as_rows` for newly made tensors."""
        return tuple(map(packed_rows, results)) if self.mode == "packed" else results

    # -------------------------------------------------------------------------------------------------------- launches

    def _forward(self, *args: Any) -> tuple[Tensor, ...]:
        given = self._as_rows(dict(zip(self.parameters, args, strict=True)))
        options: CallOptions = given["options"]
        if options.plain:
            self._check_tiles(given)
            return plain_forward(self._reference, self.fake_forward(*args), *args)
        o, *others = self.modules.launch.forward(backend, **_in_memory(given))
        return (*self._of_rows(o), *others)

    def _check_tiles(self, given: dict[str, Any]) -> None:
        """Refuse tiles and a family that the kernels would refuse, for a call that computes the reference."""
        if not given["q"].is_meta:
            tokens = given.get("cu_seqlens_q", given.get("q_segment_ids"))
            self.tiles(given["q"], given["v"], given["options"], tokens)

    def _scaled_forward(self, *args: Any) -> tuple[Tensor, ...]:
        """o and lse of 8-bit q, k and v. `args` are the arguments of the forward, then the `SCALES`."""
        given, scales = dict(zip(self.parameters, args, strict=False)), args[len(self.parameters) :]
        if given["options"].plain or interprets(args[0]):
            self._check_tiles(self._as_rows(given))
            places = (("q", "cu_seqlens_q"), ("k", "cu_seqlens_k"), ("v", "cu_seqlens_k"))
            for (name, sequences), scale in zip(places, scales, strict=True):
                given[name] = dequantised(given[name], scale, given.get(sequences))
            return plain_forward(self._reference, self.fake_scaled_forward(*args), *given.values())
        o, lse, *_ = self.modules.launch.forward(
            backend, **_in_memory(self._as_rows(given)), scales=[*map(in_memory, scales)]
        )
        return (*self._of_rows(o), lse)

    def _backward(self, *args: Any) -> tuple[Tensor, ...]:
        named = dict(zip(self.backward_parameters, args, strict=True))
        if named["options"].plain:
            trained = ("q", "k", "v", *self.gradients)
            wanted = [named.get(self.flags.get(name, ""), True) for name in trained]
            places = [self.parameters.index(x) if y else None for x, y in zip(trained, wanted, strict=True)]
            forwarded = [named[name] for name in self.parameters]
            results = self.fake_backward(*args)
            whole = (named["o"], named["lse"]) if named["options"].wide_keys else None
            return plain_backward(self._reference, results, named["do"], named["dlse"], places, whole, *forwarded)
        wait_for_backward(self)
        given = _in_memory(self._as_rows(named))
        dq, dk, dv, *own = self.modules.launch.backward(backend, **given)
        if self._own_gradients is not None:
            sums = dict(zip(self._sums, own, strict=True))
            own = list(self._own_gradients(**{**given, **gradient_sizes(given), **sums}))
        return (*self._of_rows(dq, dk, dv), *own)

    def _reference(self, *args: Any) -> Any:
        """o and lse by the plain reference, from the arguments of the forward."""
        given = dict(zip(self.parameters, args, strict=True))
        row_offset, row_offsets = given.pop("row_offset", 0), given.pop("row_offsets", None)
        read = {name: x for name, x in given.items() if name not in ("options", "block_tables")}
        return self.reference(**read, q_offset=row_offset if row_offsets is None else row_offsets, return_lse=True)

    def gradients_of(
        self,
        do: Tensor,
        dlse: Tensor | None,
        o: Tensor,
        lse: Tensor,
        args: Sequence[Any],
        *,
        wanted: Sequence[str],
        wide_dq: bool,
    ) -> dict[str, Tensor]:
        """Gradients of a call whose o and lse are known, by the name of the tensor.

        They are the gradients of q, k and v and of the `wanted` ones of the variant's own tensors. Those of k and v are
        float32, and that of q is if `wide_dq`. `args` are the arguments of the forward.
        """
        given = dict(zip(self.parameters, args, strict=True))
        q, options = given["q"], given["options"].widely(queries=wide_dq)
        given |= {"options": options, "o": o.to(q.dtype), "lse": lse.contiguous(), "do": do.to(q.dtype), "dlse": dlse}
        if "decay" in self.results:
            given["decay"] = self._decay(given, args)
        given |= {flag: name in wanted for name, flag in self.flags.items()}
        passed = [given[name] for name in self.backward_parameters]
        found = (self.backward if launches_directly(*passed) else self.backward_op)(*passed)
        names = ("q", "k", "v", *self.gradients)
        return {name: x for name, x in zip(names, found, strict=True) if name in ("q", "k", "v", *wanted)}

    def _decay(self, given: Mapping[str, Any], args: Sequence[Any]) -> Tensor:
        """The running sum of a log-decay, as the forward computes it."""
        q = given["q"]
        if not launches_directly(*args):
            found: Tensor = self.forward_op(*args)[2]
            return found
        rows = self._as_rows({"q": q})["q"]
        decay: Tensor = q.new_empty((*rows.shape[:2], given["g"].shape[0 if self.mode == "packed" else 1]), dtype=FP32)
        if not given["options"].plain and decay.numel() > 0:
            sequences = (given["cu_seqlens_k"],) if self.mode == "packed" else ()
            self.modules.launch.fill_decay(backend, in_memory(given["g"]), *sequences, decay)
        return decay

    # ----------------------------------------------------------------------------------------------- what a trace sees

    def fake_forward(self, *args: Any) -> tuple[Tensor, ...]:
        """What the forward returns, without values."""
        given = self._as_rows(dict(zip(self.parameters, args, strict=True)))
        q, v, packed = given["q"], given["v"], self.mode == "packed"
        o, lse = empty_like_layout(q, v.shape[3]), q.new_empty(q.shape[1:3] if packed else q.shape[:3], dtype=FP32)
        if "g" not in given:
            return (*self._of_rows(o), lse)
        decay = q.new_empty((q.shape[0], q.shape[1], given["g"].shape[0 if packed else 1]), dtype=FP32)
        return (*self._of_rows(o), lse, decay)

    def fake_scaled_forward(self, *args: Any) -> tuple[Tensor, ...]:
        """What the forward of 8-bit q, k and v returns, without values: o is bfloat16."""
        o, lse, *_ = self.fake_forward(*args[: len(self.parameters)])
        return torch.empty_like(o, dtype=result_dtype(args[0])), lse

    def fake_backward(self, *args: Any) -> tuple[Tensor, ...]:
        """What the backward returns, without values."""
        given = self._as_rows(dict(zip(self.backward_parameters, args, strict=True)))
        own = []
        for name in self.gradients:
            x = given[name]
            flag = self.flags.get(name)
            own.append(torch.empty_like(x) if flag is None else x.new_empty(x.shape if given[flag] else (0,)))
        inputs = (given["q"], given["k"], given["v"])
        return (*self._of_rows(*empty_gradients(backend, *inputs, given["options"])), *own)


def _in_memory(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a launch, as kernels read them. Those of an element of a `vmap` may be views of any strides."""
    found = {name: in_memory(x) for name, x in given.items()}
    for name, x in found.items():
        if x is not None and (name in _DENSE or (name in _DENSE_ROWS and x.stride(-1) != 1)):
            found[name] = x.contiguous()
    return found


def dequantised(x: Tensor, scale: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """`[B, H, S, D]`, or packed `[total, H, D]`, times its scale, in float32."""
    if cu_seqlens is None:
        return x.float() * scale[:, :, None, None]
    return x.float() * scale[sequence_of_rows(cu_seqlens, x.shape[0])][:, :, None]


NAMESPACE = namespace_of(__name__.rsplit(".", 3)[0])
