"""Render attention variants from `variants.yaml` into specialised Triton kernels and framework ops."""

__version__ = "0.1.0"
