"""Measuring block sizes on a GPU: the one part of the generator that imports torch."""
