"""Reads what the page sends: an entry as form or as YAML, and the call to draw. Limits apply, and nothing is run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from codegen.inspect.portrait import View

LONGEST_ENTRY = 20_000
"""Most characters of an entry as YAML."""

LONGEST_SCALAR = 40
"""Most characters of a scalar's value."""

FLAGS = ("sink", "decay", "dropout", "prune")

HELD = {
    "variant": {"doc", "mask", "score", *FLAGS, "scalars", "tensors"},
    "scalar": {"type", "min", "max", "example"},
    "tensor": {"dims", "dtype", "grad", "example"},
}
"""The keys of an entry and of its scalars and tensors that the form has fields for."""

LIMITS = {
    "q_len": (1, 4096),
    "kv_len": (1, 4096),
    "q_offset": (-4096, 2**20),
    "batch": (0, 63),
    "head": (0, 127),
    "block_m": (1, 4096),
    "block_n": (1, 4096),
}
"""Number of a call -> the least and the most it may be."""

DEEPEST = 20
"""Deepest nesting of mappings and lists in an entry."""

_OPENING = (
    yaml.FlowMappingStartToken,
    yaml.FlowSequenceStartToken,
    yaml.BlockMappingStartToken,
    yaml.BlockSequenceStartToken,
)
_CLOSING = (yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken, yaml.BlockEndToken)

_COMMA = r",(?![^(]*\))"
"""A comma between dims, not one between the arguments of a function."""

MOST_BLOCKS = 128
"""Most blocks along a side of the picture."""

Json = Mapping[str, Any]


class RequestError(Exception):
    """A request that breaks the rules; `field` names the field that is wrong."""

    def __init__(self, message: str, field: str = "") -> None:
        self.field = field
        super().__init__(message)


