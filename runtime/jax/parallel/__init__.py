"""Calls over several GPUs in JAX."""
