"""The studio's page may send forms, which become YAML and back; a field that breaks a limit is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.inspect.entries import entry_text
from codegen.load.spec_file import load, load_text
from codegen.studio.answers import examples, kernels, look
from codegen.studio.entries import LONGEST_ENTRY, RequestError, entry_of, form_of, refuse_costly, view_of, yaml_of
from tests.support.paths import DEFAULT_SPEC, LIBRARY

SPECS = {path: load(path) for path in (DEFAULT_SPEC, LIBRARY)}
ALL = {name: path for path, spec in SPECS.items() for name in spec.variants}

FORM: dict[str, Any] = {
    "name": "mine",
    "mask": "causal and window(size)",
    "score": "softcap(30.0) + slope[h] * (kv_idx - q_idx)",
    "scalars": [{"name": "size", "type": "int", "min": "1", "max": "", "example": "256"}],
    "tensors": [{"name": "slope", "dims": "[h]", "dtype": "float32", "grad": True, "example": "0.5 / (1 + h)"}],
}


# The companion of a variant with `prune: true` has no entry of its own.
@pytest.mark.parametrize("name", [name for name in ALL if not name.endswith("_pruned")])
def test_a_form_holds_every_variant(name: str) -> None:
    path = ALL[name]
    variant = SPECS[path].variants[name]
    form = form_of(entry_text(path.read_text(encoding="utf-8"), variant, with_macros=path == LIBRARY))
    assert form is not None
    read = load_text(yaml_of(form), "entry").variants[name]
    for field in ("mask", "score", "tensors", "scalars", "sink", "decay", "dropout", "pruned"):
        assert getattr(read, field) == getattr(variant, field)
    assert read.doc.split() == variant.doc.split()


def test_a_form_holds_computed_dims() -> None:
    text = "variants: {a: {score: 't[h, q_idx] * r', scalars: {r: int}, tensors: {t: {dims: [h, 2 * r + 1]}}}}"
    form = form_of(text)
    assert form is not None
    assert load_text(yaml_of(form), "entry").variants["a"].tensors == load_text(text, "entry").variants["a"].tensors


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a: [",
        "variants: 3",
        "variants: {}",
        "variants: {a: {}, b: {}}",
        "x: 1",
        "\x00",
        "variants: {a: {maks: causal}}",
        "variants: {a: {sink: 1}}",
        "variants: {a: {scalars: {n: {type: int, most: 3}}}}",
        "variants: {a: {tensors: {t: {dims: [h], sorted: true}}}}",
    ],
)
def test_a_form_does_not_hold_other_texts(text: str) -> None:
    assert form_of(text) is None


def problems(request: dict[str, Any]) -> list[tuple[str, str]]:
    return [(problem["field"], problem["message"]) for problem in look(request)["problems"]]


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"name": "my variant"}, "name", "a name must be letters, digits and underscores"),
        ({"name": ""}, "name", "a name must be letters, digits and underscores"),
        ({"mask": "causal and"}, "mask", "invalid syntax"),
        ({"mask": "causl"}, "mask", "did you mean 'causal'?"),
        ({"mask": "__import__('os').system('true')"}, "mask", "not part of the expression language"),
        ({"score": "score + slop[h]"}, "score", "'slop' is no tensor of this variant; did you mean 'slope'?"),
        (
            {"scalars": [{"name": "size", "type": "int", "min": "9", "example": "2"}]},
            "scalars.size.example",
            "at least",
        ),
        ({"scalars": [{"name": "size", "type": "number"}]}, "scalars.size", "must be one of int float"),
        ({"scalars": FORM["scalars"] * 51}, "scalars", "at most 50"),
        ({"tensors": [{"name": "slope", "dims": "qidx", "grad": True}]}, "tensors.slope.dims", "unknown dim 'qidx'"),
        ({"tensors": [{"name": "slope", "dims": "h", "dtype": "int9"}]}, "tensors.slope.dtype", "must be one of"),
        ({"tensors": 3}, "tensors", "must be a list"),
        ({"scalars": FORM["scalars"] * 2}, "scalars.size", "two rows have the name 'size'"),
        ({"named": [{"kind": "masks", "header": "far", "body": "b"}] * 2}, "masks.far", "two rows have the name 'far'"),
        ({"named": [{"kind": "masks", "header": "far(n", "body": "q_idx > n"}]}, "masks.far(n", ""),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], field: str, message: str) -> None:
    found = problems({"form": FORM | change})
    assert any(where.startswith(field) and message in text for where, text in found), found


def test_a_name_with_dots_is_refused_at_its_field() -> None:
    found = problems({"form": FORM | {"name": "my.own.variant", "mask": "causl"}})
    assert [where for where, _ in found] == ["name", "mask"]
    assert found[0][1].endswith("got 'my.own.variant'; write 'my_own_variant'")


@pytest.mark.parametrize(
    ("view", "field", "message"),
    [
        ({"q_len": 0}, "view.q_len", "q_len must be an integer from 1 to 4096, got 0"),
        ({"q_len": 5000}, "view.q_len", "q_len must be an integer from 1 to 4096, got 5000"),
        ({"q_len": 1.5}, "view.q_len", "q_len must be an integer from 1 to 4096, got 1.5"),
        ({"q_len": None}, "view.q_len", "q_len must be an integer from 1 to 4096, got None"),
        ({"head": True}, "view.head", "head must be an integer from 0 to 127, got True"),
        ({"q_len": 4096, "block_m": 16}, "view.block_m", "block_m must be at least 32 for 4096 tokens, got 16"),
        ({"width": 3}, "view", "'view' has no number 'width'"),
        ([], "view", "'view' must be an object of integers"),
    ],
)
def test_a_wrong_view_is_named_and_formulas_are_shown(view: Any, field: str, message: str) -> None:
    answer = look({"form": FORM, "view": view})
    assert [p["field"] for p in answer["problems"]] == [field]
    assert answer["problems"][0]["message"].startswith(message)
    assert answer["formulas"]


def test_a_wrong_scalar_of_the_call() -> None:
    """It is marked at its own field, without the name of an option of the command line."""
    assert problems({"form": FORM, "scalars": {"size": "many"}}) == [("view.size", "expected int, got 'many'")]
    assert problems({"form": FORM, "scalars": {"size": "0"}}) == [("view.size", "expected at least 1, got 0")]
    short = "expected a text of at most 40 characters, got"
    assert problems({"form": FORM, "scalars": {"size": 3}}) == [("view.size", f"{short} 3")]
    assert problems({"form": FORM, "scalars": {"size": "1" * 41}}) == [("view.size", f"{short} 41 characters")]
    assert problems({"form": FORM, "scalars": 3}) == [("scalars", "'scalars' must be an object of texts")]


def test_a_good_entry_has_everything() -> None:
    answer = look({"form": FORM, "view": {"q_len": 256, "kv_len": 512, "q_offset": 256}, "scalars": {"size": "64"}})
    assert answer["problems"] == []
    assert [f["label"] for f in answer["formulas"]] == ["mask", "score"]
    assert answer["picture"]["schedule"] == "closed_form"
    assert answer["picture"]["pairs"].startswith("data:image/png;base64,")
    assert answer["picture"]["shares"]["proven"] == answer["picture"]["shares"]["found"]
    assert "mine_ops" in answer["torch"]
    assert "mine_ops" in answer["jax"]
    assert answer["form"]["tensors"][0]["dims"] == "h"
    # The YAML gives the same answer.
    again = look(
        {"entry": answer["entry"], "view": {"q_len": 256, "kv_len": 512, "q_offset": 256}, "scalars": {"size": "64"}}
    )
    assert again == answer


def test_markup_in_an_entry_is_escaped() -> None:
    answer = look({"form": FORM | {"doc": "<img src=x onerror=alert(1)>"}})
    assert answer["problems"] == []
    shown = " ".join([answer["torch"], answer["jax"], *(f["math"] for f in answer["formulas"])])
    assert "<img" not in shown + kernels({"form": FORM | {"doc": "<img src=x>"}})["html"]


def test_kernels_of_both_families() -> None:
    answer = kernels({"form": FORM})
    assert answer["file"] == "portable.py"
    assert {"hopper_fwd.py", "hopper_bwd.py", "launch.py", "packed/portable.py"} <= set(answer["files"])
    assert "<span" in kernels({"form": FORM, "file": "hopper_bwd.py"})["html"]
    for wrong in ("../../etc/passwd", "nothing.py", 3, ["portable.py"]):
        with pytest.raises(RequestError, match="the variant has no file"):
            kernels({"form": FORM, "file": wrong})
    with pytest.raises(RequestError, match="causl"):
        kernels({"form": FORM | {"mask": "causl"}})


@pytest.mark.parametrize("text", ["a: &x 1\nb: *x", "variants: {a: {mask: &m causal}}", "a: &a [1]"])
def test_aliases_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"line \d: anchors"):
        refuse_costly(text)
    assert problems({"entry": text})[0][0] == "entry"


@pytest.mark.parametrize("text", ["{" * 20_000, "[" * 20_000, "- " * 10_000, "? " * 10_000])
def test_deep_nesting_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="nested at most 20 deep"):
        refuse_costly(text)


@pytest.mark.parametrize("text", ["a: [", "\x00", "\ud800", "a: \t- b", "!!python/object:os.system x"])
def test_what_is_no_spec_has_problems(text: str) -> None:
    assert problems({"entry": text})


def test_requests_of_other_shapes_are_refused() -> None:
    for request in ({}, {"entry": 3}, {"form": 3}, {"entry": "x" * (LONGEST_ENTRY + 1)}):
        with pytest.raises(RequestError):
            entry_of(request)
    with pytest.raises(RequestError, match="'view' must be an object"):
        view_of(3)


def test_every_example_is_good() -> None:
    found = examples()
    assert [example["name"] for example in found["examples"]] == list(ALL)
    assert "causal" in found["language"]["masks"]
