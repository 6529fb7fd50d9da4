"""Names of shapes, text domains and published drafters, for parsers that must not import torch."""

from __future__ import annotations

SHAPES = (
    "qwen3-8b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "qwen3.5-27b",
    "qwen3-next-80b-a3b",
    "deepseek-v2-lite",
    "glm-4.7-flash",
    "step-3.5-flash",
    "llama-3.1-8b",
    "llama-3.3-70b",
    "qwen3-0.6b",
    "tiny",
    "tiny-hybrid",
    "tiny-latent",
    "tiny-step",
)
DOMAINS = ("chat", "code", "math")
DRAFTERS = ("eagle3", "dflash", "dspark", "mtp")
