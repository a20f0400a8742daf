"""Whether a built site asks another host for anything: it must work offline."""

from __future__ import annotations

import re
from pathlib import Path

# What a browser loads by itself: scripts, styles, images. A link is followed only by a reader.
_LOADED = re.compile(
    r"<(?:script|img|source|iframe|embed|video)\b[^>]*?\bsrc(?:set)?=[\"']?(?:https?:)?//[^\s\"'>]+"
    r"|<link\b(?![^>]*\brel=[\"']?(?:canonical|license))[^>]*?\bhref=[\"']?(?:https?:)?//[^\s\"'>]+"
    r"|@import\s+(?:url\()?[\"']?https?://[^\"')]+|url\([\"']?https?://[^\"')]+"
)


def foreign_loads(site: Path) -> list[str]:
    """Each page and style of a site with what it loads from another host."""
    files = (path for ending in ("html", "css") for path in sorted(site.rglob(f"*.{ending}")))
    return [
        f"{path.relative_to(site)}: {match[0]}"
        for path in files
        for match in _LOADED.finditer(path.read_text(encoding="utf-8"))
    ]
