"""Answers to the page's requests: JSON in, JSON out. No file is written and nothing of a request is run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import yaml

from codegen import PROGRAM
from codegen.inspect.block_status import Status
from codegen.inspect.call import ScalarError
from codegen.inspect.entries import entry_text
from codegen.inspect.highlight import python_html
from codegen.inspect.images import data_uri
from codegen.inspect.kinds import KINDS, SCHEDULES, kinds
from codegen.inspect.mathematics import formulas, legend
from codegen.inspect.portrait import Portrait, View, draw
from codegen.inspect.usage import jax_call, torch_call
from codegen.ir.expr import INDEX_NAMES, LENGTH_NAMES, SCORE
from codegen.ir.parse import FUNCTIONS, INFINITY
from codegen.load.hints import hints
from codegen.load.spec_file import load, load_text
from codegen.render.package import render_variant
from codegen.spec.model import Spec, Variant
from codegen.studio.entries import Json, RequestError, entry_of, form_of, scalar_field, scalars_of, view_of
from codegen.util.errors import CodegenError, Problem, SpecError
from codegen.util.shipped import shipped_path

ENTRY = "entry"
"""The name of a request's text in error messages."""

SPECS = ("variants.yaml", "library.yaml")


def look(request: Json) -> Json:
    """Everything but the kernels: the entry as YAML and as a form, problems, formulas, the picture, calls."""
    answer: dict[str, Any] = {"problems": []}
    try:
        text = entry_of(request)
        answer |= {"entry": text, "form": form_of(text)}
        spec = _spec(text)
        variant = _first(spec)
        answer |= _described(spec, variant)
        view, scalars = view_of(request.get("view", {})), scalars_of(request.get("scalars", {}))
        answer["picture"] = _drawn(draw(variant, view, scalars), view)
    except SpecError as error:
        names = _names(text)
        answer["problems"] = [_problem(problem, names) for problem in error.problems]
    except RequestError as error:
        answer["problems"] = [{"field": error.field, "line": 0, "message": str(error)}]
    except ScalarError as error:
        answer["problems"] = [{"field": scalar_field(error.name), "line": 0, "message": error.message}]
    except CodegenError as error:
        answer["problems"] = [{"field": "view", "line": 0, "message": str(error)}]
    return answer


def kernels(request: Json) -> Json:
    """The paths of the variant's rendered files, and one of them as HTML: `file`, or the portable kernels."""
    text = entry_of(request)
    try:
        files = dict(_rendered(text))
    except SpecError as error:
        raise RequestError(str(error.problems[0]), ENTRY) from None
    name = next(iter(files)).split("/")[0]
    wanted = request.get("file") or "portable.py"
    path = f"{name}/{wanted}"
    if path not in files:
        raise RequestError(f"the variant has no file {str(wanted)[:80]!r}", "file")
    short = [each.removeprefix(f"{name}/") for each in files]
    return {"files": short, "file": wanted, "lines": files[path].count("\n"), "html": python_html(files[path])}


@lru_cache(maxsize=1)
def examples() -> Json:
    """The variants to begin with, and the names that an expression may use."""
    found = []
    for file in SPECS:
        path = shipped_path(file)
        text = path.read_text(encoding="utf-8")
        for variant in load(path).variants.values():
            entry = entry_text(text, variant, with_macros=file != SPECS[0])
            found.append({"name": variant.name, "file": file, "doc": variant.doc, "entry": entry})
    return {"examples": found, "language": _language()}


def _language() -> Json:
    """The names that an expression may use, in groups."""
    named = yaml.safe_load(shipped_path(SPECS[0]).read_text(encoding="utf-8"))
    return {
        "integers": [*INDEX_NAMES, *LENGTH_NAMES],
        "in a score": [SCORE, INFINITY],
        "functions": sorted([*FUNCTIONS, "where"]),
        "masks": list(named["masks"]),
        "scores": list(named["scores"]),
    }


# ------------------------------------------------------------------------------------------------------------ the parts


@lru_cache(maxsize=32)
def _spec(text: str) -> Spec:
    return load_text(text, ENTRY)


def _first(spec: Spec) -> Variant:
    return next(iter(spec.variants.values()))


@lru_cache(maxsize=4)
def _rendered(text: str) -> tuple[tuple[str, str], ...]:
    return tuple(render_variant(_first(_spec(text))).items())


def _names(text: str) -> list[str]:
    """The names of the variants of a file with problems, the longest first."""
    try:
        variants = yaml.safe_load(text)["variants"]
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError, TypeError, KeyError):
        return []
    return sorted(map(str, variants), key=len, reverse=True) if isinstance(variants, dict) else []


def _problem(problem: Problem, names: Sequence[str]) -> Json:
    """A problem at the form's field: `variants.NAME.tensors.slope.dims` is `tensors.slope.dims`.

    A wrong name may have dots, so it is one of `names` that is cut off, not all up to the next dot.
    """
    field = problem.where
    for name in names:
        if f"{field}.".startswith(f"variants.{name}."):
            field = field.removeprefix(f"variants.{name}").removeprefix(".") or "name"
            break
    return {"field": field, "line": problem.line, "message": problem.message}


def _described(spec: Spec, variant: Variant) -> Json:
    package = f"{variant.name}_ops"
    return {
        "name": variant.name,
        "others": list(spec.variants)[1:],
        "hints": hints(spec),
        "formulas": [{"label": f.label, "math": f.element} for f in formulas(variant)],
        "legend": [{"symbol": symbol, "meaning": meaning} for symbol, meaning in legend(variant)],
        "kinds": [{"name": kind, "meaning": KINDS[kind]} for kind in kinds(variant)],
        "scalars": [{"name": s.name, "type": s.type.value} for s in variant.scalars.values()],
        "render": f"{PROGRAM} render --variants {variant.name}.yaml --out {package}",
        "torch": python_html(torch_call(variant, package)),
        "jax": python_html(jax_call(variant, package)),
    }


def _drawn(portrait: Portrait, view: View) -> Json:
    sources = {"proven": True, **({"found": False} if portrait.picture.found is not None else {})}
    shares = {
        label: {status.name.lower(): portrait.share(status, proven=bool(proven)) for status in Status}
        for label, proven in sources.items()
    }
    return {
        "pairs": data_uri(portrait.pairs),
        "blocks": data_uri(portrait.blocks),
        "schedule": portrait.schedule.value,
        "schedule_meaning": SCHEDULES[portrait.schedule],
        "shares": {"proven": shares["proven"], "found": shares.get("found")},
        "kept": portrait.kept,
        "caption": f"{view.q_len} queries, from top to bottom, by {view.kv_len} keys",
    }
