"""The demo (`python -m bench.demo`), benchmarks (`python -m bench`) and config sweep (`python -m bench.sweep`)."""
