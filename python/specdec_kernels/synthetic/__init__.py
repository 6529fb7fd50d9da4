"""Synthetic models with a known text and a known acceptance, for benchmarks and tests."""
