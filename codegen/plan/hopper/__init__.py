"""Hopper's kernels: what each warp does, in order."""
