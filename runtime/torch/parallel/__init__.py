"""Calls over several GPUs in PyTorch."""
