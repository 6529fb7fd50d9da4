"""Synthetic MTP layers for synthetic targets, with a chosen acceptance, written in a published layout.

    text = SyntheticText.of(config.vocab_size, mtp_text_length(config))
    target = synthetic_causal_lm(config, text, device=device, dtype=torch.bfloat16)
    save_with_mtp(target, synthetic_mtp(target, text, PublishedAcceptance("code", "mtp"), QWEN), folder)
    engine = Engine(folder, draft=MTP(num_steps=3, topk=1))

Targets whose config lists several MTP layers get a chain of them. Layers share the target's LM head or have copies of
it, so every engine drafts the same tokens with the same probabilities. After each token of the text a layer's final
state is the combination of rows of the LM head to which these rows give the acceptance's logits. The projection makes
that state of the token's embedding; it is solved for all tokens of the text, which may be half as many as a state has
elements. For others it is closer to the identity, which makes the successor the likeliest token. The layer itself adds
next to nothing.

`synthetic_mtp_heads` have LM heads of their own instead, for texts of any length, and stay in memory.
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
    STEP,
    MtpLayout,
)
from .acceptance import Acceptance
from .models import BRANCH, NOISE, SyntheticText, init_successors
from .shapes import FULL, SLIDING, draft_vocab_of

# More share a state's length, which the final norm fixes: their logits are lower, and closer to those of other tokens.
SHARED_CANDIDATES = 8
# Entries that transformers makes of published ones of Step-3.5.
OF_TRANSFORMERS = (
    "rope_parameters", "per_layer_config", "mlp_layer_types", "mtp_layer_types", "mtp_mlp_layer_types",
    "num_key_value_heads", "n_routed_experts", "num_local_experts", "num_experts_per_tok",
    "num_sliding_attention_heads", "query_pre_attn_scalar",
)  # fmt: skip


def mtp_text_length(config: Any) -> int:
    """Return the tokens of a text for a target with a synthetic MTP layer."""
    hidden: int = config.hidden_size
    return min(draft_vocab_of(config), hidden // 2)


@torch.no_grad()
def synthetic_mtp(
    target: Any, text: SyntheticText, acceptance: Acceptance, layout: MtpLayout, *, seed: int = 0
) -> dict[str, Tensor]:
    """Return the tensors of a target's MTP layers, named as in its checkpoint.

    Args:
        target: of `synthetic_causal_lm`.
        text: the target's.
        acceptance: the acceptance rates to reach.
        layout: of the names.
        seed: of the weights.

    Raises:
        ValueError: the text is too long.
    """
    if len(text.order) > (most := mtp_text_length(target.config)):
        raise ValueError(f"synthetic_mtp: text has {len(text.order)} tokens, expected at most {most}")
    head = target.get_output_embeddings().weight
    states = draft_states(head, text, acceptance)
    tensors: dict[str, Tensor] = {}
    for index in range(num_mtp_layers(target.config)):
        tensors |= layer_tensors(target, text, states, layout, index, seed + index)
    return tensors


def num_mtp_layers(config: Any) -> int:
    """Return the MTP layers that a target's config lists; one if it lists none."""
    return len(getattr(config, "mtp_layer_types", None) or [None])


def layer_tensors(
    target: Any, text: SyntheticText, states: Tensor, layout: MtpLayout, index: int, seed: int
) -> dict[str, Tensor]:
    """Return the tensors of MTP layer `index`, whose states after tokens of the text are `states` [N, H]."""
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    lm, fc = layer_and_projection(target, layout, index, seed)
    norm, hidden = lm.get_decoder().norm, embedding.shape[1]
    inputs = norm(embedding[text.order.to(embedding.device)])  # the norm's weight is that of the embedding's norm
    of_embedding = fc[:, hidden * layout.state_first :][:, :hidden]
    of_embedding.add_(map_from(inputs, states - inputs.double() @ of_embedding.double().mT))
    stored: dict[str, Tensor] = revert_weight_conversion(lm, lm.state_dict())
    own = {name: tensor for name, tensor in stored.items() if name.startswith(f"{LAYERS}.")}
    own |= {f"{module}.weight": norm.weight.clone() for module in (EMBEDDING_NORM, STATE_NORM)}
    own[f"{PROJECTION}.weight"] = fc
    if layout.final_norm is not None:
        own[f"{FINAL_NORM}.weight"] = norm.weight
    if layout.has_chains:  # checkpoints have copies of the target's
        copies = {EMBEDDING: embedding, LM_HEAD: head}
        own |= {f"{name}.weight": copies[name].clone() for name in layout.modules.values() if name in copies}
    prefix = layout.prefix_of(target.config.num_hidden_layers + index)
    return {prefix + layout.stored_name(name): tensor.detach().cpu().contiguous() for name, tensor in own.items()}


