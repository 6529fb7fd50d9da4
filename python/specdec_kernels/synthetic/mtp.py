"""Synthetic MTP layers for synthetic targets, with a chosen acceptance, written in a published layout.

    target = synthetic_causal_lm(config, text, device=device, dtype=torch.bfloat16)
    save_with_mtp(target, synthetic_mtp(target, text, 0.8, NEXTN), folder)
    engine = Engine(folder, draft=MTP(num_steps=3, topk=1))

The projection keeps the token's embedding, from which the target's LM head predicts the successor. The layer's
feed-forward part adds noise that depends on the token. Its scale is searched for until the successor is the likeliest
token as often as asked for: the layer needs no LM head of its own, so every engine reads the same drafts.

`synthetic_mtp_head` has the acceptance of an `Acceptance` instead, by an LM head of its own, and stays in memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from ..models.heads.mtp import MtpHead, config_of_layers
from ..models.weights.mtp_layouts import (
    EMBEDDING,
    EMBEDDING_NORM,
    FINAL_NORM,
    LAYERS,
    LM_HEAD,
    NEXTN,
    PROJECTION,
    STATE_NORM,
    MtpLayout,
)
from .acceptance import Acceptance
from .models import BRANCH, NOISE, SyntheticText, init_successors

SEARCHED_TOKENS = 2048  # of the text, by which the scale of the noise is chosen
SEARCH_STEPS = 16


@torch.no_grad()
def synthetic_mtp(
    target: Any, text: SyntheticText, rate: float, layout: MtpLayout, *, seed: int = 0
) -> dict[str, Tensor]:
    """Return the tensors of an MTP layer, named as in the target's checkpoint.

    Args:
        target: of `synthetic_causal_lm`.
        text: the target's.
        rate: of accepted drafts among those whose predecessors are accepted, above 0 and at most 1.
        layout: of the names.
        seed: of the weights.
    """
    if not 0 < rate <= 1:
        raise ValueError(f"synthetic_mtp: rate is {rate}, expected a number above 0 and at most 1")
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    lm, fc = layer_and_projection(target, layout, seed)
    norm, layer = lm.get_decoder().norm, lm.get_decoder().layers[0]
    scale_feed_forward(layer, noise_scale(layer, norm, embedding, head, text, rate))
    stored: dict[str, Tensor] = revert_weight_conversion(lm, lm.state_dict())
    own = {name: tensor for name, tensor in stored.items() if name.startswith(f"{LAYERS}.")}
    own |= {f"{module}.weight": norm.weight.clone() for module in (EMBEDDING_NORM, STATE_NORM)}
    own[f"{PROJECTION}.weight"] = fc
    if layout.final_norm is not None:
        own[f"{FINAL_NORM}.weight"] = norm.weight
    if layout is NEXTN:  # its checkpoints have copies of the target's
        own |= {f"{EMBEDDING}.weight": embedding, f"{LM_HEAD}.weight": head}
    prefix = layout.prefix_of(target.config.num_hidden_layers)
    return {prefix + layout.stored_name(name): tensor.detach().cpu().contiguous() for name, tensor in own.items()}


@torch.no_grad()
def synthetic_mtp_head(target: Any, text: SyntheticText, acceptance: Acceptance, *, seed: int = 0) -> MtpHead:
    """Return an MTP layer of the target's shape with an LM head of its own, accepted as often as `acceptance` says."""
    lm, fc = layer_and_projection(target, NEXTN, seed)
    embedding = target.get_input_embeddings()
    scale_feed_forward(lm.get_decoder().layers[0], BRANCH)
    lm.set_input_embeddings(embedding)
    vocab, hidden = embedding.weight.shape
    lm.lm_head = nn.Linear(hidden, vocab, bias=False, device="meta")
    weight = torch.empty(vocab, hidden, dtype=fc.dtype, device=fc.device)
    init_successors(weight, embedding.weight, text.order, text.order, acceptance)
    lm.lm_head.weight = nn.Parameter(weight)
    head, identity = MtpHead(lm, NEXTN, ""), lm.get_decoder().norm.weight
    head.fc.weight = nn.Parameter(fc)
    for norm in (head.embedding_norm, head.state_norm):
        norm.weight = nn.Parameter(identity.clone())
    return head.requires_grad_(False).eval()


def layer_and_projection(target: Any, layout: MtpLayout, seed: int) -> tuple[Any, Tensor]:
    """Return a model of one random layer like the target's last, and the weight of a projection to the embedding.

    Attention adds next to nothing to the residual stream.
    """
    embedding = target.get_input_embeddings().weight
    experts = any(hasattr(module, "experts") for module in target.get_decoder().layers[-1].modules())
    config = config_of_layers(target.config, has_experts=experts)
    hidden = config.hidden_size
    with torch.random.fork_rng(devices=[embedding.device] if embedding.is_cuda else []), torch.device(embedding.device):
        torch.manual_seed(seed)
        lm: Any = type(target)._from_config(config, dtype=embedding.dtype)
        fc = torch.randn(hidden, 2 * hidden) * NOISE / (2 * hidden) ** 0.5
        fc[:, hidden * layout.state_first :][:, :hidden] += torch.eye(hidden)
    lm.get_decoder().layers[0].self_attn.o_proj.weight.mul_(BRANCH)
    return lm, fc.to(embedding.dtype)


def scale_feed_forward(layer: nn.Module, scale: float) -> None:
    """Scale the output of a layer's feed-forward part, in place."""
    for name, parameter in layer.named_parameters():
        if name.endswith(("down_proj.weight", "experts.down_proj")):
            parameter.mul_(scale)


def noise_scale(
    layer: nn.Module, norm: nn.Module, embedding: Tensor, head: Tensor, text: SyntheticText, rate: float
) -> float:
    """Return the scale of a layer's feed-forward output at which a share `rate` of successors is likeliest."""
    count = min(len(text.order), SEARCHED_TOKENS)
    tokens = text.order[:count].to(embedding.device)
    successors = text.order.roll(-1)[:count].to(embedding.device)
    states = embedding[tokens]
    part: Any = layer
    noise = part.mlp(part.post_attention_layernorm(states)[None])
    noise = (noise[0] if isinstance(noise, tuple) else noise).view_as(states)

    def share(scale: float) -> float:
        logits = nn.functional.linear(norm(states + scale * noise), head)
        return float((logits.argmax(-1) == successors).float().mean())

    low, high = 0.0, 1.0
    while share(high) > rate and high < 1e12:
        low, high = high, 4 * high
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) >= rate else (low, middle)
    return low


def save_with_mtp(target: Any, tensors: dict[str, Tensor], folder: Path) -> None:
    """Write a target as transformers does, and an MTP layer's tensors next to it in a file of their own."""
    target.save_pretrained(folder)
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
    else:
        renamed = whole.rename(folder / "model-00001-of-00002.safetensors")
        with safe_open(renamed, "pt") as opened:
            weight_map = dict.fromkeys(opened.keys(), renamed.name)
    save_file(tensors, folder / "mtp.safetensors", metadata={"format": "pt"})
    weight_map |= dict.fromkeys(tensors, "mtp.safetensors")
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}, indent=2) + "\n")
