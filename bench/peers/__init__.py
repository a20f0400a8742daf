"""The implementations that are compared."""
