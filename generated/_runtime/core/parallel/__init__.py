# SPDX-License-Identifier: Apache-2.0
"""Calls over several GPUs: who has which rows and keys, what that costs, and what each rank computes."""
