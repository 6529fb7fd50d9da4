"""Comparisons of whole engines on the same checkpoints."""
