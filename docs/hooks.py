"""Hooks of MkDocs: the navigation, the generated pages, links to files outside docs/, and formulas."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# `mkdocs build` is started as a script too, without the checkout on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.generators import ROOT, generated_pages
from docs.generators.fragments import with_fragments
from docs.generators.hosts import foreign_loads
from docs.generators.maths import with_mathml
from docs.generators.nav import navigation
from docs.generators.sources import Sources

_sources = Sources(ROOT)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and the files outside docs/ that any page links to; then make the navigation."""
    contents = dict(generated_pages())
    for path, content in contents.items():
        files.append(File.generated(config, path, content=content))
    texts = {file.src_uri: file.content_string for file in files.documentation_pages()}
    linked = _sources.pages_for(texts)
    for path, content in linked.items():
        files.append(File.generated(config, path, content=content))
    texts |= {path: text for path, text in linked.items() if isinstance(text, str) and path.endswith(".md")}
    config.nav = navigation(texts)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Places for tables are filled; links to files outside docs/ become links to their pages in the site."""
    return _sources.with_links(with_fragments(markdown), page.file.src_uri)


def on_page_content(html: str, **_: Any) -> str:
    """Formulas become MathML."""
    return with_mathml(html)


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """A page that would ask another host for something fails the build."""
    if found := foreign_loads(Path(config.site_dir)):
        raise PluginError("\n".join(["loaded from another host:", *found]))
