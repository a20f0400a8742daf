"""The source that the op templates print: an op's plan as parameters, argument lists, types and imports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from codegen.analysis.call_modes import PADDING
from codegen.plan.kernels.kernel import KernelPlan
from codegen.plan.ops.arguments import Argument
from codegen.plan.ops.frameworks import Framework
from codegen.plan.ops.launch_arguments import LaunchGroup
from codegen.plan.ops.op import TOKEN_IDS, OpPlan
from codegen.plan.ops.parameters import names, signature
from codegen.spec.symbols import function_symbol

_PTX = "backend.is_nvidia(q)"
"""Source of the constant that says whether kernels may hold PTX."""


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
    def launch_imports(self) -> list[str]:
        """The names that the launches import from the code that all launches share."""
        prefix = "packed_" if self.layout.has_sequences else ""
        names = ["Backend", "Tensor", "delta_constants", "empty_gradients", "tile_constants", "tiles_of"]
        names += [f"{prefix}strides", f"{prefix}unit_strides"]
        names += ["dq_rows_constants"] if self.fuses_backward else []
        names += ["grid_run"] if self.grid_runs is not None else []
        names += ["row_stride"] if self.takes_row_strides else []
        names += ["tables_of"] if self.tables else []
        return sorted(names, key=lambda name: (name.islower(), name))

    @property
    def constants(self) -> dict[str, str]:
        """Constants of kernels besides tiles, wanted gradients and a cut last block: name -> source."""
        found = {"Q_OFFSET_PER_BATCH": "row_offsets is not None"} if self.has_offset else {}
        if self.loadable:
            found["SCALARS_LOADED"] = f"backend.is_loaded({', '.join(self.loadable)})"
        if self.positions:
            found["POSITIONS"] = f"{self.positions[0]} is not None"
        if self.grid_runs is not None:
            found["GRID_RUN"] = f"grid_run(backend, {self.grid_runs.text})"
        if self.reads_pairs:
            found["PTX"] = _PTX
        if self.uses_tanh:
            found["HARDWARE_TANH"] = "backend.has_tanh_instruction(q)"
        return found | ({"DROPOUT": "threshold > 0"} if self.dropout else {})

    def constants_of(self, kernel: KernelPlan) -> dict[str, str]:
        """The `constants` that a kernel of Hopper's backward takes, which may read no positions."""
        lacked = self.constants_beside(kernel)
        return {name: source for name, source in self.constants.items() if name not in lacked}

    def constants_beside(self, kernel: KernelPlan) -> dict[str, str]:
        """The `constants` that a kernel of Hopper's backward does not take."""
        read = {"Q_OFFSET_PER_BATCH": kernel.has_offset, "POSITIONS": kernel.has_positions}
        return {name: source for name, source in self.constants.items() if not read.get(name, True)}

    def own_constants(self, kernel: KernelPlan, beside: KernelPlan | None = None) -> dict[str, str]:
        """Constants of a portable kernel alone: those that Hopper's kernel `beside` it lacks, and its own."""
        shared_by_none = {} if beside is None else self.constants_beside(beside)
        needs_ptx = "PTX" in kernel.constants and not self.reads_pairs
        narrow = {} if kernel.narrow is None else {"NARROW": kernel.narrow.text}
        return shared_by_none | ({"PTX": _PTX} if needs_ptx else {}) | narrow

    @staticmethod
    def groups(launched: Sequence[LaunchGroup]) -> list[str]:
        """The arguments of a launch, as tuples."""
        return [group.text for group in launched]

    @property
    def tiles_call(self) -> str:
        """The call for the tiles of each pass."""
        band = "" if self.band_keys is None else f"band_keys={self.band_keys.text}"
        arguments = ["backend", f'"{self.name}"', f'"{self.mode}"', "q", "v", "options", self.tiles_tokens, band]
        return f"tiles_of({', '.join(filter(None, arguments))}{self.tiles_runs})"

    @property
    def tiles_runs(self) -> str:
        """The last argument of a call for tiles: how long the runs are whose blocks the mask chooses, if it does so."""
        return "" if self.tile_runs is None else f", runs=({self.tile_runs.text},)"

    @property
    def parameters(self) -> str:
        """Parameters of the forward: q, k, v, the variant's own tensors and scalars, what every pass takes."""
        return signature(self.forward_parameters)

    @property
    def backward_parameters(self) -> str:
        """Parameters of the backward."""
        return signature(self.gradient_parameters)

    @property
    def tensor_values(self) -> str:
        return ", ".join(["q", "k", "v", *(a.name for a in self.tensors)])

    @property
    def number_values(self) -> str:
        """The arguments for what every pass takes after the tensors."""
        return ", ".join(names(self.options))

    @property
    def function(self) -> str:
        """The name of the op's function in its module."""
        return function_symbol(self.name)

    @property
    def keywords(self) -> str:
        """Public keyword of an argument with another name -> this name, as keyword arguments of a decorator."""
        return ", ".join(f'{a.keyword}="{a.name}"' for a in self.arguments if a.public)

    @property
    def mask_keywords(self) -> str:
        """The `keywords` of the arguments that the op's schedule takes."""
        return ", ".join(f'{a.keyword}="{a.name}"' for a in self.mask_arguments if a.public)

    @property
    def values_of_runs(self) -> str:
        """The arguments of the packed forward when it computes the runs of a segmented call."""
        own = [a.name for a in self.arguments if a.name not in (*TOKEN_IDS, PADDING.name)]
        offset = ["row_offsets", "row_offset"] if self.has_offset else []
        given = {name: name for name in ("q", "k", "v", *own, *offset, "scale")}
        given |= {"cu_seqlens_q": "None", "cu_seqlens_k": "None", "options": "OPTIONS", "block_tables": "[runs]"}
        return ", ".join(f"{name}={value}" for name, value in {**given, "results": "(o, lse)"}.items())

    @property
    def runs_parameters(self) -> list[str]:
        """The variant's own tensors and numbers that the packed backward of runs takes."""
        own = [a.name for a in self.arguments if a.name not in (*TOKEN_IDS, PADDING.name)]
        return [*own, *(["row_offset"] if self.has_offset else [])]

    @property
    def gradients_of_runs(self) -> str:
        """The arguments of the packed backward when it computes the runs of a segmented call."""
        given = ["do", "q", "k", "v", "runs", "dq_sums", "head_groups", *self.runs_parameters, "scale", "tile"]
        return ", ".join(given)

    @property
    def query_gradients_of_runs(self) -> str:
        """The arguments of the packed dq when it computes the runs of a segmented call."""
        given = ["o", "do", "dlse", "q", "k", "v", "lse", "runs.query_rows", "delta", "dq"]
        return ", ".join([*given, *self.runs_parameters, "scale", 'tiles["dq"]'])

    @property
    def forward_type(self) -> str:
        return f"tuple[{', '.join(['Tensor'] * (3 if self.decay else 2))}]"

    @property
    def integer_names(self) -> str:
        """Source of the names of its own tensors that the kernels read as int32."""
        return ", ".join(f'"{a.name}"' for a in self.tensors if a.dtype == "int32" and a.name not in TOKEN_IDS)

    @property
    def reductions(self) -> list[str]:
        """The functions that make gradients of gathered sums."""
        names = (
            "distance_sums",
            "head_sums",
            "lag_grid",
            "lag_sums",
            "packed_row",
            "place_pairs",
            "place_sums",
            "reduce_gradient",
            "scalar_array",
            "sequence_of_rows",
            "sums_by_sequence",
        )
        return [name for name in names if name in self.gradient_reads]

    def reductions_of(self, *others: OpSource) -> list[str]:
        """The `reductions` of all those of several modes that compute gradients."""
        found = {name for op in (self, *others) if op.computes_gradients for name in op.reductions}
        return sorted(found)

    @property
    def has_rows(self) -> bool:
        """True if one of its own tensors has an element for each query."""
        return any("q_idx" in a.dims for a in self.tensors)

    def checks_read_offset(self, arguments: Sequence[Argument]) -> bool:
        """True if the checks of these tensors read the position of the first query."""
        return any("row_offset" in a.check for a in arguments if a.is_tensor)

    def checks_read_positions(self, arguments: Sequence[Argument]) -> list[str]:
        """The positions that the checks of these tensors read, because they ask whether a call gives any."""
        checks = [a.check for a in arguments if a.is_tensor]
        return [name for name in ("q_positions", "kv_positions") if any(name in check for check in checks)]

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
        return sorted([*own, *(["check_dropout_p", "dropout_coordinates"] if self.dropout else [])])

    @property
    def launched_parameters(self) -> list[str]:
        """The parameters of the forward that its framework passes: in JAX code around the launches reads the others."""
        unread = self.unread_positions if self.framework is Framework.JAX else []
        return [name for name in self.parameter_names if name not in unread]

    @property
    def scalar_types(self) -> dict[str, str]:
        """Its own scalars, with their types."""
        return {a.name: a.required for a in self.scalars if a.name != PADDING.name}

    @property
    def gradient_parameters_read(self) -> str:
        """The parameters of the function that computes the gradients of its own tensors."""
        own = {"jnp", "scalar_math", "torch", *self.reductions, *(grid.name for grid in self.grids)}
        flags = {flag for name, flag in self.flag_of.items() if name in self.gradients} | set(self.placed)
        read = sorted((self.gradient_reads | flags) - own)
        types = dict.fromkeys(_SIZES, "int") | dict.fromkeys(flags, "bool")
        return ", ".join(["*", *(f"{name}: {types.get(name, 'Any')}" for name in read), "**_: Any"])

    @property
    def gradient_code(self) -> tuple[object, ...]:
        """The parts of the function that computes gradients: modes whose parts are equal share one function."""
        return (self.gradients, self.grids, self.placed)


_SIZES = ("batch", "num_heads", "num_kv_heads", "group_size", "q_len", "kv_len", "num_seqs")
"""Sizes of a call, by the names that the runtime's `gradient_sizes` gives them."""
