"""Ops of PyTorch and JAX: their arguments, launches and gradients."""
