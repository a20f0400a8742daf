"""The runs of segments, which `runtime/core/segment_runs.py` finds, as Hopper's kernels read them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def segment_run(runs_ptr, b, length, start, LAYOUT: gl.constexpr):
    """Where the tokens of the segment of each of 64 tokens, from `start` on, begin and end along the other axis, and
    whether no token in between is of another segment."""
    record = runs_ptr + (b * (gl.cdiv(length, 64) + 2) + start // 64) * 192
    token = gl.arange(0, 64, layout=LAYOUT)
    return gl.load(record + token), gl.load(record + 64 + token), gl.load(record + 128) != 0
