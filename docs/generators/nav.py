"""The navigation, made from the folders of docs/: sections in a fixed order, pages in the order of their index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

SECTIONS = {
    "tutorial": "Tutorial",
    "how-to": "How-to",
    "gallery": "Gallery",
    "reference": "Reference",
    "explanation": "Explanation",
    "benchmarks": "Benchmarks",
    "comparison.md": "Comparison",
    "project": "Project",
}
"""Folders and pages of docs/ in the order of the tabs, each with its title."""

INDEX = "index.md"

Nav = list[str | dict[str, Any]]


def front_matter(text: str) -> dict[str, Any]:
    """The YAML between the two lines `---` at the top of a page.

    >>> front_matter("---\\norder: [b, a]\\n---\\n# Title\\n")
    {'order': ['b', 'a']}
    """
    if not text.startswith("---\n"):
        if text.startswith("---"):
            raise ValueError(f"front matter begins with a line of three hyphens, not with {text.splitlines()[0]!r}")
        return {}
    return yaml.safe_load(text[4:].split("\n---", 1)[0]) or {}


def navigation(pages: Mapping[str, str]) -> Nav:
    """The nav of MkDocs for pages, path -> text.

    >>> navigation({"index.md": "", "how-to/a.md": "", "how-to/b.md": "", "how-to/index.md": "---\\norder: [b]\\n---"})
    [{'Home': 'index.md'}, {'How-to': ['how-to/index.md', 'how-to/b.md', 'how-to/a.md']}]
    """
    entries: Nav = [{"Home": INDEX}] if INDEX in pages else []
    for name, title in SECTIONS.items():
        if name in pages:
            entries.append({title: name})
        elif section := folder(name, pages):
            entries.append({title: section})
    return entries


def folder(name: str, pages: Mapping[str, str]) -> Nav:
    """The entries of a folder: its index, then the pages that the index's `order` names, then the rest by name.

    Folders in it become sections. The title of a section is the `title` of the folder's index, or the folder's name.
    """
    inside = [path.removeprefix(f"{name}/") for path in pages if path.startswith(f"{name}/")]
    index = front_matter(pages.get(f"{name}/{INDEX}", ""))
    children = {path.split("/")[0] for path in inside} - {INDEX}
    entries: Nav = [f"{name}/{INDEX}"] if INDEX in inside else []
    for child in ordered(children, index.get("order", []), f"docs/{name}/{INDEX}"):
        path = f"{name}/{child}"
        if child.endswith(".md"):
            entries.append(path)
        else:
            title = front_matter(pages.get(f"{path}/{INDEX}", "")).get("title", child.replace("-", " ").capitalize())
            entries.append({title: folder(path, pages)})
    return entries


def ordered(children: Iterable[str], order: Iterable[str], where: str) -> list[str]:
    """Names of pages and folders: first those that `order` names, without `.md`, then the others by name.

    Raises `ValueError` for a name in `order` that is not there.
    """
    by_stem = {child.removesuffix(".md"): child for child in sorted(children)}
    order = list(order)
    if unknown := [name for name in order if name not in by_stem]:
        raise ValueError(f"{where}: `order` names {', '.join(unknown)}, of which there is no page or folder")
    return [by_stem[stem] for stem in (*order, *(stem for stem in by_stem if stem not in order))]
