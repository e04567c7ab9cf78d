"""The parts of `bench.py`, the benchmark at the root of the repository."""
