"""Kernels of calls on paged caches."""
