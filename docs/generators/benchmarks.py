"""`benchmarks/`: a page for each suite of the stored runs, and a page that compares the suites."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bench.record import OURS, PASSES, TITLES, parse_name
from bench.report import parallel
from bench.report.tables import computed_shares, costs_table, notes
from bench.report.targets import causal_beside
from docs.generators.charts import SCHEMES, Row, ratio_chart
from docs.generators.markdown import code, fence, figures, page, table
from docs.generators.runs import OTHERS, Run, Shown, geometric_mean, shown_runs, suites

PASS_NAMES = {"fwd": "forward", "bwd": "backward"}

PEERS = {
    "flex": "FlexAttention",
    "flex-max": "FlexAttention, max-autotune",
    "fa2": "FlashAttention-2",
    "cudnn": "cuDNN",
    "efficient": "memory-efficient",
    "fa4": "FlashAttention-4",
    "fla": "FLA",
}

DECODE = {
    "codegen": "ours",
    "contiguous": "ours, a page for each sequence",
    "balanced": "ours, splits by the batch",
    "flashinfer": "FlashInfer",
    "bfloat16": "ours, bfloat16 caches",
    "single": "ours, one query",
    "packed": "ours, packed without pages",
    "apart": "ours, a call for each number of queries",
    "jax": "ours in JAX",
    "pallas": "Pallas' kernel for GPUs",
    "fa3": "FlashAttention-3",
    "sdpa": "FlashAttention-2, by SDPA",
}
"""The implementations of the suite `decode`."""

MODELS = {
    "sdpa": "SDPA, FlashAttention-2 first",
    "cudnn": "SDPA, cuDNN first",
    "flex": "FlexAttention, compiled",
    "eager": "eager",
    "xla": "jax.nn, XLA",
}
"""The implementations of the suite `models`, beside ours."""

ABOUT = {
    "front": "The shapes that matter most, beside every peer, and each variant's share of causal attention's rate.",
    "core": "Causal and full attention at head dims 64, 128 and 256, and what other variants and head dims cost.",
    "gqa": "Causal and full attention with 32 query heads for 8 key heads.",
    "fa3": "FlashAttention-3's benchmark: 16384 tokens, hidden size 2048. Here its shortest sequences.",
    "fla": "Attention with a log-decay, on the shapes of FLA's benchmark.",
    "paper": "The variants of the FlexAttention paper: 16384 tokens, head dim 64.",
    "dims": "Causal attention at 8192 tokens, by head dim.",
    "variants": "Every variant at 16384 tokens, beside causal attention of the same shape: what a mask or score costs.",
    "packed": "Kvax's benchmark: 131072 tokens, 12 documents in each row, packed and with segment ids.",
    "decode": "Decoding steps and prompts on keys in pages: 32 query heads for 8 key heads of 128 columns.",
    "models": "Training steps of whole models in transformers and Flax, eight layers of each, with random weights.",
    "parallel": "One sequence on several GPUs, every strategy, beside one GPU, torch's own way and Kvax's.",
    "jax": "The JAX ops beside torch's, cuDNN through `jax.nn`, Pallas and Kvax.",
    "host": "CPU time of one call: 8 heads, 128 tokens, head dim 64.",
}

INTRODUCTION = """Every figure here is read from a stored run under [`bench/results/`](../../bench/results) when the
site is built. Of each suite and GPU the latest run is shown, and an earlier one only for the cases or peers that no
later one has. Each page gives device, date, revision and command; [the method](method.md) says how it is measured. A
ratio is the peer's time over ours: **below 1 ours is slower**, and such ratios are bold.

