"""The expression language: types, precedence, named expressions, and errors that point at the column."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen.ir import expr
from codegen.ir.expr import Expr, Load, Op, ScalarType, TensorSpec, Type, const, float_var, int_var
from codegen.ir.parse import FUNCTIONS, Macro, Scope, check_syntax, parse, parse_example, parse_header
from codegen.util.errors import ExprError

Q, KV, H, SCORE = int_var("q_idx"), int_var("kv_idx"), int_var("h"), float_var("score")

SCOPE = Scope(
    tensors={
        "slope": TensorSpec(name="slope", dims=("h",)),
        "doc": TensorSpec(name="doc", dims=("b", "kv_idx"), dtype="int32"),
        "keep": TensorSpec(name="keep", dims=("kv_idx",), dtype="bool"),
        "bias": TensorSpec(name="bias", dims=()),
        "chosen": TensorSpec(name="chosen", dims=("b", 3), dtype="int32"),
    },
    scalars={"size": ScalarType.INT, "cap": ScalarType.FLOAT},
    macros={
        "causal": Macro(name="causal", params=(), body="q_idx >= kv_idx", type=Type.BOOL),
        "window": Macro(name="window", params=("size",), body="q_idx - kv_idx < size", type=Type.BOOL),
        "both": Macro(name="both", params=("n",), body="causal and window(n)", type=Type.BOOL),
        "softcap": Macro(name="softcap", params=("cap",), body="cap * tanh(score / cap)", type=Type.FLOAT),
        "bucket": Macro(name="bucket", params=("n",), body="n if n < 8 else 8 + int(log(n / 8))", type=Type.FLOAT),
        "kept": Macro(name="kept", params=("n",), body="where(both(2 * n), softcap(n), 0)", type=Type.FLOAT),
        "lost": Macro(name="lost", params=(), body="kv_idx < sise", type=Type.BOOL),
    },
)


def mask(text: str) -> Expr:
    return parse(text, SCOPE, Type.BOOL)


def score(text: str) -> Expr:
    return parse(text, SCOPE, Type.FLOAT)


# ------------------------------------------------------------------------------------------------------------ types


@pytest.mark.parametrize(
    ("text", "type_"),
    [
        ("b + h - hkv", Type.INT),
        ("q_idx // 2 % 3", Type.INT),
        ("-size", Type.INT),
        ("min(q_idx, 3)", Type.INT),
        ("q_idx ** 2", Type.INT),
        ("h / 2", Type.FLOAT),
        ("cap + 1", Type.FLOAT),
        ("max(q_idx, cap)", Type.FLOAT),
        ("exp(q_idx)", Type.FLOAT),
        ("h ** -1", Type.FLOAT),
        ("h ** 0.5", Type.FLOAT),
        ("slope[h]", Type.FLOAT),
        ("doc[b, q_idx]", Type.INT),
        ("keep[kv_idx]", Type.BOOL),
        ("bias", Type.FLOAT),
        ("causal", Type.BOOL),
        ("not causal", Type.BOOL),
        ("where(causal, 1, 2.5)", Type.FLOAT),
        ("1 if causal else 2", Type.INT),
        ("causal if h < 2 else keep[q_idx]", Type.BOOL),
        ("q_len - kv_len", Type.INT),
        ("h & 3 | 4 ^ size", Type.INT),
        ("~h << 2 >> size", Type.INT),
        ("causal ^ (h == 1)", Type.BOOL),
        ("causal == keep[q_idx] != (h > 1)", Type.BOOL),
        ("~causal", Type.BOOL),
        ("floor(cap)", Type.FLOAT),
        ("round(h)", Type.INT),
        ("-inf", Type.FLOAT),
        ("kv_idx // 64 in chosen[b]", Type.BOOL),
    ],
)
def test_type_of_an_expression(text: str, type_: Type) -> None:
    assert parse(text, SCOPE, type_).type is type_


def test_membership_is_a_comparison_with_each_element() -> None:
    elements = [Load(Type.INT, "chosen", (int_var("b"), const(i))) for i in range(3)]
    assert mask("h in chosen[b]") == expr.logical_or(*(expr.compare("eq", H, e) for e in elements))
    assert mask("h not in (1, size)") == mask("h != 1 and h != size")


def test_integer_operations_of_literals_fold() -> None:
    assert score("(13 & 6) + (8 | 3) * (5 ^ 1) + (~4) + (3 << 2) + (-9 >> 2)") == const(4.0 + 11 * 4 - 5 + 12 - 3)
    assert score("floor(-0.5) + ceil(1.25) + round(2.5) + round(-1.5)") == const(-1.0 + 2 + 2 - 2)
    assert mask("(h << 3) >= 0") == mask("8 * h >= 0")
    assert mask("(h & -1) > (size | 0) and (h ^ 0) < ~(~size)") == mask("h > size and h < size")
    assert mask("(causal == True) and (causal != False)") == mask("causal")
    assert mask("not (causal == keep[h])") == mask("causal != keep[h]")


def test_integer_is_accepted_as_a_score() -> None:
    assert score("3") == const(3.0)
    assert score("h") == expr.to_float(H)


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("doc[b, q_idx] - doc[b, kv_idx]", True),
        ("abs(doc[b, q_idx] - doc[b, kv_idx]) + q_idx", True),
        ("doc[b, q_idx] - 1700000000", True),
        ("q_idx * q_idx - kv_idx * kv_idx", True),
        ("size - doc[b, kv_idx]", True),
        ("q_idx - kv_idx", False),
        ("q_idx // 64 - kv_idx % 64 + 3", False),
        ("doc[b, q_idx] - kv_idx", False),
    ],
)
def test_a_sum_of_large_integers_is_converted_as_a_whole(text: str, whole: bool) -> None:
    """float32 is exact up to 2**24: two large integers lose their difference if each is converted."""
    assert (score(text) == Op(Type.FLOAT, "float", (parse(text, SCOPE, Type.INT),))) is whole


def test_every_function_parses() -> None:
    for name, (fewest, most, _) in FUNCTIONS.items():
        for count in {fewest, most}:
            assert score(f"{name}({', '.join(['score'] * count)})").type is Type.FLOAT
        with pytest.raises(ExprError, match=rf"{name}\(\) takes .* got {most + 1}"):
            score(f"{name}({', '.join(['score'] * (most + 1))})")


# -------------------------------------------------------------------------------------------------------- structure


def test_precedence() -> None:
    assert score("score + 2 * cap") == score("score + (2 * cap)")
    assert score("-score ** 2") == score("-(score ** 2)")
    assert mask("not causal and size > 1 or h == 0") == mask("((not causal) and (size > 1)) or (h == 0)")
    assert mask("(causal & (size > 1)) | (h == 0)") == mask("causal and size > 1 or h == 0")
    assert mask("q_idx - kv_idx < size") == Op(Type.BOOL, "lt", (expr.sub(Q, KV), int_var("size")))


def test_chained_comparison() -> None:
    assert mask("0 <= q_idx - kv_idx < size") == mask("0 <= q_idx - kv_idx and q_idx - kv_idx < size")
    assert mask("1 < h < size != 4") == mask("1 < h and h < size and size != 4")


def test_where_has_two_spellings() -> None:
    assert score("score if causal else 0") == score("where(causal, score, 0)")


def test_loads() -> None:
    assert mask("doc[b, q_idx] == doc[b, kv_idx]") == expr.compare(
        "eq", Load(Type.INT, "doc", (int_var("b"), Q)), Load(Type.INT, "doc", (int_var("b"), KV))
    )
    assert score("score + bias") == expr.add(SCORE, Load(Type.FLOAT, "bias", ()))


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("score ** 5", "score * score * (score * score) * score"),
        ("score ** 0.5", "sqrt(score)"),
        ("score ** -2", "1 / (score * score)"),
        ("score ** 0", "1"),
    ],
)
def test_powers(text: str, same: str) -> None:
    assert score(text) == score(same)


def test_other_powers_are_written_out_behind_derivatives() -> None:
    assert expr.without_powers(score("score ** 2.5")) == score("(score * score) * sqrt(score)")
    assert expr.without_powers(score("score ** -1.5")) == score("1 / (score * sqrt(score))")
    assert expr.without_powers(score("score ** 1.7")) == score("exp(1.7 * log(score))")
    assert expr.without_powers(score("(score ** 1.5 + 1) ** 1.7")) == score("exp(1.7 * log(score * sqrt(score) + 1))")
    assert mask("(q_idx - kv_idx) ** 1.5 < 9") == mask("(1.0 * (q_idx - kv_idx)) * sqrt(q_idx - kv_idx) < 9")


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("(q_idx - kv_idx) / 41 >= 1", "q_idx - kv_idx >= 41.0"),
        ("kv_idx / 49 - q_idx / 7 <= 3 / 49", "1.0 * kv_idx - 7.0 * q_idx <= 3.0"),
        ("kv_idx / -41 > -1", "-(1.0 * kv_idx) > -41.0"),
        ("(q_idx - kv_idx) / 10 < 0.7", "q_idx - kv_idx < 7.0"),
    ],
)
def test_comparisons_of_quotients_of_integers_are_exact(text: str, same: str) -> None:
    """In float32 41 times the reciprocal of 41, by which kernels multiply, is less than 1."""
    assert mask(text) == mask(same)


def test_an_expression_may_run_over_lines() -> None:
    assert mask("causal\n   and\n window(4)\n") == mask("causal and window(4)")


def test_deep_chains_of_signs_take_no_time() -> None:
    assert score("-" * 60 + "score") == SCORE


# ------------------------------------------------------------------------------------------------ named expressions


def test_named_expressions_expand_in_place() -> None:
    assert mask("both(2 * 8)") == mask("q_idx >= kv_idx and q_idx - kv_idx < 16")
    assert score("softcap(50.0)") == score("50.0 * tanh(score / 50.0)")


def test_a_score_calls_masks_and_scores() -> None:
    window = "q_idx >= kv_idx and q_idx - kv_idx < 6"
    assert score("kept(3)") == score(f"where({window}, 3 * tanh(score / 3), 0)")


def test_a_named_number_keeps_its_type_and_serves_masks_and_indices() -> None:
    assert expr.children(mask("bucket(h) > 3"))[0].type is Type.INT
    assert score("slope[bucket(3)]") == Load(Type.FLOAT, "slope", (const(3),))
    assert mask("bucket(6) < bucket(kv_idx)") == mask("6 < bucket(kv_idx)")


def test_tensors_index_tensors() -> None:
    inner = Load(Type.INT, "doc", (int_var("b"), Q))
    assert score("slope[doc[b, q_idx]]") == Load(Type.FLOAT, "slope", (inner,))


def test_literals_fold() -> None:
    assert score("log(8) / log(2) + int(2.9) + int(-2.9)") == const(math.log(8) / math.log(2))
    assert mask("where(3 > 2, causal, keep[kv_idx])") == mask("causal")
    assert mask("int(h) == int(cap * 1.0)") == expr.compare("eq", H, expr.to_integer(float_var("cap")))


def test_an_example_reads_the_axes_of_its_tensor() -> None:
    tensor = TensorSpec(name="map", dims=("kv_idx", "n", 4, "h", "h"), dtype="bool")
    assert tensor.axes == ("kv_idx", "i0", "i1", "i2", "i3", "i4")
    assert parse_example("kv_idx < i2 and i0 == i3", tensor).type is Type.BOOL
    for text in ("n < 4", "h < 4", "q_idx < 1", "i5 < 1", "score > 0", "map[0] > 1"):
        with pytest.raises(ExprError, match="an example reads only its tensor's axes, kv_idx i0 i1 i2 i3 i4; got"):
            parse_example(text, tensor)


def test_a_parameter_hides_a_name_of_the_variant_and_arguments_do_not_leak() -> None:
    assert mask("window(7)") == mask("q_idx - kv_idx < 7")
    assert mask("window(size + 1)") == mask("q_idx - kv_idx < size + 1")


@pytest.mark.parametrize(
    ("text", "header"),
    [
        ("causal", ("causal", ())),
        ("window(size)", ("window", ("size",))),
        (" band ( low , high ) ", ("band", ("low", "high"))),
    ],
)
def test_header(text: str, header: tuple[str, tuple[str, ...]]) -> None:
    assert parse_header(text) == header


@pytest.mark.parametrize("text", ["", "a b", "a(", "a()", "a(1)", "a(x, x)", "a(x,)", "1a", "a(x)(y)"])
def test_bad_header(text: str) -> None:
    with pytest.raises(ExprError):
        parse_header(text)


# ----------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("causal and q_index > 1", 12, "unknown name 'q_index'; did you mean 'q_idx'?"),
        ("q_idx >= kv_idx and score > 0", 21, "a mask cannot read 'score'"),
        ("1 < windw(4)", 5, "'windw' is no function of the expression language; did you mean 'window'?"),
        ("causal and window", 12, "'window' takes 1 argument, got 0; write window(size)"),
        ("causal and lost", 12, "in 'lost': unknown name 'sise'"),
        ("h < doc[b]", 5, "tensor 'doc' has 2 dims and must be indexed with as many, got 1: doc[b, kv_idx]"),
        ("h < doc(b)", 5, "tensor 'doc' is indexed, not called: doc[b, kv_idx]"),
        ("h < slope", 5, "tensor 'slope' must be indexed: slope[h]"),
        ("h < slope[cap]", 11, "an index must be an integer, got a float: 'cap' in 'slope'; use // or int(...)"),
        ("keep[h < 1]", 6, "got a boolean: 'h < 1' in 'keep'; use where(condition, a, b)"),
        ("keep[h, h]", 1, "tensor 'keep' has 1 dim and must be indexed with as many, got 2: keep[kv_idx]"),
        ("h < slop[h]", 5, "'slop' is no tensor of this variant; did you mean 'slope'?"),
        ("causal and h", 12, "'and' needs booleans, got an integer: 'h'; write a comparison"),
        ("causal & h", 10, "'&' needs booleans"),
        ("causal & h < 4", 10, "got an integer: 'h'; put comparisons beside '&' in parentheses"),
        ("not h", 5, "'not' needs booleans"),
        ("h < causal", 5, "'<' needs numbers, got the boolean 'causal'; use where(condition, a, b)"),
        ("1 < h == causal", 10, "'==' needs numbers, got the boolean 'causal'"),
        ("h < 2 + causal", 9, "'+' needs numbers"),
        ("h < +causal", 6, "'+' needs numbers"),
        ("h % cap == 0", 5, "'%' needs integers, got the float 'cap'"),
        ("h % (3 - 3) == 0", 6, "'%' divides by the constant zero"),
        ("h // (2 - 2) == 0", 7, "'//' divides by the constant zero in 'h // (2 - 2)'"),
        ("1 / (2 - 2) < h", 6, "'/' divides by the constant zero in '1 / (2 - 2)'"),
        ("cap / log(1) < h", 7, "'/' divides by the constant zero in 'cap / log(1)'"),
        ("cap < log(3 - 3)", 7, "'log(3 - 3)' has no finite value"),
        ("cap < sqrt(-1)", 7, "'sqrt(-1)' has no finite value"),
        ("cap < exp(1000)", 7, "'exp(1000)' has no finite value"),
        ("cap < (0 - 2) ** 0.5", 7, "'(0 - 2) ** 0.5' has no finite value"),
        ("h < int(1e10)", 5, "an integer must fit 32 bits, got int(10000000000.0)"),
        ("h < int(causal)", 9, "'int' needs numbers, got the boolean 'causal'; use where(condition, a, b)"),
        ("h < 0 ** -1", 5, "'**' divides by the constant zero"),
        ("h < 2 ** h", 10, "the exponent of '**' must be a literal number"),
        ("h < 2 ** 33", 10, "the exponent of '**' must be from -32 to 32, got 33"),
        ("h < 2 ** 31", 5, "an integer must fit 32 bits, got 2 ** 31"),
        ("cap < 1e39", 7, "a number must fit float32, got 1e+39"),
        ("cap / 1e-39 < 1", 7, "a number must fit float32, got 1e-39"),
        ("h @ 2 < 4", 1, "'h @ 2' uses an operator that is not part of the expression language"),
        ("h << 31 < 4", 6, "'<<' shifts by 0 to 30 bits, got 31"),
        ("h >> -1 < 4", 6, "'>>' shifts by 0 to 30 bits, got -1"),
        ("h << cap < 4", 6, "'<<' needs integers, got the float 'cap'; use int(...)"),
        ("(h & cap) < 4", 6, "'&' needs booleans, or integers alone, got a float: 'cap'"),
        ("(h ^ causal) < 4", 2, "'^' needs booleans, or integers alone, got an integer: 'h'"),
        ("h | 1 == h", 1, "'|' binds tighter than the comparison beside it: 'h | 1'"),
        ("~cap < 1", 2, "'~' needs booleans, or integers alone, got a float: 'cap'"),
        ("causal == 1", 1, "'==' needs numbers, got the boolean 'causal'; use where(condition, a, b)"),
        ("cap < 1e38 * 1e38", 7, "a number must fit float32, got 1e+38 * 1e+38"),
        ("cap < inf - inf", 7, "a number must fit float32, got inf - inf"),
        ("h < int(inf)", 5, "'int(inf)' has no finite value"),
        ("cap < floor(-inf)", 7, "'floor(-inf)' has no finite value"),
        ("h < max", 5, "'max' is a function and must be called: max(...)"),
        ("h < max(1)", 5, "max() takes 2 to 8 arguments, got 1"),
        ("0 < h in (1, 2)", 1, "'0 < h in (1, 2)': only < <= > >= == != compare values, and one 'in' alone"),
        ("cap in (1, 2)", 1, "'in' needs an integer, got a float: 'cap'; use // or int(...)"),
        ("h in (1, 2.5)", 10, "'in' needs integers, got a float: '2.5'"),
        ("h in size", 6, "'in' needs a list of integers or a tensor that holds one, got 'size'"),
        ("h in doc[b]", 6, "'in' needs a tensor of integers whose last dim, the list, is an integer up to 64; 'doc'"),
        ("h in chosen[b, h]", 6, "'in' takes the last dim of 'chosen' as its list: index the 1 before it, chosen[b]"),
        ("h == (1, 2)", 6, "'(1, 2)' is not part of the expression language"),
        ("h < max(*h, 1)", 9, "'*h' is not part of the expression language"),
        ("h < max(h, key=1)", 5, "'max(h, key=1)' is not part of the expression language"),
        ("h.real > 1", 1, "'h.real' is not part of the expression language"),
        ("h is 1", 1, "'h is 1': only < <= > >= == != compare values"),
        ("where(causal, h, causal)", 1, "both arms of 'where' must be numbers or both booleans"),
        ("causal and ''", 12, "\"''\" is not part of the expression language"),
        ("'öä' < foo", 1, "\"'öä'\" is not part of the expression language"),
        ("größe < 1 and foo", 1, "unknown name 'größe'"),
        ("(h < 1 or 'ö' < 2)", 11, "\"'ö'\" is not part"),
        ("h < 1 # why", 7, "an expression cannot hold a comment"),
        ("h <", 4, "not a Python expression: 'h <'"),
        ("5if causal else 3", 1, "not a Python expression: '5if causal else 3' (invalid decimal literal)"),
        ("-" * 5000 + "h", 1, "the expression is nested too deeply"),
        ("h + 1", 1, "a mask must be a boolean, got an integer: 'h + 1'"),
        ("softcap(2) < 1", 1, "in 'softcap': a mask cannot read 'score': it decides before any score is known"),
    ],
)
def test_error_names_the_column(text: str, column: int, message: str) -> None:
    with pytest.raises(ExprError) as caught:
        mask(text)
    assert message in caught.value.message
    assert caught.value.column == column


def test_columns_count_characters_not_bytes() -> None:
    tensors = {"größe": TensorSpec(name="größe", dims=("h",))}
    with pytest.raises(ExprError) as caught:
        parse("größe[h] < foo", Scope(tensors=tensors), Type.BOOL)
    assert caught.value.column == 12


def test_an_index_cannot_depend_on_the_score() -> None:
    with pytest.raises(ExprError, match="must be an integer"):
        score("slope[score]")


def test_recursion_names_the_cycle() -> None:
    macros = {
        "near": Macro(name="near", params=(), body="far or q_idx == 0", type=Type.BOOL),
        "far": Macro(name="far", params=(), body="not near", type=Type.BOOL),
    }
    with pytest.raises(ExprError, match="'near' is defined by itself: near -> far -> near"):
        parse("near", Scope(macros=macros), Type.BOOL)


# ------------------------------------------------------------------------------------------------------------- fuzz

NAMES = st.sampled_from(["score", "q_idx", "h", "size", "cap", *SCOPE.macros, *SCOPE.tensors, "where", "max", "exp"])
SYMBOLS = st.sampled_from([*"()[]+-*/%<&|~:=.,#\n", "//", "**", ">=", "!=", ":=", "...", "'x'"])
WORDS = st.sampled_from(
    ["and", "or", "not", "if", "else", "in", "is", "for", "lambda", "yield", "await", "True", "None"]
)
NUMBERS = st.sampled_from(["0", "1", "2", "0.5", "1e30", "2147483647", "1j", "0x" + "f" * 5000])
TOKENS = st.lists(st.one_of(NAMES, SYMBOLS, WORDS, NUMBERS), max_size=16).map(" ".join)


@given(st.one_of(st.text(max_size=40), TOKENS), st.sampled_from(Type))
def test_no_text_raises_anything_but_expr_error(text: str, want: Type) -> None:
    with contextlib.suppress(ExprError):
        check_syntax(text)
        assert parse(text, SCOPE, want).type is want


@given(TOKENS)
def test_a_column_lies_within_the_text_or_just_after(text: str) -> None:
    with pytest.raises(ExprError) as caught:
        parse(text + " ?", SCOPE, Type.FLOAT)
    assert 1 <= caught.value.column <= len(text) + 3


@given(st.text(max_size=30))
def test_no_header_raises_anything_but_expr_error(text: str) -> None:
    with contextlib.suppress(ExprError):
        name, params = parse_header(text)
        assert all(word.isidentifier() for word in (name, *params))
