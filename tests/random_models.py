"""Small random checkpoints of every supported architecture."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

VOCAB = 199


def save_random_model(folder: Path, model_type: str, **changes: object) -> Path:
    """A random model of two layers; wide initial weights, so that its text is no loop and its margins are no ties."""
    options = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    if model_type == "qwen2":  # its head dimension is hidden / heads, whatever the config says
        options |= {"hidden_size": 384}
    if model_type == "mistral":
        options |= {"sliding_window": None}
    set_seed(7)
    config = AutoConfig.for_model(model_type, **(options | changes))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def random_prompts(count: int) -> list[list[int]]:
    return [torch.randint(VOCAB, (length,)).tolist() for length in torch.randint(1, 60, (count,)).tolist()]