def draft_states(head: Tensor, text: SyntheticText, acceptance: Acceptance) -> Tensor:
    """Return the states [N, H] after tokens of the text, as long as normalized ones, that drafts have.

    Each is the shortest state to which the candidates' rows of `head` [V, H] give their logits plus a constant. The
    constant makes its length that of a normalized state; softmax does not see it.
    """
    count, hidden = len(text.order), head.shape[1]
    with torch.device("cpu"):  # same random numbers for every device
        logits = acceptance.logits(count, SHARED_CANDIDATES).to(head.device, torch.float64)
    ahead = (torch.arange(count)[:, None] + torch.arange(1, logits.shape[1] + 1)) % count
    rows = head[text.order[ahead].to(head.device)].double()  # [N, K, H]
    gram = rows @ rows.mT
    # Other tokens ahead have a logit of 0. With c the constant, the state's squared length is that of
    # logits + c * is_candidate in the metric of the inverse: a quadratic equation for c.
    is_candidate = (logits > 0).double()
    solved = torch.linalg.solve(gram, torch.stack([is_candidate, logits], -1))
    square, mixed, rest = (
        (is_candidate * solved[..., 0]).sum(-1),
        (is_candidate * solved[..., 1]).sum(-1),
        (logits * solved[..., 1]).sum(-1) - hidden,
    )
    constant = (-mixed + (mixed**2 - square * rest).clamp(min=0).sqrt()) / square
    factors = solved[..., 1] + constant[:, None] * solved[..., 0]
    states: Tensor = torch.einsum("nk,nkh->nh", factors, rows)
    return states


