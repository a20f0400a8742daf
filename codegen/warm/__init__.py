"""Compiling ahead of time what a model will launch, into Triton's cache on disk."""
