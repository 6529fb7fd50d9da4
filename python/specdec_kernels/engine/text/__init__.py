"""Prompts, stop strings and generation configs: everything between text and tokens."""
