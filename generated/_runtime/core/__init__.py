# SPDX-License-Identifier: Apache-2.0
"""What ops of both frameworks share; imports no framework."""
