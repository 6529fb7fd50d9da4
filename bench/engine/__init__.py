"""Benchmarks of the engine: rounds, forward passes, replayed n-gram text."""
