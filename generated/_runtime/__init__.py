# SPDX-License-Identifier: Apache-2.0
"""What all ops of this package share. Plain Python, copied as it is."""
