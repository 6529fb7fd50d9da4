"""Synthetic models as checkpoints in published formats, which every engine reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specdec_kernels.models.heads.eagle3 import Eagle3Head


def write_target(model: Any, folder: Path) -> None:
    """Write a causal language model as transformers saves it."""
    model.save_pretrained(folder)


def write_eagle3(head: Eagle3Head, folder: Path) -> None:
    """Write an EAGLE-3 head as SGLang, vLLM and we read it, without the embeddings, which it shares with the target.

    The draft vocabulary is stored as `d2t`, target id minus draft id of each draft token, and `t2d`, whether a target
    token has a draft id. The config names the feature layers twice: in `eagle_config` by their outputs, at the top by
    their inputs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    assert head.id_map is not None
    ids = head.id_map.cpu().long()
    tensors = {
        name.replace("layers.0.", "midlayer."): t.contiguous().cpu()
        for name, t in head.state_dict().items()
        if not name.startswith("embed_tokens")
    }
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    config = head.config.to_dict()
    layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(ids),
        "target_hidden_size": config["hidden_size"],
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True},
        "tie_word_embeddings": False,
        "dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
        "rope_theta": config["rope_parameters"]["rope_theta"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
