"""Compiling kernels without a GPU, in many processes."""
