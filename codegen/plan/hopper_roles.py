"""The partitions of a warp-specialised kernel: which of the kernel's arguments each of them takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from codegen.plan.kernel import KernelPlan
from codegen.plan.statements import Part, calls

MATH = ("clamp_index", "floor_div", "floor_mod", "load_pairs", "log1p", "round_even", "sigmoid", "tan", "tanh")
"""The functions of `runtime/device/gl_math.py`."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """A function that one or more warps of a program run.

    `reads`: the names that its statements read. Of the kernel's arguments it takes the `tensors`, known at run time,
    and the `literals`, which are compiled in.
    """

    reads: frozenset[str]
    tensors: Sequence[str]
    literals: Sequence[str]


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


def sorted_names(names: Iterable[str]) -> list[str]:
    """Imported names in the order that linters want: constants, classes, functions."""
    return sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))


def math_imports(parts: Iterable[Part]) -> list[str]:
    """What the code calls of `gl_math`."""
    called = calls(parts)
    return [name for name in MATH if name in called]
