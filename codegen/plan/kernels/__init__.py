"""Kernels: what every kernel is made of, and the portable family."""
