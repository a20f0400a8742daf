"""Puts the checkout on the import path, so that a bare `pytest` finds `generated`, `bench` and `tests`."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Before anything imports torch or numpy: each of several workers has a core of its own, on which more threads than one
# wait for each other, at twice the time.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before anything imports JAX: tests of sharding need devices, and torch needs memory beside it.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Before anything imports JAX: its own tests run like this, and so may those of whoever calls the ops.
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
