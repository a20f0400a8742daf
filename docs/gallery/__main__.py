"""`python -m docs.gallery OUT`: the gallery as HTML files in a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from docs.gallery.cards import cards
from docs.gallery.standalone import html_files


def main() -> None:
    """Write all files, over those of the same names."""
    parser = argparse.ArgumentParser(prog="python -m docs.gallery", description="Write the gallery as HTML.")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write into")
    out: Path = parser.parse_args().out
    if out.exists() and not out.is_dir():
        parser.error(f"OUT: expected a folder, got the file {out}")
    found = html_files(cards(), out)
    for path, content in found.items():
        target = out / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)
    print(f"{out}: {len(found)} files; open {out / 'index.html'}")


main()
