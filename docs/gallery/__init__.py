"""The gallery: a card and a page for each variant of `variants.yaml` and `library.yaml`, made when the site is built.

`pages` gives them as Markdown for MkDocs. `python -m docs.gallery OUT` writes them as HTML that needs nothing else.
Both are the same pieces of HTML, made from the spec files, the expression tree and the generator.
"""

from docs.gallery.markdown import pages

__all__ = ["pages"]
