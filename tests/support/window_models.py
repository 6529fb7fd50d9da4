"""Random models with sliding windows."""

from __future__ import annotations

from typing import Any

import torch

from support.tiny_random_models import NATIVE, VOCAB, tiny_model

WINDOW = 16
SIZES: dict[str, Any] = {"max_position_embeddings": 4096, "eos_token_id": None, "sliding_window": WINDOW}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("mistral", NATIVE),
    "mixed": ("gemma3_text", NATIVE | {"layer_types": [*["sliding_attention"] * 3, "full_attention"]}),
    "sinks": ("gpt_oss", NATIVE),
}


def model_of(name: str) -> Any:
    model_type, more = MODELS[name]
    return tiny_model(model_type, **SIZES | more)


def random_texts(*lengths: int) -> list[list[int]]:
    return [torch.randint(5, VOCAB, (length,)).tolist() for length in lengths]
