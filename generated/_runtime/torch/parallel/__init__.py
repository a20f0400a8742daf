# SPDX-License-Identifier: Apache-2.0
"""Calls over several GPUs in PyTorch."""
