# SPDX-License-Identifier: Apache-2.0
"""Hooks into other libraries, a module for each. A library is imported by the modules that its name begins, alone."""
