"""The loops over a mask's blocks, as the templates print them, run as plain Python: which blocks they visit.

The statements and loops of `shared/program.jinja` (portable) and `codegen.plan.hopper.visits` (Hopper) are rendered
as for a kernel and executed with stand-ins for `tl` and `gl`: 32-bit integers whose division truncates as a GPU's does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, SupportsInt

import jinja2
import numpy as np

from codegen.analysis.call_modes import Mode
from codegen.analysis.schedule import analyse
from codegen.ir.evaluate import Array
from codegen.ir.expr import Expr, TensorSpec
from codegen.plan.code.loop_bounds import LoopBounds, key_bounds, query_bounds
from codegen.plan.code.lower import Lowering
from codegen.plan.hopper.visits import full_start, partial_start, visit_counts
from codegen.plan.kernels.token_layout import token_layout
from codegen.render.package import make_environment, templates_path


class Int32(int):
    """A number of a kernel: `//` rounds toward zero, and sums wrap around."""

    def __new__(cls, value: SupportsInt) -> Int32:
        return super().__new__(cls, (int(value) + 2**31) % 2**32 - 2**31)

    def __add__(self, other: int) -> Int32:
        return Int32(int(self) + int(other))

    def __sub__(self, other: int) -> Int32:
        return Int32(int(self) - int(other))

    def __rsub__(self, other: int) -> Int32:
        return Int32(int(other) - int(self))

    def __mul__(self, other: int) -> Int32:
        return Int32(int(self) * int(other))

    def __neg__(self) -> Int32:
        return Int32(-int(self))

    def __floordiv__(self, other: int) -> Int32:
        return _truncated(self, other)

    def __rfloordiv__(self, other: int) -> Int32:
        return _truncated(other, self)

    __radd__, __rmul__ = __add__, __mul__

    # Generated code inverts the result of a comparison by `~`, which treats Python's booleans as numbers.
    def __lt__(self, other: int) -> np.bool_:  # type: ignore[override, misc]
        return np.bool_(int(self) < int(other))

    def __le__(self, other: int) -> np.bool_:  # type: ignore[override, misc]
        return np.bool_(int(self) <= int(other))

    def __gt__(self, other: int) -> np.bool_:  # type: ignore[override, misc]
        return np.bool_(int(self) > int(other))

    def __ge__(self, other: int) -> np.bool_:  # type: ignore[override, misc]
        return np.bool_(int(self) >= int(other))

    def __eq__(self, other: object) -> np.bool_:  # type: ignore[override]
        return np.bool_(int.__eq__(self, other))

    def __ne__(self, other: object) -> np.bool_:  # type: ignore[override]
        return np.bool_(int.__ne__(self, other))

    __hash__ = int.__hash__

    def to(self, _dtype: object) -> Int32:
        return self


def _truncated(a: int, b: int) -> Int32:
    quotient = abs(int(a)) // abs(int(b))
    return Int32(quotient if (a < 0) == (b < 0) else -quotient)


@dataclass
class Pointer:
    """A tensor's memory and an offset in it."""

    memory: Array
    offset: int = 0

    def __add__(self, offset: int) -> Pointer:
        return Pointer(self.memory, self.offset + int(offset))


def _loaded(pointer: Pointer) -> Any:
    value = pointer.memory[pointer.offset]
    return Int32(value) if np.issubdtype(value.dtype, np.integer) else value


_TL = SimpleNamespace(
    minimum=lambda a, b: Int32(min(int(a), int(b))),
    maximum=lambda a, b: Int32(max(int(a), int(b))),
    where=lambda condition, a, b: Int32(a if condition else b),
    abs=lambda a: Int32(abs(int(a))),
    cdiv=lambda a, b: _truncated(Int32(int(a) + int(b) - 1), b),
    load=_loaded,
    int32="int32",
    int64="int64",
)
_DEFINED = {
    "tl": _TL,
    "gl": _TL,
    "floor_div": lambda a, b: Int32(int(a) // int(b)),
    "floor_div_any": lambda a, b: Int32(int(a) // int(b)),
    "floor_mod": lambda a, b: Int32(int(a) % int(b)),
    "clamp_index": lambda index, size: Int32(min(max(int(index), 0), int(size) - 1)),
}

_LOOPS = """
{% import "shared/program.jinja" as program %}
{% macro body(masked) %}
    visit({{ start }}, {{ not masked }})
{%- endmacro %}
def portable():
{% for line in prologue %}
    {{ line | tl }}
{% endfor %}
{{ program.block_range(kernel.bounds) }}
{{ program.block_loops(kernel, start, block, body) }}

def hopper():
{% for line in prologue %}
    {{ line | gl }}
{% endfor %}
{% for line in counts %}
    {{ line | gl }}
{% endfor %}
    for nth in range(num_partial):
{% for line in partial_start %}
        {{ line | gl }}
{% endfor %}
        visit({{ start }}, False)
    for nth in range(num_full):
{% for line in full_start %}
        {{ line | gl }}
{% endfor %}
        visit({{ start }}, True)
"""


@cache
def _template() -> jinja2.Template:
    return make_environment(templates_path()).from_string(_LOOPS)


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One step of a loop: where its block starts, and whether it is visited without the mask."""

    start: int
    full: bool


@dataclass
class Loops:
    """The loops of the kernels of one mask, along the keys or along the queries, in both families."""

    text: str

    @staticmethod
    def of(mask: Expr, tensors: Mapping[str, TensorSpec], *, keys: bool) -> Loops:
        lowering = Lowering(tensors=tensors, query_axis=0 if keys else 1)
        bounds: LoopBounds = (key_bounds if keys else query_bounds)(analyse(mask), lowering)
        start, block = ("start_n", "BLOCK_N") if keys else ("start_m", "BLOCK_M")
        kernel = SimpleNamespace(bounds=bounds, layout=token_layout(Mode.DENSE), narrow=None)
        visits = {
            "counts": visit_counts(bounds, block, always=True),
            "partial_start": partial_start(bounds, start, block),
            "full_start": full_start(bounds, start, block),
        }
        return Loops(_template().render(kernel=kernel, prologue=lowering.prologue, start=start, block=block, **visits))

    def __post_init__(self) -> None:
        self._code = compile(self.text, "<loops>", "exec")

    def run(self, family: str, names: Mapping[str, Any]) -> list[Visit]:
        """The blocks that the loops of a family visit in the program that the names describe."""
        found: list[Visit] = []

        def visit(start: int, full: bool) -> None:
            found.append(Visit(start=int(start), full=full))

        defined: dict[str, Any] = {**_DEFINED, **names, "visit": visit}
        exec(self._code, defined)
        walk: Callable[[], None] = defined[family]
        walk()
        return found


def memory(name: str, values: Array) -> dict[str, Any]:
    """The arguments through which a kernel reads a tensor."""
    strides = {f"stride_{name}_{i}": Int32(s // values.itemsize) for i, s in enumerate(values.strides)}
    sizes = {f"{name}_size_{i}": Int32(size) for i, size in enumerate(values.shape)}
    return {f"{name}_ptr": Pointer(values.reshape(-1)), **strides, **sizes}
