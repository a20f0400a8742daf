"""Decisions about a variant's kernels and ops, made before any template is filled."""
