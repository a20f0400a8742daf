"""Checks and times cases."""
