"""References of variants that read tensors of tokens in odd ways, and the positions that ops reading by row accept."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor

from codegen.analysis.token_order import by_row
from codegen.load.spec_file import load
from codegen.testing.golden import load_manifest, load_op
from generated._runtime.core.checks import ArgumentError
from generated._runtime.core.sequences import ByRow, TokenRows, breaks_rule
from generated._runtime.core.settings import INTERPRET
from tests.support.rendering import importable, lint_problems
from tests.support.token_reads import ASKED, ENTRIES, PACKINGS, SPEC, check_packed, check_positions, drawn

pytestmark = pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 the ops run their kernels")


# Rendered too, to find names that generated code uses but does not define, or defines but does not use.
FURTHER = """
  undecided: {mask: (q_idx - kv_idx) % 2 != 2 or q_idx >= kv_idx}
  decaying: {decay: true}
  dropping_all: {dropout: true}
  dropping: {score: 0.5 * score, decay: true, sink: true, dropout: true}
  numbered: {mask: "w[h] >= 0.3", tensors: {w: {dims: [h]}}}
  limited: {mask: "kv_idx // 8 == lim[3] and q_idx >= kv_idx", tensors: {lim: {dims: [q_idx], dtype: int32}}}
  compared:
    mask: query_of[b, q_idx] <= key_of[kv_idx] and key_of[2] > 0
    tensors: {query_of: {dims: [b, kv_idx], dtype: int32}, key_of: {dims: [q_idx], dtype: int32}}
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with importable(tmp_path_factory.mktemp("token_reads"), "odd_references", SPEC + FURTHER):
        yield "odd_references"


def test_every_name_of_a_rendered_package_is_defined_and_used(package: str) -> None:
    assert lint_problems(package) == ""


class _InJax(torch.autograd.Function):
    """A function of JAX arrays, as a function of torch tensors with gradients."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        found, ctx.pullback = jax.vjp(function, *(jnp.asarray(x.numpy(force=True)) for x in tensors))
        return tuple(torch.tensor(np.array(x)) for x in found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.pullback(tuple(jnp.asarray(x.numpy()) for x in gradients))
        return None, *(torch.tensor(np.array(x)) for x in found)


def in_jax(op: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    def called(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        layout = {} if "cu_seqlens_q" in options else {"layout": "bhsd"}
        arrays = {n: x for n, x in options.items() if isinstance(x, Tensor)}
        trained = {n: x for n, x in arrays.items() if x.requires_grad}
        fixed = {n: jnp.asarray(x.numpy()) if n in arrays else x for n, x in options.items() if n not in trained}

        def function(q: Any, k: Any, v: Any, *own: Any) -> Any:
            return op(q, k, v, **dict(zip(trained, own, strict=True)), **fixed, **layout)

        o, lse = _InJax.apply(function, q, k, v, *trained.values())
        return o, lse

    return called


def op_of(package: str, framework: str, name: str) -> Callable[..., Any]:
    op: Callable[..., Any] = getattr(importlib.import_module(f"{package}.{framework}"), name)
    return op if framework == "torch" else in_jax(op)


CASES = [*((name, "mixed") for name in ENTRIES), *(("nested", packing) for packing in PACKINGS if packing != "mixed")]


@pytest.mark.parametrize(("name", "packing"), CASES)
def test_packed_tokens_are_read_within_their_sequence(package: str, name: str, packing: str) -> None:
    check_packed(name, op_of(package, "torch", name), PACKINGS[packing])


@pytest.mark.parametrize(
    ("name", "packing"), [("two_limits", "mixed"), ("nested", "mixed"), ("nested", "no_keys"), ("nested", "no_queries")]
)
def test_packed_tokens_are_read_within_their_sequence_in_jax(package: str, name: str, packing: str) -> None:
    check_packed(name, op_of(package, "jax", name), PACKINGS[packing])


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("name", ["nested", "free_dims"])
def test_positions_in_any_order(package: str, framework: str, name: str) -> None:
    positions = torch.stack([torch.randperm(20, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)])
    check_positions(name, op_of(package, framework, name), positions.int())


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("tokens", ["dense", "segmented"])
@pytest.mark.parametrize("lengths", [(3, 0), (0, 3), (0, 0)])
def test_documents_without_tokens(framework: str, tokens: str, lengths: tuple[int, int]) -> None:
    """An empty tensor has no nearest element: a read gives 0 and has no gradient."""
    q, k = torch.randn(1, 2, lengths[0], 16, requires_grad=True), torch.randn(1, 2, lengths[1], 16, requires_grad=True)
    doc = torch.zeros(1, max(lengths) if lengths[0] <= lengths[1] else lengths[0], dtype=torch.int32)
    ids = {"q_segment_ids": torch.zeros(1, lengths[0]).int(), "kv_segment_ids": torch.zeros(1, lengths[1]).int()}
    op = load_op("document") if framework == "torch" else in_jax(importlib.import_module("generated.jax").document)
    o, lse = op(q, k, k, doc=doc, **(ids if tokens == "segmented" else {}), return_lse=True)
    assert o.shape == q.shape
    assert lse.shape == q.shape[:3]
    assert not o.any()
    o.sum().backward()
    assert q.grad is not None
    assert not q.grad.any()


# ------------------------------------------------------------------------------------------------- what goes by row

READS = {
    "w[b, q_idx]": None,
    "w[b, kv_idx]": (False, True, False),
    "w[b, q_idx - 1]": (True, False, False),
    "w[b, kv_idx + shift[b]]": (True, True, False),
    "w[b, q_idx // 2]": (False, False, True),
    "w[b, q_idx - kv_idx]": (False, False, True),
    "w[b, 3]": None,
    "w[b, place[q_idx // 2]]": None,
    "place[w[b, q_idx]]": None,
    "place[w[b, kv_idx + q_idx]]": (False, False, True),
}


@pytest.mark.parametrize("read", READS)
def test_by_row_asks_of_positions_what_a_read_needs(read: str, tmp_path: Any) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(f"""
variants:
  reading:
    mask: "{read} + w[b, q_idx] + place[h] + shift[b] >= 0"
    tensors:
      w: {{dims: [b, q_idx], dtype: int32}}
      place: {{dims: [n], dtype: int32}}
      shift: {{dims: [b], dtype: int32}}
