# SPDX-License-Identifier: Apache-2.0
"""Hooks into other libraries. Only the modules whose names begin with the name of a library import that library."""
