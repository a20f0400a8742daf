"""The JAX ops behind interfaces that models are written against: that of `jax.nn`, and that of Flax's modules.

>>> import jax
>>> import jax.numpy as jnp
>>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 6, 4, 16))
>>> o = dot_product_attention(q, k, v, is_causal=True)
>>> bool(jnp.allclose(o, jax.nn.dot_product_attention(q, k, v, is_causal=True), atol=1e-5))
True

Flax itself is not imported here.
"""

import ast
import inspect
import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from . import jax as ops  # first: it says what is missing

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
import numpy as np  # isort: skip
from jax import Array  # isort: skip

from ._runtime.checks import fail
from ._runtime.jax_support import int32_array, is_array

__all__ = ["attention_fn", "dot_product_attention"]
