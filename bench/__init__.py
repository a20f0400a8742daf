"""The demo (`python -m bench.demo`) and benchmarks (`python -m bench`)."""
