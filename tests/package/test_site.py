"""The generated pages of the site, without MkDocs, which `make docs` installs; the README's pictures are up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.cli.registry import COMMANDS
from codegen.load.spec_file import load
from codegen.testing.calls import load_op
from docs.charts import charts, main
from docs.generators import generated_pages
from docs.generators.errors import BAD, parse_message
from docs.generators.fragments import FRAGMENTS, with_fragments
from docs.generators.hosts import foreign_loads
from docs.generators.nav import front_matter, navigation
from docs.generators.runs import stored_runs, suites
from docs.generators.signatures import public_names
from docs.generators.sources import Sources
from tests.support.paths import DEFAULT_SPEC, ROOT


def test_charts_are_those_of_the_stored_runs() -> None:
    stale = [path.name for path, text in charts().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run `python -m docs.charts`"


def test_charts_refuse_unknown_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--gpu", "h200"])
    assert "python -m docs.charts: error: unrecognized arguments: --gpu h200" in capsys.readouterr().err


def test_every_command_and_op_has_its_place() -> None:
    pages = generated_pages()
    commands = str(pages["reference/commands.md"])
    assert not [name for name in COMMANDS if f"\n## codegen {name}\n" not in commands]
    variants = load(DEFAULT_SPEC).variants
    assert not [name for name in variants for kind in ("torch", "jax") if f"reference/{kind}/{name}.md" not in pages]


def test_every_stored_run_is_in_a_suite_with_a_page() -> None:
    pages = generated_pages()
    assert stored_runs()
    assert not [run.link for run in stored_runs() if not run.suites()]
    assert not [suite for suite in suites() if f"benchmarks/{suite}.md" not in pages]


def test_every_message_of_a_bad_spec_has_a_cause() -> None:
    messages = [line for path in BAD.glob("*.txt") for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(messages) > 100
    assert all(parse_message(message).rule for message in messages)


def test_page_that_names_an_unknown_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no such table; there are .*chips"):
        with_fragments("<!-- generated: nosuch -->")
    assert all(f"<!-- generated: {name} -->" in _pages() for name in FRAGMENTS)


def test_order_that_names_a_missing_page_is_refused() -> None:
    with pytest.raises(ValueError, match=r"docs/how-to/index\.md: `order` names gone"):
        navigation({"how-to/index.md": "---\norder: [gone]\n---\n"})


def test_front_matter_of_every_page_is_read() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")}
    found = {path.parent.name for path, text in texts.items() if "order" in front_matter(text)}
    assert found == {"tutorial", "how-to", "reference", "explanation"}
    with pytest.raises(ValueError, match="a line of three hyphens, not with '--- order: \\[a\\] ---'"):
        front_matter("--- order: [a] ---\n# A page\n")


def test_pages_of_ops_show_the_names_of_calls_and_every_function_of_an_op() -> None:
    assert public_names(["scheduled(_schedule, plan=_plan)", "keywords(keep='own_keep')"]) == {"own_keep": "keep"}
    pages = generated_pages()
    text = str(pages["reference/torch/band_mask.md"])
    assert "`band_mask.schedule(q, k, v, ...)`" in text
    assert "and reads `keep`, `before`, `after`, `layout`," in text
    for name in ("causal", "causal_dropout"):
        page = str(pages[f"reference/torch/{name}.md"])
        names = [each for each in ("schedule", "plan", "backward") if hasattr(load_op(name), each)]
        assert [each for each in ("schedule", "plan", "backward") if f"\n## {name}.{each}\n" in page] == names


def test_link_out_of_docs_leads_to_a_page_of_the_file() -> None:
    sources = Sources(ROOT)
    text = {"how-to/a.md": "[spec](../../variants.yaml) [bench](../../bench/README.md#suites)"}
    assert {"source/variants.yaml.md", "benchmarks/method.md"} <= set(sources.pages_for(text))
    expected = "[spec](../source/variants.yaml.md) [bench](../benchmarks/method.md#suites)"
    assert sources.with_links(text["how-to/a.md"], "how-to/a.md") == expected


def test_page_that_loads_from_another_host_is_reported(tmp_path: Path) -> None:
    page = '<a href="https://a.org"></a><link rel="icon" href="icon.png"><script src="https://b.org/x.js"></script>'
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    assert foreign_loads(tmp_path) == ['page.html: <script src="https://b.org/x.js']


def _pages() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
