"""The partitions of a warp-specialised kernel: which of the kernel's arguments each of them takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from codegen.plan.code.statements import Assign, Part, Statement, calls, defines, free, uses
from codegen.plan.kernels.kernel import KernelPlan

MATH = (
    "clamp_index",
    "floor_div",
    "floor_div_any",
    "floor_mod",
    "load_grid",
    "load_pairs",
    "log1p",
    "round_even",
    "sigmoid",
    "tan",
    "tanh",
)
"""The functions of `runtime/device/gl_math.py`."""

LINE_OF_NAMES = 90
"""Most characters of names that a function unpacks from one tuple; longer lists are split into several tuples."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """A function that one or more warps of a program run.

    `reads`: the names that its statements read. Of the kernel's arguments it takes the `tensors`, known at run time,
    and the `literals`, which are compiled in.
    """

    reads: frozenset[str]
    tensors: Sequence[str]
    literals: Sequence[str]

    @property
    def groups(self) -> dict[str, list[str]]:
        """Name of a tuple that the function takes -> the `tensors` in it: pointers, strides or numbers. Empty if one
        tuple that fits a line has them all."""
        if len(", ".join(self.tensors)) <= LINE_OF_NAMES:
            return {}
        found: dict[str, list[str]] = {"pointers": [], "strides": [], "numbers": []}
        for name in self.tensors:
            is_pointer = name.endswith("_ptr") or name == "q_offset"
            found["pointers" if is_pointer else "strides" if name.startswith("stride_") else "numbers"].append(name)
        return {group: names for group, names in found.items() if names}


def role(kernel: KernelPlan, args: Iterable[str], constants: Iterable[str], reads: Iterable[str], own: str) -> Role:
    """The role whose statements read `reads`, and whose own text in the template reads the names in `own`."""
    every = {*own.split(), *reads}
    taken = [name for name in args if name in every]
    compiled = set(kernel.compiled)
    return Role(
        reads=frozenset(reads),
        tensors=[name for name in taken if name not in compiled],
        literals=[name for name in taken if name in compiled] + [name for name in constants if name in every],
    )


@dataclass(frozen=True, kw_only=True)
class VisitFunction:
    """A function of a kernel file that counts the blocks which a block visits, so that every role calls it.

    `results` are the names that the loops over these blocks read.
    """

    statements: Sequence[Statement]
    results: Sequence[str]

    @property
    def tensors(self) -> list[str]:
        """The function's arguments that are known at run time."""
        return [name for name in self._free if not name.isupper()]

    @property
    def literals(self) -> list[str]:
        """The function's arguments that are compiled in."""
        return [name for name in self._free if name.isupper()]

    @property
    def _free(self) -> list[str]:
        return sorted(free(self.statements) - {"LOG2E"})

    def results_for(self, reads: Iterable[str]) -> list[str]:
        """The names that a caller which reads `reads` gives the results; unread ones start with `_`."""
        read = set(reads)
        return [name if name in read else f"_{name}" for name in self.results]


def visit_function(statements: Sequence[Statement], loops: Iterable[Part]) -> VisitFunction | None:
    """The function with these statements, whose results `loops` read; None if one or two statements compute them."""
    if sum(isinstance(statement, Assign) for statement in statements) < 3:
        return None
    read = uses(loops)
    results = dict.fromkeys(name for name in defines(statements) if name in read)
    return VisitFunction(statements=statements, results=list(results))


def sorted_names(names: Iterable[str]) -> list[str]:
    """Imported names in the order that linters want: constants, classes, functions."""
    return sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))


def math_imports(parts: Iterable[Part]) -> list[str]:
    """The functions of `gl_math` that the code calls."""
    called = calls(parts)
    return [name for name in MATH if name in called]


def joined_imports(*imports: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Module of the device library -> the names that a file with several kernels takes from it, of all its kernels."""
    found: dict[str, set[str]] = {}
    for own in imports:
        for module, names in own.items():
            found.setdefault(module, set()).update(names)
    return {module: sorted_names(found[module]) for module in sorted(found)}