""")
    found = by_row(load(path).variants["reading"])
    assert (None if found is None else (found.in_order, found.in_step, found.as_rows)) == READS[read]
    assert found is None or found.reads in read


def breaks_rule_as_defined(tokens: dict[str, list[int]], padding_id: int, asked: ByRow) -> bool:
    """The definition of the rule for one batch row, written out."""
    sides = [(tokens[f"{axis}_segment_ids"], tokens[f"{axis}_positions"]) for axis in ("q", "kv")]
    real = [[(row, i, p) for row, (i, p) in enumerate(zip(*side, strict=True)) if i != padding_id] for side in sides]
    if all(p == row for side in real for row, _, p in side):
        return False
    fine = not asked.as_rows
    for ids, positions in sides if asked.in_order else []:
        rows = [r for r in range(1, len(ids)) if ids[r] == ids[r - 1] != padding_id]
        fine &= all(positions[r] - positions[r - 1] == 1 for r in rows)
    for row, i, p in real[0] if asked.in_step else []:
        ids, positions = sides[1]
        fine &= row < len(ids) and positions[row] == p and ids[row] in (i, padding_id)
    return not fine


def token_rows(tokens: dict[str, Tensor], axis: str, convert: Callable[[Tensor], Any]) -> TokenRows:
    ids, positions = tokens[f"{axis}_segment_ids"], tokens[f"{axis}_positions"]
    return TokenRows(convert(ids), convert(positions), convert(torch.arange(ids.shape[1])))


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: "".join(str(int(flag)) for flag in asked[:3]))
def test_breaks_rule_is_as_defined_in_both_frameworks(asked: ByRow) -> None:
    for seed in range(6):
        tokens = drawn(seed)
        rows = [{name: x[b].tolist() for name, x in tokens.items()} for b in range(64)]
        want = [breaks_rule_as_defined(row, -1, asked) for row in rows]
        for convert in (lambda x: x, lambda x: jnp.asarray(x.numpy())):
            queries, keys = (token_rows(tokens, axis, convert) for axis in ("q", "kv"))
            assert breaks_rule(queries, keys, -1, asked).tolist() == want


RESTARTING = torch.tensor([[*range(10), *range(10)]], dtype=torch.int32)
IDS = torch.tensor([[0] * 10 + [1] * 10], dtype=torch.int32)
SHUFFLED = torch.randperm(20, generator=torch.Generator().manual_seed(0)).int()[None]
REFUSED: dict[str, tuple[str, dict[str, Tensor]]] = {
    "decay": ("forgetting", {"q_positions": RESTARTING}),
    "shuffled_decay": ("forgetting", {"q_positions": SHUFFLED}),
    "dropout": ("causal_dropout", {"q_positions": SHUFFLED, "q_segment_ids": IDS}),
    "documents_of_other_keys": ("document", {"q_positions": RESTARTING, "kv_positions": SHUFFLED}),
}
RULES = {
    "forgetting": "positions that rise by 1 from row to row of a segment and that the query and the key of each row "
    "share",
    "causal_dropout": "positions that rise by 1 from row to row of a segment",
    "document": "positions that the query and the key of each row share",
}


def arguments(variant: str) -> dict[str, Any]:
    entry = load_manifest()[variant]
    own: dict[str, Any] = {"dropout_p": 0.5, "seed": 3} if entry["dropout"] else {}
    own |= {"g": -torch.rand(1, 20, 2)} if entry["decay"] else {}
    return own | ({"doc": torch.zeros(1, 20, dtype=torch.int32)} if variant == "document" else {})


@pytest.mark.parametrize("case", REFUSED)
def test_positions_that_disagree_with_rows_are_refused(case: str) -> None:
    variant, tokens = REFUSED[case]
    q = torch.randn(1, 2, 20, 16)
    text = rf"^{variant}: q_positions: expected {RULES[variant]} \(read by row: .*\), got others in batch row 0"
    with pytest.raises(ArgumentError, match=text):
        load_op(variant)(q, q, q, **arguments(variant), **tokens)
    op = in_jax(getattr(importlib.import_module("generated.jax"), variant))
    with pytest.raises(ArgumentError, match=text):
        op(q, q, q, **arguments(variant), **tokens, return_lse=True)


@pytest.mark.parametrize("case", ["dropout", "documents_of_other_keys"])
def test_traced_positions_that_disagree_with_rows_give_nan(case: str) -> None:
    """A traced call cannot read the positions to raise an error. A batch row in order keeps its results."""
    variant, tokens = REFUSED[case]
    own = {n: x.expand(2, *x.shape[1:]) if isinstance(x, Tensor) else x for n, x in arguments(variant).items()}
    rows = torch.arange(20, dtype=torch.int32)[None]
    both = {n: torch.cat([x, IDS if n == "q_segment_ids" else rows]) for n, x in tokens.items()}
    q = torch.randn(2, 2, 20, 16)
    op: Any = load_op(variant)
    torch.compiler.reset()
    compiled = torch.compile(lambda q, **x: op(q, q, q, **x, return_lse=True), fullgraph=True, backend="eager")
    o, lse = compiled(q, **own, **both)
    traced = jax.jit(
        lambda q, x: getattr(importlib.import_module("generated.jax"), variant)(
            q, q, q, **x, **{n: y for n, y in own.items() if not isinstance(y, Tensor)}, layout="bhsd", return_lse=True
        )
    )
    arrays = {n: jnp.asarray(x.numpy()) for n, x in {**own, **both}.items() if isinstance(x, Tensor)}
    found = [torch.tensor(np.array(x)) for x in traced(jnp.asarray(q.numpy()), arrays)]
    for x in (o, lse, *found):
        assert x[0].isnan().all()
        assert not x[1].isnan().any()


def test_rows_that_are_positions_are_never_refused() -> None:
    q, rows = torch.randn(1, 2, 20, 16), torch.arange(20, dtype=torch.int32)[None]
    for variant in RULES:
        own = arguments(variant)
        want = load_op(variant)(q, q, q, **own)
        assert torch.equal(load_op(variant)(q, q, q, **own, q_positions=rows), want)
        assert load_op(variant)(q, q, q, **own, q_positions=RESTARTING, q_segment_ids=IDS).isfinite().all()