All times are of bfloat16. TFLOP/s count unmasked scores only."""


def pages() -> dict[str, str | bytes]:
    found: dict[str, str | bytes] = {}
    rows: list[list[str]] = []
    names = [name for name in ABOUT if name in suites()] + [name for name in suites() if name not in ABOUT]
    for suite in names:
        shown = list(shown_runs(suite))
        found[f"benchmarks/{suite}.md"] = _suite(suite, shown)
        for each in shown:
            found |= _charts(each)
            rows += _summary(each)
    heads = ["suite", "GPU", "peer", "cases", "forward", "backward", "slower in"]
    order = ", ".join(["method", *names])
    found["benchmarks/index.md"] = f"---\norder: [{order}]\n---\n" + page(
        "Benchmarks",
        INTRODUCTION,
        "## Summary",
        "Geometric mean of the ratios, and the range from the least to the greatest.",
        figures(heads, rows),
        "## Suites",
        table(["suite", "what"], [[f"[{name}]({name}.md)", ABOUT.get(name, "")] for name in names]),
    )
    return found


def _summary(shown: Shown) -> Iterator[list[str]]:
    by_peer: dict[str, dict[str, dict[str, float]]] = {}
    for (peer, which), values in shown.ratios().items():
        by_peer.setdefault(peer, {})[which] = values
    for peer, found in by_peer.items():
        every = [ratio for values in found.values() for ratio in values.values()]
        slower = sum(ratio < 1 for ratio in every)
        cases = {case for values in found.values() for case in values}
        cells = [_range(list(found.get(which, {}).values())) for which in PASSES]
        link = f"[{shown.suite}]({shown.suite}.md#{_anchor(shown.run)})"
        yield [link, shown.run.gpu.upper(), PEERS[peer], str(len(cases)), *cells, f"{slower} of {len(every)}"]


def _range(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{geometric_mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _anchor(run: Run) -> str:
    return run.path.stem if run.gpu == "h100" else f"{run.gpu}-{run.path.stem}"


def _suite(suite: str, shown: list[Shown]) -> str:
    parts = [ABOUT.get(suite, "")]
    for each in shown:
        run = each.run
        parts += [f"## {run.gpu.upper()}, {run.date} {{#{_anchor(run)}}}", _facts(run), *_tables(each)]
    return page(suite, *parts)


def _facts(run: Run) -> str:
    machine = run.results.machine
    versions = ", ".join(
        f"{name} {what}"
        for name, what in machine.items()
        if name not in ("gpu", "kernels", "revision", "revision_date") and what != "missing"
    )
    rows = {
        "Device": run.device,
        "Date": run.date,
        "Revision of the kernels": code(run.revision) if run.revision else "not recorded",
        "Command": code(run.command) if run.command else "not recorded",
        "Software": versions,
        "All of it": f"[{run.link}](../../{run.link})",
    }
    return "\n".join(f"- {name}: {what}" for name, what in rows.items())


def _tables(shown: Shown) -> Iterator[str]:
    run, suite = shown.run, shown.suite
    if suite in OTHERS:
        yield from OTHER_TABLES[suite](run.results.others[suite])
        return
    if shown.ratios():
        name = f"{_anchor(run)}-{suite}"
        for scheme in SCHEMES:
            yield f"![The peers' time over ours]({name}-{scheme.name}.svg#only-{scheme.name})"
    for which in PASSES:
        yield f"### {PASS_NAMES[which].capitalize()} {{#{_anchor(run)}-{which}}}"
        yield _speed(shown, which)
    if suite == "variants":
        yield _shares(run)
    if computed := computed_shares(run.results) if suite == "front" else {}:
        yield _computed(run, computed)
    details = "\n\n".join(part for part in (costs_table(run.results), notes(run.results)) if part)
    if details:
        listing = "\n".join(f"    {line}".rstrip() for line in fence(details, "text").splitlines())
        yield f'??? note "Memory, schedules, first calls; what was not measured"\n\n{listing}'


def _speed(shown: Shown, which: str) -> str:
    cases, timed = shown.cases, shown.run.results.timed()
    peers = [peer for peer in TITLES if peer != OURS and any((case, peer) in shown.new for case in cases)]
    heads = ["case", "ours, ms", "TFLOP/s", *(text for peer in peers for text in (TITLES[peer], "ratio"))]
    rows = []
    for case in cases:
        ours = timed.get((case, which, OURS))
        row = [
            case,
            f"{ours.ms:.3f}" if ours and ours.ms else "-",
            f"{ours.tflops:.0f}" if ours and ours.tflops else "-",
        ]
        for peer in peers:
            theirs = timed.get((case, which, peer))
            row.append(f"{theirs.tflops:.0f}" if theirs and theirs.tflops else "-")
            row.append(_ratio(theirs.ms / ours.ms) if theirs and theirs.ms and ours and ours.ms else "-")
        rows.append(row)
    return figures(heads, rows)


def _ratio(value: float) -> str:
    text = f"{value:.2f}" if value < 100 else f"{value:.0f}"
    return f"**{text}**" if value < 1 else text


def _computed(run: Run, computed: Mapping[str, Mapping[str, tuple[float, float]]]) -> str:
    """Our rate of each variant as a share of causal attention's rate, counting all scores of computed blocks."""
    rows = [[case, *(f"{shares[which][1]:.0%}" for which in PASSES)] for case, shares in computed.items()]
    heads = ["case", *(f"{PASS_NAMES[which]}, share of causal's rate" for which in PASSES)]
    text = (
        "Blocks of 128 rows and keys are computed whole if one of their scores is unmasked. Counting all of their "
        "scores, the rate is this share of causal attention's at the same shape."
    )
    return f"### Beside causal {{#{_anchor(run)}-causal}}\n\n{text}\n\n{figures(heads, rows)}"


