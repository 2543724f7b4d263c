"""Benchmarks: each `bench_*.py` is run as a module and prints one table."""
