# SPDX-License-Identifier: Apache-2.0
"""Code that all JAX ops share."""
