# SPDX-License-Identifier: Apache-2.0
"""Checks that JAX is installed, and new enough, before any other import fails because of it."""

import importlib.util

if importlib.util.find_spec("jax") is None:
    raise ModuleNotFoundError("the JAX ops need JAX: pip install 'jax>=0.10.1', on a GPU 'jax[cuda13]'")

import jax

# The first version whose jaxlib has the handler that launches the kernels.
LEAST = (0, 10, 1)

if jax.__version_info__[:3] < LEAST:
    raise ImportError(f"the JAX ops need jax {'.'.join(map(str, LEAST))} or newer: {jax.__version__} is installed")
