"""Runs the lines of inline PTX that kernels write for several numbers of a thread at once."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .errors import check

_LINE = re.compile(r"(?:@(?P<negated>!?)(?P<guard>\w+) )?(?P<op>[a-z][\w.]*) (?P<operands>.*)")
_FLOAT = re.compile(r"0f([0-9A-F]{8})")
_DECIMAL = re.compile(r"-?[0-9]+(\.[0-9]+)?(e-?[0-9]+)?")

OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "mov.b32": lambda a: a,
    "add.f32": torch.add,
    "sub.f32": torch.sub,
    "mul.f32": torch.mul,
    "fma.rn.f32": lambda a, b, c: a * b + c,
    # Kernels compare the bits of floats that are not negative, which have the same order as the floats.
    "max.s32": lambda a, b: torch.maximum(a.view(torch.int32), b.view(torch.int32)).view(torch.float32),
    "tanh.approx.f32": torch.tanh,
    "ex2.approx.ftz.f32": torch.exp2,
    "setp.gt.f32": torch.gt,
    "setp.gtu.f32": lambda a, b: ~(a <= b),
    "setp.neu.f32": torch.ne,
    "or.pred": torch.logical_or,
    # All emulated threads count as one warp here: if one thread votes yes, the vote is yes for all.
    "vote.sync.any.pred": lambda a, _members: a.any().expand_as(a),
}


def run(text: str, inputs: Sequence[Tensor], outputs: int, tied: Mapping[int, Tensor]) -> list[Tensor]:
    """The outputs of the lines `text` for `inputs`; each input holds a number of every thread.

    `$0` and on are first the outputs, then the inputs. Outputs in `tied` begin with the value of an input.
    """
    known: dict[str, Tensor] = {f"${outputs + i}": x for i, x in enumerate(inputs)}
    known |= {f"${i}": x for i, x in tied.items()}
    threads = inputs[0]
    label = ""
    for line in filter(None, (each.strip(" ;") for each in re.split(r"[;\n{}]", text))):
        if label:
            label = "" if line == f"{label}:" else label
            continue
        if line.startswith(".reg") or line.endswith(":"):
            continue
        found = _LINE.fullmatch(line)
        check(found is not None, f"no emulation of {line!r}")
        assert found is not None
        holds = torch.ones_like(threads, dtype=torch.bool)
        if found["guard"]:
            holds = known[found["guard"]] ^ bool(found["negated"])
        names = found["operands"].split(", ")
        if found["op"] == "bra.uni":
            check(bool(holds.all()) or not holds.any(), f"{line!r} takes some threads alone")
            label = names[0] if holds.all() else ""
            continue
        check(found["op"] in OPERATIONS, f"no emulation of {line!r}")
        target, *read = names
        result = OPERATIONS[found["op"]](*(_operand(name, known, threads) for name in read))
        known[target] = torch.where(holds, result, known[target]) if found["guard"] else result
    return [known[f"${i}"] for i in range(outputs)]


def _operand(name: str, known: dict[str, Tensor], threads: Tensor) -> Tensor:
    if bits := _FLOAT.fullmatch(name):
        return torch.full_like(threads, struct.unpack(">f", bytes.fromhex(bits[1]))[0])
    if _DECIMAL.fullmatch(name):
        return torch.full_like(threads, float(name))
    if name == "0xFFFFFFFF":
        return threads
    check(name in known, f"{name} is read before it is written")
    return known[name]
