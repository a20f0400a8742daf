"""The tables of the suite `parallel`: one for each section, with what is measured and what is modelled marked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

TITLES = {
    "links": "Bus bandwidth, GB/s",
    "ours": "Ours over several GPUs",
    "peers": "Torch's own context parallelism",
    "jax": "In JAX",
    "exact": "Exactness",
    "replay": "Rank replay on one GPU",
}

ABOUT = {
    "links": "Bytes that a GPU receives from the others in a second, by the bytes of all GPUs' parts together.",
    "ours": "Scaling: one GPU's time over the number of GPUs and the slowest GPU's time. Predicted: the cost model.",
    "peers": "The ratio is the peer's forward and backward over that of the strategy that ours chooses.",
    "jax": "One process with all GPUs. The ratio is the implementation's forward and backward over ours, auto.",
    "exact": "Bits beside one GPU's, and errors against float32 over one GPU's errors.",
    "replay": "Kernels and local copies of every rank are measured, one rank after the other; links are modelled.",
}

PEER_TITLES = {
    "cp-cudnn": "torch context_parallel, cuDNN",
    "cp-flash": "torch context_parallel, FlashAttention-2",
    "cp-flex": "FlexAttention, PTRR",
    "kvax": "Kvax, hints restored",
}

AUTO = "chosen by auto"


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _links(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    kinds = list(dict.fromkeys(row["implementation"] for row in rows))
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row["case"], {})[row["implementation"]] = row
    return ["size", *kinds], [
        [case, *(number(found[kind]["gb_per_s"], 0) if kind in found else "-" for kind in kinds)]
        for case, found in cases.items()
    ]


def _ours(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    heads = [
        "case",
        "by",
        "one, ms",
        "fwd, ms",
        "scaling",
        "fwd+bwd, ms",
        "scaling",
        "slowest",
        "predicted, ms",
        "remark",
    ]
    return heads, [
        [
            row["case"],
            row["implementation"],
            number(row["one_ms"].get("fwd+bwd")),
            number(row["ms"].get("fwd")),
            percent(row["scaling"].get("fwd")),
            number(row["ms"].get("fwd+bwd")),
            percent(row["scaling"].get("fwd+bwd")),
            percent(row["imbalance"].get("fwd+bwd")),
            number(row["predicted_ms"]),
            row["note"] or row["remark"],
        ]
        for row in rows
    ]


def _beside(row: Row, ours: Mapping[str, Row]) -> str:
    mine, theirs = ours.get(row["case"], {}).get("ms", {}).get("fwd+bwd"), row["ms"].get("fwd+bwd")
    return number(theirs / mine) if mine and theirs else "-"


def _peers(rows: Sequence[Row], ours: Mapping[str, Row]) -> tuple[list[str], list[list[str]]]:
    return ["case", "by", "fwd, ms", "fwd+bwd, ms", "scaling", "ratio", "remark"], [
        [
            row["case"],
            PEER_TITLES.get(row["implementation"], row["implementation"]),
            number(row["ms"].get("fwd")),
            number(row["ms"].get("fwd+bwd")),
            percent(row["scaling"].get("fwd+bwd")),
            _beside(row, ours),
            row["note"] or row["remark"],
        ]
        for row in rows
    ]


def _exact(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    return ["case", "by", "bits of one GPU", "other bits", "error of dk, dv over one GPU's", "remark"], [
        [
            row["case"],
            row["implementation"],
            " ".join(name for name, same in row["bits"].items() if same) or "-",
            " ".join(name for name, same in row["bits"].items() if not same) or "-",
            ", ".join(number(row["errors"].get(name), 3) for name in ("dk", "dv")),
            row["note"] or row["remark"],
        ]
        for row in rows
    ]


def _replay(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    heads = [
        "case",
        "by",
        "planned",
        "replayed",
        "kernels, ms",
        "of one GPU's rate",
        "with links, ms",
        "scaling",
        "remark",
    ]
    return heads, [
        [
            row["case"],
            row["implementation"],
            percent(row["planned"]),
            percent(row["imbalance"].get("kernels")),
            number(row["ms"].get("kernels")),
            percent(row["scaling"].get("kernels")),
            number(row["ms"].get("fwd+bwd")),
            percent(row["scaling"].get("fwd+bwd")),
            row["note"] or (f"{row['source']}, {row['remark']}" if row["ms"] else row["remark"]),
        ]
        for row in rows
    ]


def tables(rows: Iterable[Row]) -> list[tuple[str, list[str], list[list[str]]]]:
    """For each section with rows: its name, the heads of its columns and its lines."""
    by_section: dict[str, list[Row]] = {}
    for row in rows:
        by_section.setdefault(row["section"], []).append(row)
    chosen = {row["case"]: row for row in by_section.get("ours", []) if row["remark"] == AUTO}
    in_jax = {row["case"]: row for row in by_section.get("jax", []) if row["implementation"] == "ours, auto"}
    made: dict[str, Callable[[list[Row]], tuple[list[str], list[list[str]]]]] = {
        "links": _links,
        "ours": _ours,
        "peers": lambda found: _peers(found, chosen),
        "jax": lambda found: _peers(found, in_jax),
        "exact": _exact,
        "replay": _replay,
    }
    return [(name, *made[name](by_section[name])) for name in TITLES if name in by_section]


def rates(rows: Iterable[Row]) -> str:
    """The value for the option `--machine`, from the links and from one GPU's times; "" if neither was measured."""
    found: dict[str, float] = {}
    for row in rows:
        if row["section"] == "links" and row["gb_per_s"] and row["implementation"] == "all-gather":
            found["link"] = max(found.get("link", 0.0), row["gb_per_s"] * 1e9)
        if row["section"] == "ours" and row["case"].startswith("causal ") and row["one_ms"]:
            one = row["one_ms"]
            # The forward is 2 of 7 parts of the work of both passes.
            both = row["tflops"]["fwd+bwd"] * row["ms"]["fwd+bwd"] * 1e9
            found["forward"] = max(found.get("forward", 0.0), both * 2 / 7 / one["fwd"] * 1e3)
            if one["fwd+bwd"] > one["fwd"]:
                backward = both * 5 / 7 / (one["fwd+bwd"] - one["fwd"]) * 1e3
                found["backward"] = max(found.get("backward", 0.0), backward)
    return ",".join(f"{name}={rate:.3g}" for name, rate in found.items())


WIDEST = 80
"""Characters of a remark in a table of text."""


def report(rows: Sequence[Row]) -> str:
    """All tables as text."""
    parts = []
    for name, heads, lines in tables(rows):
        lines = [[cell if len(cell) <= WIDEST else f"{cell[: WIDEST - 3]}..." for cell in line] for line in lines]
        widths = [max(len(line[i]) for line in [heads, *lines]) for i in range(len(heads))]
        text = [f"{TITLES[name]}. {ABOUT[name]}"]
        for line in [heads, *lines]:
            cells = (
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            text.append("  ".join(cells).rstrip())
        parts.append("\n".join(text))
    if found := rates(rows):
        parts.append(f"As measured here: --machine {found}")
    return "\n\n".join(parts)
