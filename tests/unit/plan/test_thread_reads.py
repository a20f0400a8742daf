"""Reads of Hopper's warpgroups with one element per thread; when a block of the backward evaluates its statements."""

from __future__ import annotations

from codegen.analysis.gradients import GradientKind, GradientTerm
from codegen.ir.expr import Level, Load, Type, const
from codegen.plan.code.dialects import GL
from codegen.plan.code.statements import Assign, assign, defines
from codegen.plan.code.tree import Arange, Broadcast, Choice, Code, Infix, Name, builtin, call
from codegen.plan.hopper.thread_reads import block_order, by_distance, exchanged, thread_reads
from codegen.plan.kernels.kernel import Block, BlockGradient

KEYS = assign("kv_idx", Infix("+", Name("start_n"), Arange("BLOCK_N")), level=Level.KEY)


def read(target: str, tensor: str, index: str, level: Level) -> Assign:
    return assign(target, builtin("load", Infix("+", Name(f"{tensor}_ptr"), Name(index))), level=level)


def lines(statements: list[Assign]) -> list[str]:
    return [GL.line(statement) for statement in statements]


def test_vectors_that_read_nothing_need_no_elements() -> None:
    assert thread_reads([KEYS]) == []


def test_each_thread_reads_for_one_key_of_its_own() -> None:
    found = thread_reads([KEYS, read("x_kv", "x", "kv_idx", Level.KEY)])
    assert defines(found) == ["own_key", "x_kv"]
    assert GL.line(found[1]) == "x_kv = gl.load(x_ptr + own_key)"


def test_given_positions_are_exchanged_where_they_are_used() -> None:
    value = Choice(builtin("load", Name("p_ptr")), Name("POSITIONS"), Infix("+", Name("rows"), Name("q_shift")))
    given = Assign(targets=("q_idx",), values=(value,), level=Level.QUERY, type=Type.INT, of_tokens=True)
    text = "q_idx = gl.convert_layout(own_position, ROW) if POSITIONS else rows + q_shift"
    assert GL.line(exchanged(given)) == text
    ids = Assign(
        targets=("kv_segment_ids_kv",), values=(builtin("load", Name("i_ptr")),), level=Level.KEY, of_tokens=True
    )
    assert GL.line(exchanged(ids)) == "kv_segment_ids_kv = gl.convert_layout(own_segment, KEY)"
    assert exchanged(KEYS) is KEYS


def test_a_distance_is_one_name() -> None:
    rows, keys = Broadcast(Name("q_idx"), 0), Broadcast(Name("kv_idx"), 1)
    assert by_distance(call("clamp_index", Infix("-", rows, keys))) == call("clamp_index", Name("apart"))
    shifted = Infix("-", Infix("+", Name("n"), rows), keys)
    assert by_distance(shifted) == Infix("+", Name("n"), Name("apart"))
    # In tiles of keys by rows the axes are swapped.
    assert by_distance(Infix("-", Broadcast(Name("q_idx"), 1), Broadcast(Name("kv_idx"), 0))) == Name("apart")
    assert by_distance(Infix("-", keys, rows)) == Infix("-", keys, rows)


def block(statements: list[Assign], *, logit: Code, dscore: Code | None = None, gradient: Code | None = None) -> Block:
    load = Load(Type.FLOAT, "x", ())
    term = GradientTerm(tensor="x", kind=GradientKind.HEAD, local=const(1.0), load=load)
    gradients = [] if gradient is None else [BlockGradient(term=term, value=gradient)]
    return Block(statements=statements, logit=logit, keep=None, same=None, dscore=dscore, gradients=gradients)


def test_rows_are_read_ahead_and_exchanged_behind_the_products() -> None:
    rows = assign("q_idx", Infix("+", Name("rows"), Name("q_shift")), level=Level.QUERY)
    order = block_order(block([rows, read("x_q", "x", "q_idx", Level.QUERY)], logit=Broadcast(Name("x_q"), 1)))
    assert defines(order.reads) == ["own_position", "x_q"]
    assert list(order.exchanged) == ["x_q"]
    assert list(order.score) == []


def test_what_gradients_read_is_computed_again() -> None:
    values = [assign("t", Broadcast(Name("a"), 1), level=Level.TILE), assign("s", Name("t"), level=Level.TILE)]
    order = block_order(block(values, logit=Name("s"), gradient=Name("t")))
    assert defines(order.score) == ["t", "s"]
    assert defines(order.gradients) == ["t"]
    assert list(order.shared) == []


def test_what_reads_the_product_is_shared_by_score_and_gradients() -> None:
    values = [assign("t", Infix("*", Name("qk"), Name("a")), level=Level.TILE)]
    order = block_order(block(values, logit=Name("t"), dscore=Infix("*", Name("ds"), Name("t"))))
    assert (defines(order.shared), list(order.score), list(order.gradients)) == (["t"], [], [])
