"""The positional arguments of a launch, in the groups that it is printed with: pointers, strides, numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType

from codegen.plan.code.host import HostCode, host, listed, names_of
from codegen.plan.kernels.kernel import ArgGroup, KernelPlan

_WIDTH = 100
"""A group with more characters than this is printed as two: a group takes one line."""

_OF_SEVERAL = ("strides", "unit_strides", "packed_strides", "packed_unit_strides")
"""Functions of the runtime that give the strides of several tensors, one after the other."""


@dataclass(frozen=True)
class LaunchGroup:
    """Arguments that a launch passes as one tuple."""

    parts: tuple[HostCode, ...]

    @property
    def text(self) -> str:
        """The source of the tuple.

        >>> LaunchGroup((host("{}", "q"),)).text, LaunchGroup((host("*strides({})", "o"),)).text
        ('(q,)', 'strides(o)')
        """
        text = listed(self.parts).text
        if len(self.parts) == 1 and _function(self.parts[0].form) in _OF_SEVERAL:
            return text[1:]
        return f"({text})" if len(self.parts) > 1 or ", " in self.parts[0].form else f"({text},)"

    @property
    def names(self) -> frozenset[str]:
        """The variables and functions that it reads."""
        return names_of(self.parts)


def launch_groups(
    kernel: KernelPlan, made: Sequence[str] = (), renamed: Mapping[str, str] = MappingProxyType({})
) -> list[LaunchGroup]:
    """The arguments of a kernel's launch, in the order of its signature.

    `made`: the buffers that the launch keeps in the list `block_extremes`, in order. `renamed`: name in the arguments
    -> name in the launch.
    """
    found = []
    for _, groups in groupby(_with_list(kernel.args, made), _kind):
        parts = _merged([group.host.renamed(renamed) for group in groups])
        found += _lines(parts)
    return found


def _kind(group: ArgGroup) -> str:
    if group.loadable or any(name.endswith("_ptr") or name == "q_offset" for name in group.names):
        return "pointers"
    is_layout = all(name.startswith("stride_") or "_size_" in name for name in group.names)
    return "strides" if is_layout else "numbers"


def _with_list(args: Iterable[ArgGroup], made: Sequence[str]) -> list[ArgGroup]:
    """The arguments with one entry, the list, in place of all buffers in it."""
    found: list[ArgGroup] = []
    listed_names: list[str] = []
    for group in args:
        if not set(group.host.holes) & set(made):
            found.append(group)
            continue
        if not listed_names:
            found.append(replace(group, host=host("*{}", "block_extremes")))
        listed_names += group.host.holes
    assert listed_names == list(made)
    return found


def _merged(parts: Iterable[HostCode]) -> list[HostCode]:
    """The parts with one call for the strides of tensors that follow each other."""
    found = []
    for form, same in groupby(parts, lambda part: part.form):
        calls = list(same)
        function = _function(form)
        if function in _OF_SEVERAL:
            found.append(host(f"*{function}({{}})", listed(name for call in calls for name in call.holes)))
        else:
            found += calls
    return found


def _function(form: str) -> str:
    """The function whose results a piece of source passes, if the source is one call; else some other text."""
    return form.removeprefix("*").partition("(")[0] if form.endswith("})") else form


def _lines(parts: Sequence[HostCode]) -> list[LaunchGroup]:
    """Groups that fit a line each."""
    lines: list[list[HostCode]] = [[]]
    for part in parts:
        if lines[-1] and len(listed([*lines[-1], part]).text) > _WIDTH:
            lines.append([])
        lines[-1].append(part)
    return [LaunchGroup(tuple(line)) for line in lines]
