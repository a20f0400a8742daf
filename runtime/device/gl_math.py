"""Functions of scores that Gluon lacks, or computes otherwise than torch."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FEW_RUNS = gl.constexpr(4)
"""As in `tl_math.py`."""


@gluon.jit
def tanh(x, HARDWARE: gl.constexpr):
    if HARDWARE:
        # One instruction, relative error 2**-11: less than what rounding a score to 16 bits costs.
        return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    else:
        far = 1.0 - 2.0 / (gl.exp2(2.8853900817779268 * x) + 1.0)
        # Near zero the difference above cancels; there a polynomial keeps float32's relative error (Cephes, tanhf).
        z = x * x
        poly = ((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z
        near = x + x * z * ((poly + 1.33314422036e-1) * z - 3.33332819422e-1)
        return gl.where(gl.abs(x) < 0.625, near, far)


@gluon.jit
def floor_mod(a, b):
    # Python's remainder: Triton's has the sign of the dividend.
    r = a % b
    return gl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@gluon.jit
def floor_div(a, b):
    return (a - floor_mod(a, b)) // b


@gluon.jit
def floor_div_any(a, b):
    r = a % b
    return gl.where((r != 0) & ((r < 0) != (b < 0)), a // b - 1, a // b)


@gluon.jit
def round_even(x):
    # A half goes to the even number, as in torch; an infinity is left as it is.
    low = gl.floor(x)
    rest = x - low
    is_odd = low - 2.0 * gl.floor(0.5 * low) == 1.0
    return gl.where((rest > 0.5) | ((rest == 0.5) & is_odd), low + 1.0, low)


@gluon.jit
def log1p(x):
    # A factor corrects for the rounding of 1 + x (Goldberg, 1991, theorem 4).
    y = 1.0 + x
    is_exact = (y == 1.0) | (gl.abs(y) == float("inf"))
    factor = x / gl.where(is_exact, 1.0, y - 1.0)
    return gl.where(y == 1.0, x, gl.log(y) * gl.where(is_exact, 1.0, factor))


@gluon.jit
def tan(x):
    return gl.sin(x) / gl.cos(x)


@gluon.jit
def load_pairs(ptrs, PTX: gl.constexpr):
    # One element per query and key, loaded at the point of use. The compiler would pipeline a plain load of 4 or 8-byte
    # elements through shared memory, with copies of 4 bytes per instruction. It does not pipeline shorter elements.
    BITS: gl.constexpr = ptrs.dtype.element_ty.primitive_bitwidth
    if PTX and BITS == 32:
        word = gl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [ptrs], dtype=gl.int32, is_pure=True, pack=1
        )
        return word.to(ptrs.dtype.element_ty, bitcast=True)
    elif PTX and BITS == 64:
        word = gl.inline_asm_elementwise(
            "ld.global.nc.b64 $0, [$1];", "=l,l", [ptrs], dtype=gl.int64, is_pure=True, pack=1
        )
        return word.to(ptrs.dtype.element_ty, bitcast=True)
    else:
        return gl.load(ptrs)


@gluon.jit
def load_grid(row_ptrs, positions, length, size, stride, RUN: gl.constexpr, PTX: gl.constexpr):
    # The elements of a grid for a tile: `row_ptrs[r]` is where those of row r begin, `positions[c] // length` the index
    # of column c. Positions follow each other, up or down, and `length` is at least RUN, if RUN is not 0. So columns
    # share the elements of a few runs, which are loaded for each row, and not for each pair.
    # The first and last of these runs may be cut.
    COUNT: gl.constexpr = (positions.shape[0] - 2) // max(RUN, 1) + 2
    if RUN > 0 and COUNT <= FEW_RUNS:
        first_run = floor_div(gl.min(positions, 0), length)
        from_first = positions - first_run * length
        first = clamp_index(first_run, size)
        elements = gl.load(row_ptrs + gl.cast(first, gl.int64) * stride)
        for nth in gl.static_range(1, COUNT):
            run = clamp_index(first_run + nth, size)
            of_run = gl.load(row_ptrs + gl.cast(run, gl.int64) * stride)
            elements = gl.where((from_first >= nth * length)[None, :], of_run, elements)
        return elements
    else:
        runs = clamp_index(floor_div(positions, length), size)
        return load_pairs(row_ptrs + runs.to(gl.int64)[None, :] * stride, PTX)


@gluon.jit
def clamp_index(index, size):
    # The nearest index inside a tensor of `size` elements: a call's offsets may lead beyond its ends.
    return gl.maximum(gl.minimum(index, size - 1), 0)


@gluon.jit
def sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))
