"""Source code in launches: the names that it reads, and how they are renamed. Parameters of launches."""

from __future__ import annotations

from codegen.plan.code.host import HostCode, host, joined, listed, names_of, printed
from codegen.plan.ops.parameters import Parameter, names, signature, tensor


def test_source_knows_what_it_reads() -> None:
    code = host("{}({}, {}.shape[0])", "place_sums", host("{} + {}", "a", "b"), "bias")
    assert code.text == "place_sums(a + b, bias.shape[0])"
    assert code.names == {"place_sums", "a", "b", "bias"}


def test_renaming_changes_names_and_no_text() -> None:
    # The attribute `lse` has the name of a variable, but is not renamed.
    code = host("{}.lse, {}, {}", "lse", "delta", "lse_rows")
    assert code.renamed({"lse": "row_lse", "delta": "row_delta"}).text == "row_lse.lse, row_delta, lse_rows"


def test_printed_source_is_asked_but_not_renamed() -> None:
    code = joined(" + ", [printed("jnp.clip(i, 0, n)", {"jnp", "i", "n"}), "i"])
    assert code.names == {"jnp", "i", "n"}
    assert code.renamed({"i": "j"}).text == "jnp.clip(i, 0, n) + j"


def test_functions_that_a_form_names() -> None:
    assert HostCode("computed(1)").calling("computed").names == {"computed"}
    assert names_of([listed(["q", "k"]), HostCode("1")]) == {"q", "k"}


def test_signatures() -> None:
    parameters = [tensor("q"), tensor("dlse", optional=True), Parameter("scale", "float"), Parameter("tile", "Tile")]
    assert signature(parameters) == "q: Tensor, dlse: Tensor | None, scale: float, tile: Tile"
    assert names(parameters) == ["q", "dlse", "scale", "tile"]
    assert [p.is_tensor for p in parameters] == [True, True, False, False]
