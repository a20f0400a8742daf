"""Files outside docs/ that pages link to, as pages of the site, so that links of the repository work there too."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Mapping
from pathlib import Path

TITLES = {
    "CHANGELOG.md": "Changelog",
    "bench/README.md": "How it is measured",
    "templates/README.md": "Templates",
    "templates/hopper/README.md": "Hopper kernels",
}
"""Titles of documents in the navigation, if they differ from the documents' headings."""

PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "bench/README.md": "benchmarks/method.md",
    "templates/README.md": "reference/templates.md",
    "templates/hopper/README.md": "project/hopper.md",
}
"""Documents of the repository that have their own path in the site."""

COPIED = (".json", ".png", ".svg", ".csv", ".ipynb")
"""Files that are copied unchanged; all others become a page with their text."""

LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".jinja": "jinja", ".sh": "bash"}

# Code comes first, so that text in code that looks like a link is not taken for a link.
_LINK = re.compile(
    r"(?P<code>^(?P<fence>`{3,}|~{3,}).*?^(?P=fence)[ \t]*$|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`))"
    r"|(?P<before>\]\(|^\[[^\]]+\]:[ ]+)(?P<target>[^)\s]+)",
    re.MULTILINE | re.DOTALL,
)


_PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\s*'
    r'<img alt="(?P<alt>[^"]*)" src="(?P<light>[^"]+)">\s*</picture>'
)


def links(text: str) -> list[str]:
    """The targets of the links and images of a Markdown text, without those in code.

    >>> links("[a](x.md) `[b](y.md)` ![c](z.png)")
    ['x.md', 'z.png']
    """
    return [match["target"] for match in _LINK.finditer(text) if match["code"] is None]


def map_links(text: str, new: Callable[[str], str]) -> str:
    """A Markdown text in which each target of a link or image is replaced by `new(target)`."""

    def replaced(match: re.Match[str]) -> str:
        return match[0] if match["code"] is not None else match["before"] + new(match["target"])

    return _LINK.sub(replaced, text)


def with_schemes(text: str) -> str:
    """A text whose `<picture>`s, with an image per colour scheme, are replaced by images for the site's schemes."""
    return _PICTURE.sub(r"![\g<alt>](\g<light>#only-light)\n![\g<alt>](\g<dark>#only-dark)", text)


def is_local(target: str) -> bool:
    """Whether a target is a path, not an address of a host or a place in the same page."""
    return not re.match(r"[a-z][a-z0-9+.-]*:|#|/", target)


class Sources:
    """The files outside docs/ of a checkout, by their paths in the site."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._origins: dict[str, str] = {page: path for path, page in PAGES.items() if path != "README.md"}

    def pages_for(self, texts: Mapping[str, str]) -> dict[str, str | bytes]:
        """Path in the site -> content: the documents of `PAGES`, and all files that pages or these documents link to.

        `texts`: the pages under docs/, path in the site -> Markdown.
        """
        found: dict[str, str | bytes] = {}
        waiting = [*(self._targets(text, page) for page, text in texts.items()), set(PAGES) - {"README.md"}]
        while waiting:
            for path in sorted(waiting.pop()):
                page = self.place(path)
                if page in found or page in texts:
                    continue
                found[page] = content = self._content(path)
                self._origins[page] = path
                if isinstance(content, str) and path.endswith(".md"):
                    waiting.append(self._targets(content, page))
        return found

    def with_links(self, text: str, page: str) -> str:
        """The Markdown of a page, with its links to other files of the checkout replaced by links within the site."""
        is_foreign = page in self._origins
        folder = posixpath.dirname(page)

        def new(target: str) -> str:
            _, hash_mark, anchor = target.partition("#")
            resolved = self._resolved(target, page)
            if resolved is None or (not is_foreign and resolved.startswith("docs/")):
                return target
            place = self.place(resolved)
            is_page_or_image = place.endswith(".md") or anchor.startswith("only-")
            return posixpath.relpath(place, folder or ".") + (hash_mark + anchor if is_page_or_image else "")

        return map_links(text, new)

    def place(self, path: str) -> str:
        """The path in the site of a file or folder of the checkout.

        >>> sources = Sources(Path("."))
        >>> sources.place("docs/how-to/pack.md"), sources.place("codegen/ir/parse.py"), sources.place("bench/README.md")
        ('how-to/pack.md', 'source/codegen/ir/parse.py.md', 'benchmarks/method.md')
        """
        if path.startswith("docs/"):
            return path.removeprefix("docs/")
        if path in PAGES:
            return PAGES[path]
        if (self._root / path).is_dir():
            readme = f"{path}/README.md"
            return self.place(readme) if (self._root / readme).is_file() else f"source/{path}/index.md"
        return f"source/{path}" if path.endswith((".md", *COPIED)) else f"source/{path}.md"

    def _targets(self, text: str, page: str) -> set[str]:
        """The files outside docs/ that a page links to, from the root of the checkout."""
        resolved = (self._resolved(target, page) for target in links(text))
        return {path for path in resolved if path is not None and not path.startswith("docs/")}

    def _resolved(self, target: str, page: str) -> str | None:
        """The path of a link's target from the root of the checkout; None if the target is not in the checkout."""
        path = target.partition("#")[0]
        if not is_local(target) or not path:
            return None
        origin = self._origins.get(page, f"docs/{page}")
        resolved = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        return resolved if not resolved.startswith("..") and (self._root / resolved).exists() else None

    def _content(self, path: str) -> str | bytes:
        file = self._root / path
        if file.is_dir():
            readme = file / "README.md"
            if readme.is_file():
                return with_schemes(readme.read_text(encoding="utf-8"))
            names = sorted(name for name in os.listdir(file) if not name.startswith(("_", ".")))
            return _page(path, "".join(f"- `{name}`\n" for name in names))
        if path.endswith(COPIED):
            return file.read_bytes()
        text = file.read_text(encoding="utf-8")
        if path.endswith(".md"):
            text = with_schemes(text)
            return f"---\ntitle: {TITLES[path]}\n---\n{text}" if path in TITLES else text
        return _page(path, f"``````{LANGUAGES.get(file.suffix, 'text')}\n{text.rstrip()}\n``````\n")


def _page(path: str, body: str) -> str:
    """A page that shows a file; the search leaves it out."""
    return f"---\nsearch: {{exclude: true}}\nhide: [toc]\n---\n# {path}\n\n{body}"