def map_from(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Return the smallest weight [H, H] that maps inputs [N, H] to outputs [N, H], N at most H."""
    x = inputs.double()
    weight: Tensor = torch.linalg.solve(x @ x.mT, outputs).mT @ x
    return weight


@torch.no_grad()
def synthetic_mtp_heads(
    target: Any, text: SyntheticText, acceptance: Acceptance, *, seed: int = 0
) -> MtpHead | tuple[MtpHead, ...]:
    """Return an MTP layer of the target's shape, or a chain of them, accepted as often as `acceptance` says.

    Each has an LM head of its own.
    """
    count = num_mtp_layers(target.config)
    layout = NEXTN if count == 1 else STEP
    embedding, heads = target.get_input_embeddings(), list[MtpHead]()
    for index in range(count):
        lm, fc = layer_and_projection(target, layout, index, seed + index)
        lm.set_input_embeddings(embedding)
        vocab, hidden = embedding.weight.shape
        lm.lm_head = nn.Linear(hidden, vocab, bias=False, device="meta")
        weight = torch.empty(vocab, hidden, dtype=fc.dtype, device=fc.device)
        init_successors(weight, embedding.weight, text.order, text.order, acceptance)
        lm.lm_head.weight = nn.Parameter(weight)
        head, identity = MtpHead(lm, layout, f"layers.{index}."), lm.get_decoder().norm.weight
        head.fc.weight = nn.Parameter(fc)
        for norm in (head.embedding_norm, head.state_norm):
            norm.weight = nn.Parameter(identity.clone())
        heads.append(head.requires_grad_(False).eval())
    return tuple(heads) if count > 1 else heads[0]


def layer_and_projection(target: Any, layout: MtpLayout, index: int, seed: int) -> tuple[Any, Tensor]:
    """Return a model of one random layer, of the kind of MTP layer `index`, and a projection to the embedding.

    It has experts if the target's last layer has them. It adds next to nothing to the residual stream.
    """
    embedding = target.get_input_embeddings().weight
    experts = any(hasattr(module, "experts") for module in target.get_decoder().layers[-1].modules())
    config = config_of_layers(target.config, index, has_experts=experts)
    hidden = config.hidden_size
    with torch.random.fork_rng(devices=[embedding.device] if embedding.is_cuda else []), torch.device(embedding.device):
        torch.manual_seed(seed)
        lm: Any = type(target)._from_config(config, dtype=embedding.dtype)
        fc = torch.randn(hidden, 2 * hidden) * NOISE / (2 * hidden) ** 0.5
        fc[:, hidden * layout.state_first :][:, :hidden] += torch.eye(hidden)
    [layer] = lm.get_decoder().layers
    layer.self_attn.o_proj.weight.mul_(BRANCH)
    scale_feed_forward(layer, BRANCH)
    return lm, fc.to(embedding.dtype)


def scale_feed_forward(layer: nn.Module, scale: float) -> None:
    """Scale the output of a layer's feed-forward part, in place."""
    for name, parameter in layer.named_parameters():
        if name.endswith(("down_proj.weight", "experts.down_proj")):
            parameter.mul_(scale)


def save_with_mtp(target: Any, tensors: dict[str, Tensor], folder: Path) -> None:
    """Write a target as transformers does, and its MTP layers' tensors next to it in a file of their own."""
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
    if config["model_type"] == "step3p5":
        config = published_step(config)
    else:
        config |= {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}
        config |= published_keys(config)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def published_step(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config of Step-3.5 as it is published: with a value for each layer, those of MTP layers at the end."""
    types, count = config["layer_types"] + config["mtp_layer_types"], len(config["mtp_layer_types"])
    rotations, num_kv_heads = config["rope_parameters"], config["num_key_value_heads"]
    scaling = {k: v for k, v in rotations[FULL].items() if k not in ("rope_theta", "partial_rotary_factor")}
    sparse = [str(layer) for layer, kind in enumerate(config["mlp_layer_types"]) if kind == "sparse"]
    published = {
        "layer_types": types,
        "rope_theta": [rotations[each]["rope_theta"] for each in types],
        "partial_rotary_factors": [rotations[each]["partial_rotary_factor"] for each in types],
        "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
        "moe_layers_enum": ",".join(sparse),
        "moe_num_experts": config["n_routed_experts"],
        "moe_top_k": config["num_experts_per_tok"],
        "num_attention_groups": num_kv_heads,
        "attention_other_setting": {
            "attention_type": SLIDING,
            "num_attention_heads": config["num_sliding_attention_heads"],
            "num_attention_groups": num_kv_heads,
            "head_dim": config["head_dim"],
        },
    }
    published |= {name: config[name] + count * [0.0] for name in ("swiglu_limits", "swiglu_limits_shared")}
    return {name: value for name, value in config.items() if name not in OF_TRANSFORMERS} | published


def published_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return keys that published configs have, other engines read, and transformers does not write.

    They are those of hybrids with gated delta nets, and of latent attention with experts.
    """
    rope, types = config["rope_parameters"], config.get("layer_types", [])
    if "full_attention" in types and "linear_attention" in types:
        return {
            "full_attention_interval": types.index("full_attention") + 1,
            "partial_rotary_factor": rope["partial_rotary_factor"],
            "rope_theta": rope["rope_theta"],
            "mamba_ssm_dtype": "float32",
        }
    if "kv_lora_rank" in config and "n_routed_experts" in config:
        dense = config.get("mlp_layer_types", []).count("dense")
        return {
            "first_k_dense_replace": config.get("first_k_dense_replace", dense),
            "moe_layer_freq": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "rope_theta": rope["rope_theta"],
        }
    return {}
