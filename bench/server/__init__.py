"""Benchmarks of servers."""
