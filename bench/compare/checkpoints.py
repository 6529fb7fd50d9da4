"""Planted models as folders in the published formats, which every engine reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specdec_kernels.models.heads.eagle3 import Eagle3Head


def write_target(model: Any, folder: Path) -> None:
    """A causal language model as transformers saves it."""
    model.save_pretrained(folder)


def write_eagle3(head: Eagle3Head, folder: Path) -> None:
    """An EAGLE-3 head as SGLang, vLLM and we read it, without the embeddings, which are the target's.

    The draft vocabulary is `d2t`, what to add to a draft id for the target's, and `t2d`, whether a token of the target
    has a draft id. The layers of features stand in the config twice: by what leaves them in `eagle_config`, by what
    enters them at the top.
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
