# SPDX-License-Identifier: Apache-2.0
"""What the PyTorch ops share."""
