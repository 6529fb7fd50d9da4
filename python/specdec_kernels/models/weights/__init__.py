"""Checkpoints: formats, loading, adapters, updates, offload."""
