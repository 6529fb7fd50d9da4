"""Benchmark cases of the ops, their clocks and baselines."""
