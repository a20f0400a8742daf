"""The demo (`python -m examples.demo`) and benchmarks (`python -m bench`)."""
