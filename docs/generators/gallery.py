"""The pages of the gallery."""

from docs.gallery import pages

__all__ = ["pages"]