def view_of(numbers: object) -> View:
    """The call to draw."""
    if not isinstance(numbers, dict):
        raise RequestError("'view' must be an object of integers", "view")
    found: dict[str, int] = {}
    for name, value in numbers.items():
        if name not in LIMITS:
            raise RequestError(f"'view' has no number '{name}'; it has {', '.join(LIMITS)}", "view")
        low, high = LIMITS[name]
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise RequestError(f"{name} must be an integer from {low} to {high}, got {str(value)[:40]}", f"view.{name}")
        found[name] = value
    view = View(**found)
    for length, block, name in ((view.q_len, view.block_m, "block_m"), (view.kv_len, view.block_n, "block_n")):
        if length > MOST_BLOCKS * block:
            least = -(-length // MOST_BLOCKS)
            raise RequestError(f"{name} must be at least {least} for {length} tokens, got {block}", f"view.{name}")
    return view


def scalars_of(values: object) -> dict[str, str]:
    """The scalars of the call that is drawn, as text."""
    if not isinstance(values, dict):
        raise RequestError("'scalars' must be an object of texts", "scalars")
    for name, value in values.items():
        if not isinstance(value, str) or len(value) > LONGEST_SCALAR:
            got = f"{len(value)} characters" if isinstance(value, str) else str(value)[:LONGEST_SCALAR]
            raise RequestError(f"expected a text of at most {LONGEST_SCALAR} characters, got {got}", scalar_field(name))
    return {str(name): value.strip() for name, value in values.items() if value.strip()}


def scalar_field(name: str) -> str:
    """The page's field for the value of a scalar in the call. `scalars.NAME` is the field of its declaration."""
    return f"view.{name}"


def entry_of(request: Json) -> str:
    """The entry of a request as YAML: the text `entry`, or the text made from the fields of `form`."""
    form, text = request.get("form"), request.get("entry")
    if form is not None:
        text = yaml_of(form)
    if not isinstance(text, str):
        raise RequestError("a request has 'entry', a text, or 'form', an object", "entry")
    if len(text) > LONGEST_ENTRY:
        raise RequestError(f"an entry has at most {LONGEST_ENTRY} characters, got {len(text)}", "entry")
    refuse_costly(text)
    return text


def refuse_costly(text: str) -> None:
    """Raise `RequestError` for a YAML text that takes long to read: with aliases, a few of which can stand for
    gigabytes, or nested deeply."""
    depth = 0
    try:
        for token in yaml.scan(text, Loader=yaml.SafeLoader):
            depth += isinstance(token, _OPENING) - isinstance(token, _CLOSING)
            if depth > DEEPEST:
                line = token.start_mark.line + 1
                raise RequestError(f"line {line}: an entry is nested at most {DEEPEST} deep", "entry")
            if isinstance(token, (yaml.AnchorToken, yaml.AliasToken)):
                line = token.start_mark.line + 1
                raise RequestError(
                    f"line {line}: anchors (&) and aliases (*) are not read here; write values out", "entry"
                )
    except (yaml.YAMLError, ValueError, OverflowError):
        return  # the loader says what is wrong, and at which line


# ------------------------------------------------------------------------------------------------------- form and YAML


def yaml_of(form: object) -> str:
    """The form's fields as a spec file. Wrong values stay as they are: the loader says what is wrong with them."""
    if not isinstance(form, dict):
        raise RequestError("'form' must be an object", "form")
    entry: dict[str, Any] = {key: _text(form, key) for key in ("doc", "mask", "score") if _text(form, key)}
    entry |= {flag: True for flag in FLAGS if form.get(flag) is True}
    scalars = _by_name("scalars", ((_text(row, "name"), _scalar(row)) for row in _rows(form, "scalars")))
    tensors = _by_name("tensors", ((_text(row, "name"), _tensor(row)) for row in _rows(form, "tensors")))
    entry |= {key: value for key, value in (("scalars", scalars), ("tensors", tensors)) if value}
    spec: dict[str, Any] = {}
    for kind in ("masks", "scores"):
        rows = [row for row in _rows(form, "named") if row.get("kind") == kind]
        named = _by_name(kind, ((_text(row, "header"), _text(row, "body")) for row in rows))
        spec |= {kind: named} if named else {}
    spec["variants"] = {_text(form, "name"): entry}
    return yaml.dump(spec, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)


def form_of(text: str) -> Json | None:
    """The fields of the first variant of a spec file without aliases; None if a form cannot hold the file."""
    try:
        spec = yaml.safe_load(text)
        name, entry = next(iter(spec["variants"].items()))
        entry = entry or {}
        if set(spec) - {"variants", "masks", "scores"} or len(spec["variants"]) > 1 or not _is_held(entry):
            return None
        return {
            "name": str(name),
            **{key: str(entry.get(key, "")) for key in ("doc", "mask", "score")},
            **{flag: entry.get(flag) is True for flag in FLAGS},
            "scalars": [_scalar_row(*item) for item in (entry.get("scalars") or {}).items()],
            "tensors": [_tensor_row(*item) for item in (entry.get("tensors") or {}).items()],
            "named": [
                {"kind": kind, "header": str(header), "body": str(body)}
                for kind in ("masks", "scores")
                for header, body in (spec.get(kind) or {}).items()
            ],
        }
    except (
        yaml.YAMLError,
        ValueError,
        OverflowError,
        RecursionError,
        TypeError,
        KeyError,
        AttributeError,
        StopIteration,
    ):
        return None


def _is_held(entry: Json) -> bool:
    """Whether the form has a field for each key of an entry: it would drop the others, and what is wrong with them."""
    scalars = [value for value in (entry.get("scalars") or {}).values() if isinstance(value, dict)]
    tensors = (entry.get("tensors") or {}).values()
    keys = [("variant", entry), *(("scalar", each) for each in scalars), *(("tensor", each) for each in tensors)]
    flags = [entry.get(flag, False) for flag in FLAGS] + [each.get("grad", False) for each in tensors]
    return all(set(each) <= HELD[kind] for kind, each in keys) and all(isinstance(flag, bool) for flag in flags)


class _Dumper(yaml.SafeDumper):
    """Writes no aliases: equal lists of dims are written twice."""

    def ignore_aliases(self, _data: object) -> bool:
        return True


def _rows(form: Json, key: str) -> list[Json]:
    rows = form.get(key) or []
    if not isinstance(rows, list) or len(rows) > 50 or not all(isinstance(row, dict) for row in rows):
        raise RequestError(f"'{key}' must be a list of at most 50 objects", key)
    return rows


def _by_name(kind: str, rows: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The rows as a mapping. Two of one name are refused: the second would take the place of the first."""
    found: dict[str, Any] = {}
    for name, value in rows:
        if name in found:
            raise RequestError(f"two rows have the name {name!r}", f"{kind}.{name}")
        found[name] = value
    return found


def _text(row: Json, key: str) -> str:
    value = row.get(key)
    return " ".join(value.split()) if isinstance(value, str) else ""


def _scalar(row: Json) -> Any:
    limits = {key: _number(_text(row, key)) for key in ("min", "max", "example") if _text(row, key)}
    return {"type": _text(row, "type"), **limits} if limits else _text(row, "type")


def _tensor(row: Json) -> Json:
    dims = [_number(dim.strip()) for dim in re.split(_COMMA, _text(row, "dims").strip("[]")) if dim.strip()]
    tensor: dict[str, Any] = {"dims": dims}
    if _text(row, "dtype") not in ("", "float32"):
        tensor["dtype"] = _text(row, "dtype")
    if row.get("grad") is True:
        tensor["grad"] = True
    if _text(row, "example"):
        tensor["example"] = _text(row, "example")
    return tensor


def _number(text: str) -> Any:
    """The number that a text spells, or the text itself."""
    if re.fullmatch(r"-?\d{1,15}", text):
        return int(text)
    if re.fullmatch(r"-?(\d{1,20}\.\d{0,20}|\.\d{1,20})([eE][-+]?\d{1,3})?", text):
        return float(text)
    return text


def _scalar_row(name: object, value: Any) -> Json:
    entry = value if isinstance(value, dict) else {"type": value}
    return {"name": str(name), **{key: str(entry.get(key, "")) for key in ("type", "min", "max", "example")}}


def _tensor_row(name: object, value: Any) -> Json:
    return {
        "name": str(name),
        "dims": ", ".join(map(str, value["dims"])),
        "dtype": str(value.get("dtype", "float32")),
        "grad": value.get("grad") is True,
        "example": str(value.get("example", "")),
    }
