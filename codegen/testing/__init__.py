"""Inputs, float64 goldens and error measures for tests, the tuner and the benchmark."""
