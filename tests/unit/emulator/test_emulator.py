"""The emulation of Gluon itself: Triton's arithmetic, and that each kind of mistake is an error."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="the emulator runs Gluon, which is a part of Triton")

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from emulator import DeadlockError, EmulationError, Kernel, Timing, ptx
from emulator.tiles import BlockType, Descriptor

HEADER = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

LAYOUT = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
OTHER = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16])
ROW = gl.SliceLayout(1, LAYOUT)
COL = gl.SliceLayout(0, LAYOUT)

"""


def run(body: str, *arguments: Any, before: str = "", grid: int = 1) -> None:
    """Run a kernel of these lines, with arguments `a`, `b` and so on."""
    names = ", ".join("abcdef"[: len(arguments)])
    kernel = f"@gluon.jit\ndef kernel({names}):\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n"
    source = HEADER + textwrap.dedent(before) + "\n\n" + kernel
    Kernel(source, "kernel", Timing.LATE_PRODUCTS)[(grid,)](*arguments, num_warps=4)


def computed(expression: str, *arguments: int) -> float:
    """A scalar that a kernel computes from its arguments `b` and so on."""
    out = torch.zeros(1, dtype=torch.int64)
    run(f"gl.store(a, {expression})", out, *arguments)
    return out.item()


@pytest.mark.parametrize(("x", "quotient", "rest", "ceiling"), [(-7, -1, -2, 0), (7, 1, 2, 2), (-1, 0, -1, 0)])
def test_division_rounds_towards_zero(x: int, quotient: int, rest: int, ceiling: int) -> None:
    assert computed("b // 5", x) == quotient
    assert computed("b % 5", x) == rest
    assert computed("gl.cdiv(b, 5)", x) == ceiling


def test_a_counter_divides_like_any_int() -> None:
    out = torch.zeros(1, dtype=torch.int64)
    run("for i in range(b, 0):\n    gl.store(a, gl.load(a) + i // 2)", out, -3)
    assert out.item() == -1 - 1 + 0


def test_ints_wrap_at_their_width() -> None:
    assert computed("b + 1", 2**31 - 1) == -(2**31)
    assert computed("b.to(gl.int64) + 1", 2**31 - 1) == 2**31
    assert computed("b * b", 2**31) == 2**62


@pytest.mark.parametrize(
    ("expression", "dtype"),
    [
        ("a + 1", "int32"),
        ("a * 0.5", "float32"),
        ("a.to(gl.float16) * 0.5", "float16"),
        ("a.to(gl.float16) / 2", "float32"),
        ("a.to(gl.float16) + b", "float32"),
        ("a.to(gl.int64) + a", "int64"),
        ("(a < 3) + a", "int32"),
        ("gl.where(a < 3, 1, 0.0)", "float32"),
    ],
)
def test_types(expression: str, dtype: str) -> None:
    run(f"x = {expression}\nassert x.dtype == gl.{dtype}, x.dtype", 3, 1.5)


