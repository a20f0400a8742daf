"""Demonstrations and the small models that they train."""
