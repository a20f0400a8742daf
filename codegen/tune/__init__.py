"""Measuring block sizes and kernel families on a GPU."""
