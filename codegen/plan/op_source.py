"""The source that the op templates print: an op's plan as parameters, argument lists, types and imports."""

from __future__ import annotations

from dataclasses import fields

from codegen.analysis.call_modes import PADDING
from codegen.plan.arguments import Argument
from codegen.plan.frameworks import Framework
from codegen.plan.op import TOKEN_IDS, OpPlan
from codegen.plan.parameters import names, partial_signature, signature
from codegen.plan.signature import CU_SEQLENS
from codegen.spec.symbols import function_symbol


class OpSource(OpPlan):
    """The plan of an op, printed: what is added here is source."""

    @classmethod
    def of(cls, plan: OpPlan) -> OpSource:
        """The printer of a plan."""
        return cls(**{field.name: getattr(plan, field.name) for field in fields(plan)})

    def tables_text(self, prefix: str) -> str:
        """The names of a pass' tables as the target of an assignment."""
        names = [prefix + name for name in self.tables]
        return ", ".join(names) if len(names) > 1 else f"({names[0]},)"

    @property
    def schedule_imports(self) -> list[str]:
        """What the launches import from the runtime's schedules."""
        reduces = self.lists is not None and self.lists.extremes is not None
        names = [
            *(["SEGMENTS"] if self.layout.gives_positions else []),
            *(["POSITIONS", "least_block"] if reduces else []),
        ]
        return sorted([*names, "pass_table"], key=lambda name: (name.islower(), name))

    @property
    def table_makers(self) -> list[str]:
        """The functions of the runtime that launch kernels of its own, or allocate lists."""
        lists = ["list_blocks"] if self.lists is not None and not self.lists.ranges else []
        counter = ["work_counter"] if self.shares_work else []
        return [*(["block_sequences"] if self.layout.has_sequences else []), *lists, *counter]

    @property
    def tiles_call(self) -> str:
        """The call for the tiles of each pass."""
        return f"tiles_of({', '.join(filter(None, ('q', 'v', self.tiles_tokens, 'options')))})"

    @property
    def parameters(self) -> str:
        """Parameters of the forward: q, k, v, the variant's own tensors and scalars, what every pass takes."""
        return signature(self.forward_parameters)

    @property
    def backward_parameters(self) -> str:
        """Parameters of the backward."""
        return signature(self.gradient_parameters)

    @property
    def fake_parameters(self) -> str:
        """Parameters of the forward that a trace sees."""
        return partial_signature(self.forward_parameters, {"q", "v", *(["g"] if self.decay else [])})

    @property
    def fake_backward_parameters(self) -> str:
        """Parameters of the backward that a trace sees."""
        return partial_signature(self.gradient_parameters, {"q", "k", "v", *self.gradients, *self.flags})

    @property
    def tensor_values(self) -> str:
        return ", ".join(["q", "k", "v", *(a.name for a in self.tensors)])

    @property
    def number_values(self) -> str:
        """The arguments for what every pass takes after the tensors."""
        return ", ".join(names(self.options))

    @property
    def function(self) -> str:
        """What the op's module calls it."""
        return function_symbol(self.name)

    @property
    def keywords(self) -> str:
        """The arguments that callers know by another name, as keyword arguments of the decorator that says so."""
        return ", ".join(f'{a.keyword}="{a.name}"' for a in self.arguments if a.public)

    @property
    def mask_keywords(self) -> str:
        """The same for the op's schedule."""
        return ", ".join(f'{a.keyword}="{a.name}"' for a in self.mask_arguments if a.public)

    @property
    def own_keywords(self) -> str:
        return "".join(f"{name}={name}, " for name in self.own_names)

    @property
    def backward_numbers(self) -> str:
        """The arguments of the backward after the tensors."""
        return ", ".join([self.number_values, *self.flags])

    @property
    def fake_gradients(self) -> str:
        """Gradients of the variant's own tensors, for a trace: shapes without values."""
        return "".join(f", {self._fake_gradient(a)}" for a in self.tensors if a.name in self.gradients)

    @staticmethod
    def _fake_gradient(a: Argument) -> str:
        if not a.trained:
            return f"torch.empty_like({a.name})"
        return f"{a.name}.new_empty({a.name}.shape if {a.flag} else (0,))"

    @property
    def saved_numbers(self) -> str:
        """The arguments that every pass takes and autograd cannot save as tensors."""
        return ", ".join(p.name for p in self.numbers if not p.is_tensor)

    @property
    def returned_gradients(self) -> str:
        """What autograd's backward returns: one entry per input of the forward, None where it has no gradient."""
        own = [self._returned(a) for a in self.tensors]
        return ", ".join(["dq", "dk", "dv", *own, *["None"] * len(self.options)])

    def _returned(self, a: Argument) -> str:
        if a.trained:
            return f"d{a.name} if {a.flag} else None"
        return f"d{a.name}" if a.name in self.gradients else "None"

    @property
    def forward_type(self) -> str:
        return f"tuple[{', '.join(['Tensor'] * (3 if self.decay else 2))}]"

    @property
    def backward_type(self) -> str:
        own = "Tensor" if self.framework is Framework.TORCH else "Tensor | Array"
        return f"tuple[{', '.join([*['Tensor'] * 3, *[own] * len(self.gradients)])}]"

    @property
    def table_dtypes(self) -> list[str]:
        """What the launches of JAX import for the types of tables and extremes."""
        if self.lists is None:
            return []
        extremes = self.lists.extremes
        found = set() if extremes is None else {dtype for *_, dtype in extremes.buffers}
        narrow = self.lists.ranges or "int32" in found or (extremes is not None and extremes.position_buffers)
        return [*(["INT32"] if narrow else []), *(["wide_int"] if "int64" in found else [])]

    @property
    def trained_places(self) -> str:
        """Source of the places among the arguments of the forward of the tensors whose gradients the backward gives."""
        places = {name: self.parameter_names.index(name) for name in ("q", "k", "v", *self.gradients)}
        flags = self.flag_of
        return ", ".join(f"{i} if {flags[name]} else None" if name in flags else str(i) for name, i in places.items())

    @property
    def reference_parameters(self) -> str:
        """The parameters of the forward, for the reference, which takes no notice of tiles and tables."""
        unread = {"options", "block_tables", *self.unread_positions}
        if not self.has_offset:
            unread |= {"row_offset", "row_offsets"}
        return partial_signature(self.forward_parameters, set(self.parameter_names) - unread)

    @property
    def reference_values(self) -> str:
        """The arguments of the reference but `scale` and `return_lse`."""
        own = [a.name for a in self.arguments if a.name not in TOKEN_IDS and a.name != PADDING.name]
        dropout = ["dropout_p", "seed"] if self.dropout else []
        given = [name for name in TOKEN_IDS if name in self.parameter_names]
        tokens = (
            [*given, PADDING.name]
            if self.layout.gives_positions
            else list(CU_SEQLENS)
            if self.layout.has_sequences
            else []
        )
        named = [f"{name}={name}" for name in (*own, *dropout, *tokens, *self.positions)]
        offset = ["q_offset=row_offset if row_offsets is None else row_offsets"] if self.has_offset else []
        return ", ".join(["q", "k", "v", *named, *offset])

    @property
    def integer_names(self) -> str:
        """Source of the names of its own tensors that the kernels read as int32."""
        return ", ".join(f'"{a.name}"' for a in self.tensors if a.dtype == "int32" and a.name not in TOKEN_IDS)

    @property
    def reductions(self) -> list[str]:
        """The functions that make gradients of gathered sums."""
        names = (
            "packed_row",
            "place_pairs",
            "place_sums",
            "reduce_gradient",
            "scalar_array",
            "sequence_of_rows",
            "sums_by_sequence",
        )
        return [name for name in names if name in self.gradient_reads]

    @property
    def scalar_checks(self) -> list[str]:
        """The functions that check its scalars."""
        return sorted({f"check_{a.required}" for a in self.scalars})

    @property
    def runtime_checks(self) -> list[str]:
        """What the op imports from the runtime's checks."""
        used = frozenset().union(*(a.check_functions for a in self.arguments))
        known = {"FLOAT_DTYPES", "at_least", "check_float", "check_int", "computed", "size_of"}
        own = used & known
        return sorted([*own, *(["check_dropout_p"] if self.dropout else [])])