def _shares(run: Run) -> str:
    """Our rate of each variant as a share of causal attention's rate."""
    timed = run.results.timed()
    rows = []
    for case in run.suites()["variants"]:
        cells = []
        for which in PASSES:
            own, causal = timed.get((case, which, OURS)), timed.get((causal_beside(case) or "", which, OURS))
            if own and causal and own.tflops and causal.tflops:
                cells.append(f"{own.tflops / causal.tflops:.0%}")
        if len(cells) == len(PASSES):
            rows.append([parse_name(case).variant, case, *cells])
    text = """### Share of causal's rate {#share}

The rate per unmasked score over that of `causal` of the same shape. Blocks that a mask cuts are computed whole:
`python -m bench.cases.block_shares` prints how many of the scores of computed blocks a mask keeps, a bound on these
shares."""
    return f"{text}\n\n" + figures(["variant", "case", "forward", "backward"], rows)


def _packed(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    titles = {"packed": "ours, packed", "segments": "ours, segment ids", **PEERS}
    yield figures(
        ["case", "implementation", "forward, ms", "TFLOP/s", "backward, ms", "TFLOP/s", "schedule, ms"],
        [
            [
                row["case"],
                titles.get(row["implementation"], row["implementation"]),
                *(_number(row[kind].get(which)) for which in PASSES for kind in ("ms", "tflops")),
                _number(row["ms"].get("schedule")),
            ]
            for row in rows
        ],
    )


def _jax(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    titles = {
        "same": "Beside the torch ops",
        "cudnn": "Beside cuDNN, through jax.nn",
        "pallas": "Beside Pallas",
        "kvax": "Beside Kvax",
        "first": "First calls of a process",
    }
    sections: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        sections.setdefault(row["section"], []).append(row)
    for name, found in sections.items():
        kinds = list(dict.fromkeys(kind for row in found for kind in row["ms"]))
        yield f"### {titles.get(name, name)}"
        yield figures(
            ["case", "implementation", *(f"{kind}, ms" for kind in kinds), "remark"],
            [
                [
                    row["case"],
                    row["implementation"],
                    *(_number(row["ms"].get(kind)) for kind in kinds),
                    row["remark"] or row["note"],
                ]
                for row in found
            ],
        )


def _host(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    kinds = {
        "forward_us": "forward, µs",
        "autograd_us": "forward with autograd, µs",
        "backward_us": "forward and backward, µs",
        "replay_us": "replay of a CUDA graph, µs",
    }
    yield figures(
        ["case", "implementation", *kinds.values()],
        [[row["case"], row["implementation"], *(_number(row[kind], 0) for kind in kinds)] for row in rows],
    )


def _decode(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    yield (
        "TB/s count the keys and values that the mask lets the queries see, TFLOP/s the scores that it keeps. A ratio "
        "is the time of what a row names, divided by its own. A plan serves all layers of a step."
    )
    yield figures(
        ["case", "implementation", "µs", "TB/s", "TFLOP/s", "ratio", "plan, µs", "remark"],
        [
            [
                row["case"],
                DECODE.get(row["implementation"], row["implementation"]),
                _number(row["us"], 1),
                _number(row["tb_per_s"], 2),
                _number(row.get("tflops"), 0),
                _over(row),
                _number(row["plan_us"], 1),
                row["note"],
            ]
            for row in rows
        ],
    )


def _over(row: Mapping[str, Any]) -> str:
    """The ratio of a row of `decode`, and the implementation that it compares with."""
    if not row.get("ratio"):
        return "-"
    return f"{row['ratio']:.2f} of {DECODE.get(row['over'], row['over'])}"


def _models(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    steps: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for row in rows:
        (steps if row["host_us"] is None else calls).append(row)
    ours = {row["case"]: row["ms"] for row in steps if row["implementation"] == OURS}
    yield "A step is forward, backward and AdamW in bfloat16. Memory is that of the whole step, weights included."
    yield figures(
        ["case", "implementation", "step, ms", "tokens/s", "peak, GiB", "ratio", "remark"],
        [
            [
                row["case"],
                MODELS.get(row["implementation"], row["implementation"]),
                _number(row["ms"]),
                _number(row["tokens_per_s"], 0),
                _number(row["peak_gib"], 1),
                _ratio(row["ms"] / ours[row["case"]]) if row["ms"] and ours.get(row["case"]) else "-",
                row["note"],
            ]
            for row in steps
        ],
    )
    if calls:
        yield "CPU time of one call of attention in a forward pass with autograd, eight heads and 128 tokens:"
        yield figures(
            ["case", "implementation", "µs"],
            [[row["case"], row["implementation"], _number(row["host_us"], 1)] for row in calls],
        )


def _parallel(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    for name, heads, lines in parallel.tables(rows):
        yield f"### {parallel.TITLES[name]}"
        yield parallel.ABOUT[name]
        yield figures(heads, lines)


OTHER_TABLES = {
    "packed": _packed,
    "decode": _decode,
    "models": _models,
    "parallel": _parallel,
    "jax": _jax,
    "host": _host,
}


def _number(value: float | None, digits: int | None = None) -> str:
    if value is None:
        return "-"
    if digits is None:
        digits = 0 if value >= 100 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def _charts(shown: Shown) -> dict[str, bytes]:
    """The chart of a run in both schemes, if it has peers."""
    run, suite = shown.run, shown.suite
    rows = chart_rows([shown])
    title = f"{suite} on {run.device}, {run.date}"
    return {
        f"benchmarks/{_anchor(run)}-{suite}-{scheme.name}.svg": ratio_chart(title, rows, scheme).encode()
        for scheme in SCHEMES
        if rows
    }


def chart_rows(chosen: Iterable[Shown], only: Iterable[str] = TITLES) -> list[Row]:
    """A row for each peer among `only` and each pass, with the ratios of all chosen runs."""
    values: dict[tuple[str, int], list[float]] = {}
    for shown in chosen:
        for (peer, which), found in shown.ratios().items():
            values.setdefault((peer, PASSES.index(which)), []).extend(found.values())
    return [
        Row(label=PEERS[peer], of=f"{len(values[peer, which])} cases", which=which, ratios=values[peer, which])
        for peer in only
        for which in range(len(PASSES))
        if (peer, which) in values
    ]
