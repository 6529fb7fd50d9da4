"""Implementations of a language model: native layers, or modules of transformers."""
