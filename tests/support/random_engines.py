"""Engines of random checkpoints, one with weights that are no numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specdec_kernels.engine import Engine

MAX_LEN = 128


def make_engine(folder: Path, **options: Any) -> Engine:
    return Engine(folder, **({"max_len": MAX_LEN, "num_slots": 3, "device": "cpu"} | options))


def poisoned_folder(folder: Path, to: Path, token: int) -> Path:
    """Write the same model with NaN as the embedding of one token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = torch.nan
    model.save_pretrained(to)
    return to