ARANGE = "rows, cols = gl.arange(0, 64, layout=ROW), gl.arange(0, 64, layout=COL)\n"
REFUSED = {
    "two layouts": ("rows + cols", "two layouts"),
    "an axis of another slice": ("rows[None, :]", "slice of axis"),
    "an axis of no slice": ("rows[:, None][:, None]", "axis is added"),
    "a reduction in place": ("gl.sum(rows[:, None] + cols[None, :], 1) + cols", "two layouts"),
    "a slice of another layout": ("rows + gl.arange(0, 64, layout=gl.SliceLayout(1, OTHER))", "two layouts"),
    "a load before the first": ("gl.load(a + (rows - 1))", "element -1 is accessed"),
    "a load beyond the last": ("gl.load(a + rows)", "element 40 is accessed of a tensor that spans 40"),
    "a store beyond the last": ("gl.store(a + rows, 0, mask=rows < 41)", "element 40 is accessed"),
    "a mask of another shape": ("gl.load(a, mask=rows < 3)", "pointers"),
    "no power of two": ("gl.arange(0, 48, layout=ROW)", "power of two"),
    "an instruction that is not known": (
        "gl.inline_asm_elementwise('bfind.u32 $0, $1;', '=r,r', [rows], dtype=gl.int32, is_pure=True, pack=1)",
        "no emulation of the instruction",
    ),
    "a condition of many": ("rows if rows < 3 else cols", "block as a condition"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    expression, message = REFUSED[name]
    with pytest.raises(EmulationError, match=message):
        run(ARANGE + expression, torch.zeros(40))


def test_masks_are_respected() -> None:
    out, values = torch.full((64,), -1.0), torch.arange(40.0)
    run(ARANGE + "gl.store(a + rows, gl.load(b + rows, mask=rows < c, other=7.0), mask=rows >= 10)", out, values, 40)
    assert torch.equal(out, torch.cat([torch.full((10,), -1.0), values[10:], torch.full((24,), 7.0)]))


def test_what_is_not_loaded_is_undefined() -> None:
    out = torch.zeros(64)
    run(ARANGE + "gl.store(a + rows, gl.load(b + rows, mask=rows < 40))", out, torch.zeros(40))
    assert torch.equal(out.isnan(), torch.arange(64) >= 40)


def test_every_program_runs() -> None:
    out = torch.zeros(5, dtype=torch.int32)
    run("gl.store(a + gl.program_id(0), gl.num_programs(0) + gl.program_id(0))", out, grid=5)
    assert out.tolist() == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("row", "cut"),
    [(0, lambda x: x[:4]), (3, lambda x: x[3:]), (-2, lambda x: x[:2]), (9, lambda x: x[:0])],
)
def test_a_copy_is_zero_beyond_the_edges(row: int, cut: Callable[[Tensor], Tensor]) -> None:
    x = torch.arange(1.0, 31.0).view(5, 6)
    tile = Descriptor(x.flatten(), [5, 6], [6, 1], BlockType(gl.float32, [4, 8]), None).tile_at([row, 0])
    wanted = torch.zeros(4, 8)
    part = cut(x)
    first = max(-row, 0)
    wanted[first : first + len(part), :6] = part
    assert torch.equal(tile, wanted)


WAITS = """
@gluon.jit
def first(mine, other):
    mbarrier.wait(other.index(0), 0)
    mbarrier.arrive(mine.index(0), count=1)


@gluon.jit
def second(mine, other):
    mbarrier.arrive(mine.index(0), count=1)
    mbarrier.wait(other.index(0), 0)
"""
SPECIALIZE = """
x = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
y = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
mbarrier.init(x.index(0), count=1)
mbarrier.init(y.index(0), count=1)
gl.warp_specialize([(first, (x, y)), (second, (y, x))], worker_num_warps=[4], worker_num_regs=[24])
"""


def test_partitions_wait_for_each_other() -> None:
    run(SPECIALIZE, before=WAITS)


def test_a_deadlock_says_who_waits() -> None:
    wrong_phase = WAITS.replace("mbarrier.wait(other.index(0), 0)\n    mbarrier.arrive", "mbarrier.arrive").replace(
        "mbarrier.wait(other.index(0), 0)", "mbarrier.wait(other.index(0), 0); mbarrier.wait(other.index(0), 1)"
    )
    with pytest.raises(DeadlockError) as caught:
        run(SPECIALIZE, before=wrong_phase)
    assert "1 (second) of program 0 waits for parity 1 of barrier 0 of allocation 1, x" in str(caught.value)


def test_a_cycle_is_a_deadlock() -> None:
    both_wait_first = WAITS.replace("def second", "def unused") + "\n\nsecond = first\n"
    with pytest.raises(DeadlockError) as caught:
        run(SPECIALIZE, before=both_wait_first)
    assert str(caught.value).count("waits for parity 0") == 2


def test_a_barrier_has_a_number_of_arrivals() -> None:
    twice = WAITS.replace("mbarrier.arrive(mine.index(0), count=1)", "mbarrier.arrive(mine.index(0), count=2)")
    with pytest.raises(EmulationError, match="more than 1 arrivals"):
        run(SPECIALIZE, before=twice)


def test_a_kernel_imports_nothing_else() -> None:
    with pytest.raises(EmulationError, match="imports torch"):
        Kernel("import torch", "kernel", Timing.LATE_PRODUCTS)


TURNS = """
@gluon.jit
def change(asm):
    threads = gl.zeros([128], gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(asm, "=r,r", [threads], gl.int32, is_pure=False, pack=1)

@gluon.jit
def first(out):
    change("bar.arrive 14, 256;")
    change("bar.sync 15, 256;")
    gl.store(out, 2 * gl.load(out))

@gluon.jit
def second(out):
    change("bar.sync 14, 256;")
    gl.store(out, gl.load(out) + 3)
    change("bar.arrive 15, 256;")
"""

BOTH = "gl.warp_specialize([(first, (a,)), (second, (a,))], worker_num_warps=[4], worker_num_regs=[24])"


def test_named_barriers_take_turns() -> None:
    out = torch.ones(1)
    run(
        BOTH,
        out,
        before=TURNS,
    )
    assert out.item() == 2 * (1 + 3)


def test_a_turn_that_nobody_gives_is_a_deadlock() -> None:
    never = TURNS.replace('change("bar.arrive 15, 256;")', "pass")
    with pytest.raises(DeadlockError, match="named barrier 15"):
        run(
            BOTH,
            torch.ones(1),
            before=never,
        )


LINES = """{{
.reg .pred p;
setp.gt.f32 p, $2, $3;
{vote}
@!p bra.uni DONE;
add.f32 $0, $2, 0f41000000;
mul.f32 $1, $3, $3;
DONE:
}}"""


def run_lines(text: str, *numbers: list[float]) -> list[Tensor]:
    first, second = map(torch.tensor, numbers)
    return ptx.run(text, [first, second], 2, {0: first, 1: second})


def test_lines_are_skipped_where_no_thread_needs_them() -> None:
    text = LINES.format(vote="vote.sync.any.pred p, p, 0xFFFFFFFF;")
    assert [x.tolist() for x in run_lines(text, [1.0, 5.0], [2.0, 3.0])] == [[9.0, 13.0], [4.0, 9.0]]
    assert [x.tolist() for x in run_lines(text, [1.0, 2.0], [2.0, 3.0])] == [[1.0, 2.0], [2.0, 3.0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LINES.format(vote=""), "takes some threads alone"),
        ("{\nadd.f32 $0, a, $2;\n}", "a is read before it is written"),
        ("{\nrcp.approx.f32 $0, $2;\n}", "no emulation of 'rcp.approx.f32"),
    ],
)
def test_lines_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(EmulationError, match=message):
        run_lines(text, [1.0, 5.0], [2.0, 3.0])
