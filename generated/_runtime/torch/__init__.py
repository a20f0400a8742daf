# SPDX-License-Identifier: Apache-2.0
"""What the PyTorch ops share. Importing it makes `torch.ops` find the operators of the package by their names."""

from ... import VARIANTS
from .operators import register_when_read

register_when_read(__name__.rsplit(".", 2)[0], VARIANTS)
