"""The suites of the benchmark."""
