# SPDX-License-Identifier: Apache-2.0
"""Device code that kernels share. A kernel's hash covers each definition that it uses from here."""
