"""Inline assembly of a Gluon kernel: single instructions, each with what it computes; `ptx` runs several lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as real

from . import ptx
from .errors import check
from .values import Operand, Pointer, Value, broadcast, elementwise, load, scalar, zeros


def _add_four(pointer: Pointer, bits: Value) -> Value:
    """Add to memory 16 bytes at a time: of each four addresses, the instruction gets only the first."""
    offsets = pointer.places(None)[0].data.view(-1, 4)
    check(bool((offsets == offsets[:, :1] + torch.arange(4)).all()), "an addition of four to what is not in a row")
    check(bool((offsets[:, 0] % 4 == 0).all()) and pointer.memory.align % 16 == 0, "an addition across 16 bytes")
    pointer.memory.elements.index_add_(0, offsets.flatten(), bits.to(real.float32, bitcast=True).data)
    return zeros(bits.shape, real.int8, bits.layout)


def _rounded_to_pairs(dtype: torch.dtype) -> Callable[[Value, Value], Value]:
    def pack(low: Value, high: Value) -> Value:
        pairs = torch.stack((low.data, high.data), -1).to(dtype)
        return Value(pairs.view(torch.int32)[..., 0], low.layout)

    return pack


def _halves(words: Value) -> tuple[Value, Value]:
    halves = words.data.contiguous().view(torch.int16).view(*words.shape, 2)
    return Value(halves[..., 0], words.layout), Value(halves[..., 1], words.layout)


def _words(x: Value) -> tuple[Value, Value]:
    """The lower and the upper half of 64 bits."""
    return Value(x.data.to(torch.int32), x.layout), Value((x.data >> 32).to(torch.int32), x.layout)


def _number(words: Tensor) -> Tensor:
    """Words as unsigned numbers."""
    return words.long() & 0xFFFFFFFF


def _product_with(factor: int) -> Callable[[Value], tuple[Value, Value]]:
    def multiply(x: Value) -> tuple[Value, Value]:
        check(x.dtype == real.int32, f"a product of {x.dtype}")
        return _words(Value(_number(x.data) * factor, x.layout))  # of which 64 bits are there, whatever their sign

    return multiply


def _choice(word: Value, limit: Operand, if_below: Operand, otherwise: Operand) -> Value:
    """`if_below` if a word, as an unsigned number, is below a limit, else `otherwise`."""
    word, limit, if_below, otherwise = broadcast(*map(scalar, (word, limit, if_below, otherwise)))
    return Value(torch.where(_number(word.data) < _number(limit.data), if_below.data, otherwise.data), word.layout)


def _kept_pair(first: int) -> Callable[[Value, Value], Value]:
    """A mask of two halves: whether bytes `first` and `first + 2` are at least the halves of a limit."""

    def compare(words: Value, limit: Value) -> Value:
        words, limit = broadcast(words, limit)
        places = torch.tensor([8 * first, 8 * first + 16])
        halves = _number(limit.data)[..., None] >> torch.tensor([0, 16]) & 0xFFFF
        check(bool((halves <= 0x100).all()), "a limit of bytes beyond 256")
        kept = (_number(words.data)[..., None] >> places & 0xFF) >= halves
        return Value((-kept.to(torch.int16)).contiguous().view(torch.int32)[..., 0], words.layout)

    return compare


def _transposed(words: Value) -> Value:
    """Each 8 lines of 4 words, as a matrix of 8 by 8 halves, transposed; the lines are the first axis."""
    threads = words.data.movedim(0, -2)
    halves = threads.contiguous().view(torch.int16)
    halves = halves.view(*halves.shape[:-2], halves.shape[-2] // 8, 8, 8).mT.contiguous()
    turned = halves.view(torch.int32).view(threads.shape).movedim(-2, 0)
    return Value(turned, words.layout)


def _sign_mask(words: Value, selectors: Value) -> Tensor:
    """All bits set if the sign bit is set in the byte that a selector picks four times."""
    words, selectors = broadcast(words, selectors)
    byte = selectors.data & 7
    check(bool((selectors.data == 0x1111 * (8 | byte)).all()), "a selector of several bytes")
    return -(words.data >> (8 * byte + 7) & 1)


def _without_signed(x: Value, words: Value, selectors: Value) -> Value:
    return Value((x.data.view(torch.int32) & ~_sign_mask(words, selectors)).view(torch.float32), x.layout)


def _where_signed(otherwise: Value, if_set: Value, words: Value, selectors: Value) -> Value:
    otherwise, if_set = broadcast(otherwise, if_set)
    return Value(torch.where(_sign_mask(words, selectors) != 0, if_set.data, otherwise.data), otherwise.layout)


def _rounded_to_bytes(*given: Value) -> Value:
    """Four numbers as e4m3 in a word, the first one in the lowest byte. Numbers beyond the largest e4m3 are clamped."""
    most = torch.finfo(torch.float8_e4m3fn).max
    numbers = torch.stack([x.data.clamp(-most, most) for x in broadcast(*given)], -1)
    words = numbers.to(torch.float8_e4m3fn).view(torch.int32).squeeze(-1)
    return Value(words, given[0].layout)


def _first_word(words: Value) -> Value:
    """The four bytes of the first of each four consecutive words, one byte per element."""
    first = words.data.reshape(-1, 4)[:, :1].contiguous()
    return Value(first.view(torch.int8).reshape(words.data.shape), words.layout)


def _halves_of_bytes(dtype: torch.dtype) -> Callable[[Value], tuple[Value, ...]]:
    """Words of four 8-bit floats as four float16, the lowest byte first."""

    def convert(words: Value) -> tuple[Value, ...]:
        halves = words.data.contiguous().view(dtype).view(*words.shape, 4).to(torch.float16)
        return tuple(Value(half, words.layout) for half in halves.unbind(-1))

    return convert


class Instruction(NamedTuple):
    """What an inline instruction computes, on how many elements at once, and whether the compiler may move it."""

    run: Callable[..., Value | tuple[Value, ...]]
    pack: int = 1
    is_pure: bool = True


ASSEMBLY = {
    "tanh.approx.f32 $0, $1;": Instruction(elementwise(torch.tanh)),
    "ld.global.nc.b32 $0, [$1];": Instruction(lambda pointer: load(pointer).to(real.int32, bitcast=True)),
    "ld.global.nc.b64 $0, [$1];": Instruction(lambda pointer: load(pointer).to(real.int64, bitcast=True)),
    "cvt.rn.bf16x2.f32 $0, $2, $1;": Instruction(_rounded_to_pairs(torch.bfloat16)),
    "cvt.rn.f16x2.f32 $0, $2, $1;": Instruction(_rounded_to_pairs(torch.float16)),
    "{.reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; "
    "mov.b32 $0, {a, b};}": Instruction(_rounded_to_bytes),
    "{.reg .b16 a, b; .reg .b32 t, u; mov.b32 {a, b}, $4; cvt.rn.f16x2.e4m3x2 t, a; cvt.rn.f16x2.e4m3x2 u, b; "
    "mov.b32 {$0, $1}, t; mov.b32 {$2, $3}, u;}": Instruction(_halves_of_bytes(torch.float8_e4m3fn)),
    "{.reg .b32 t, u; prmt.b32 t, $4, 0, 0x1404; prmt.b32 u, $4, 0, 0x3424; "
    "mov.b32 {$0, $1}, t; mov.b32 {$2, $3}, u;}": Instruction(_halves_of_bytes(torch.float8_e5m2)),
    "{.reg .b16 a, b; mov.b32 {a, b}, $1; mov.b32 $0, {a, b};}": Instruction(_first_word, 4, False),
    # Not pure: if it were computed earlier, the kernel would wait there for a number that is still being loaded.
    "mov.b32 $0, $1;": Instruction(lambda x: x, is_pure=False),
    # Not pure: if it were moved between products in flight, they would wait for each other.
    "mov.b32 {$0, $1}, $2;": Instruction(_halves, is_pure=False),
    # Not pure: otherwise the keys of all rounds of a random number would be computed ahead of the loop.
    "mov.b64 {$0, $1}, $2;": Instruction(_words, is_pure=False),
    **{
        f"{{.reg .b64 t; mul.wide.u32 t, $2, {factor}; mov.b64 {{$0, $1}}, t;}}": Instruction(_product_with(factor))
        for factor in (0xD2511F53, 0xCD9E8D57)
    },
    "{.reg .pred p; setp.lt.u32 p, $1, $2; selp.b32 $0, $3, $4, p;}": Instruction(_choice),
    **{
        f"{{.reg .b32 t; prmt.b32 t, $1, 0, {selector}; set.ge.u32.f16x2 $0, t, $2;}}": Instruction(_kept_pair(first))
        for first, selector in enumerate((0x4240, 0x4341))
    },
    "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;": Instruction(_transposed, is_pure=False),
    "{.reg .b32 t; prmt.b32 t, $2, 0, $3; lop3.b32 $0, $1, t, t, 0x30;}": Instruction(_without_signed),
    "{.reg .b32 t; prmt.b32 t, $3, 0, $4; lop3.b32 $0, t, $2, $1, 0xCA;}": Instruction(_where_signed),
    "red.relaxed.gpu.global.add.v4.f32 [$1], {$5, $6, $7, $8}; mov.b32 $0, 0;": Instruction(_add_four, 4, False),
}


def inline_asm_elementwise(
    asm: str, constraints: str, args: list[Any], dtype: Any, *, is_pure: bool, pack: int
) -> Value | tuple[Value, ...]:
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if "\n" in asm:
        # The lines have votes of the warp's threads, whose result depends on the place, so they must not be moved.
        check(not is_pure, f"{asm!r} with is_pure={is_pure}")
        results = _run_lines(asm, constraints, args, len(dtypes), pack)
    else:
        results = _run_one(asm, constraints, args, is_pure, pack)
    found = tuple(x.dtype for x in results)
    check(found == dtypes, f"{asm!r} gives {found}, not {dtypes}")
    return results if isinstance(dtype, tuple) else results[0]


def _run_one(asm: str, constraints: str, args: list[Any], is_pure: bool, pack: int) -> tuple[Value, ...]:
    """Run a single instruction, one of ASSEMBLY."""
    check(asm in ASSEMBLY, f"no emulation of the instruction {asm!r}")
    instruction = ASSEMBLY[asm]
    check(pack == instruction.pack, f"{asm!r} of {pack} elements")
    check(is_pure == instruction.is_pure, f"{asm!r} with is_pure={is_pure}")
    result = instruction.run(*args)
    results = result if isinstance(result, tuple) else (result,)
    operands = pack * len(args) + len(results)
    check(len(constraints.split(",")) == operands, f"{constraints!r} for {operands} operands")
    return results


def _run_lines(asm: str, constraints: str, args: list[Any], count: int, pack: int) -> tuple[Value, ...]:
    """Run lines that give `count` results for `pack` numbers of each argument. The numbers of a thread are `pack`
    consecutive ones here, while on the device the layout decides. So the lines must give numbers of equal rows equal
    results, whichever numbers share a thread."""
    data = [x.data for x in broadcast(*args)]
    inputs = [x for each in data for x in each.reshape(-1, pack).unbind(1)]
    outputs = pack * count
    kinds = constraints.split(",")
    check(len(kinds) == outputs + len(inputs), f"{constraints!r} for {outputs} outputs and {len(inputs)} inputs")
    check(all(kind.startswith("=") for kind in kinds[:outputs]), f"{constraints!r} for {outputs} outputs")
    tied = {int(kind): inputs[i] for i, kind in enumerate(kinds[outputs:]) if kind.isdigit()}
    found = ptx.run(asm, inputs, outputs, tied)
    parts = [torch.stack(found[i : i + pack], 1).reshape(data[0].shape) for i in range(0, outputs, pack)]
    return tuple(Value(part, args[0].layout) for part in parts)
