"""Synthetic block drafters for synthetic targets, with a chosen acceptance, written in a published format.

    text = SyntheticText.of(config.vocab_size, block_text_length(config))
    target = synthetic_causal_lm(config, text, device=device, dtype=torch.bfloat16)
    save_block_drafter(*synthetic_block(target, text, PublishedAcceptance("code", "dspark"), "dspark"), folder)
    engine = Engine(target, draft=DSpark(folder))

The drafter has the target's embedding and LM head, so every engine drafts the same tokens with the same probabilities.
Row j of a block must predict what follows j tokens after the root, which it computes by doubling: in layer b a row
attends to the row 2^b before it alone, and what it adds is a linear map of that row's value. The root's row holds the
root's embedding and the others the mask token's, whose value is zero. After layer b the first 2^(b + 1) rows hold the
embeddings of the tokens of their positions. One more layer, in which a row attends to itself, makes of each embedding
the state that gives the acceptance's logits. Injected states of the target become the mask token's embedding, so that
they are read and add nothing.

The maps are solved for all tokens of the text, so it has at most half as many as a value has elements. All other
weights are noise.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..models.families import head_dim_of, kv_heads_of
from .acceptance import Acceptance
from .models import NOISE, SyntheticText
from .mtp import draft_states, map_from
from .shapes import draft_vocab_of, full_attention_of

STRAY = 1e-5  # most attention to all other rows together
ARCHITECTURES = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}


def block_text_length(config: Any) -> int:
    """Return the tokens of a text for a target with a synthetic block drafter."""
    hidden: int = config.hidden_size
    return min(draft_vocab_of(config), kv_heads_of(config) * head_dim_of(config) // 2, hidden // 2)


@torch.no_grad()
def synthetic_block(
    target: Any,
    text: SyntheticText,
    acceptance: Acceptance,
    kind: Literal["dflash", "dspark"],
    *,
    block_size: int | None = None,
    num_layers: int = 5,
    rank: int = 256,
    seed: int = 0,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the tensors of a block drafter of the target's shape.

    Args:
        target: of `synthetic_causal_lm`.
        text: the target's.
        acceptance: the acceptance rates to reach.
        kind: "dflash", or "dspark" with a Markov head, whose scores are noise.
        block_size: rows of a block; None: 7 for DSpark, 8 for DFlash, which is seven drafts.
        num_layers: at least one more than it takes to double one row to all.
        rank: of the Markov head.
        seed: of the weights.

    Raises:
        ValueError: the text is too long; too few layers; no token is left for the mask.
    """
    config, name = full_attention_of(target.config), "synthetic_block"
    rows = block_size or (7 if kind == "dspark" else 8)
    doublings = math.ceil(math.log2(rows))
    if len(text.order) > (most := block_text_length(config)):
        raise ValueError(f"{name}: text has {len(text.order)} tokens, expected at most {most}")
    if num_layers <= doublings:
        raise ValueError(f"{name}: num_layers is {num_layers}, expected at least {doublings + 1} for {rows} rows")
    if not len(text.other_order):
        raise ValueError(f"{name}: text has all tokens of the vocabulary, expected one that it leaves for the mask")
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    mask_token = int(text.other_order[-1])
    entries = block_config(config, kind, rows, num_layers, mask_token, rank)
    # A billion random numbers take a GPU milliseconds and a CPU ten seconds. The maps are the same on every device.
    device, generator = embedding.device, torch.Generator().manual_seed(seed)
    of_noise = torch.Generator(device).manual_seed(seed)
    tensors = {
        key: torch.ones(shape, device=device) if len(shape) == 1 else noise(shape, of_noise)
        for key, shape in shapes_of(entries, kind).items()
    }
    words, mask = embedding[text.order.to(embedding.device)].double().cpu(), embedding[mask_token].double().cpu()
    num_features = tensors["fc.weight"].shape[1] // len(mask)
    # Features are the token's embedding, once for each layer: their product with this row is 1.
    row = map_from(words, words.new_ones(len(words), 1))[0] / num_features
    tensors["fc.weight"] += torch.outer(mask, row.repeat(num_features)).to(tensors["fc.weight"])
    states = draft_states(head, text, acceptance).cpu()
    if kind == "dflash":  # a row predicts its own position
        states = states.roll(1, 0)
    heads, kv_heads = config.num_attention_heads, kv_heads_of(config)
    dim = head_dim_of(config)
    projection = torch.randn(kv_heads * dim, len(mask), generator=generator, dtype=torch.float64) / len(mask) ** 0.5
    projection -= torch.outer(projection @ mask, mask) / (mask @ mask)
    values = words @ projection.mT
    frequencies, sharpness = attention_to_one(config, rows)
    for index in range(num_layers):
        layer, distance = f"layers.{index}.self_attn.", 1 << index if index < doublings else 0
        added = None
        if index < doublings:
            added = words.roll(-distance, 0) - mask
        elif index == doublings:
            added = states - words
        tensors[layer + "v_proj.weight"] += projection.to(tensors["fc.weight"])
        if added is not None:
            elements = torch.arange(kv_heads * dim)
            group = heads // kv_heads
            columns = (elements // dim * group * dim + elements % dim)[:, None] + torch.arange(group) * dim
            each = (map_from(values, added) / group)[:, :, None].expand(-1, -1, group)
            tensors[layer + "o_proj.weight"][:, columns.to(device)] += each.to(tensors["fc.weight"])
        count, angles = len(frequencies), frequencies * distance
        query, key = torch.zeros(2, dim)
        query[:count], query[dim // 2 : dim // 2 + count] = angles.cos(), -angles.sin()
        key[:count] = 1
        tensors[layer + "q_proj.bias"], tensors[layer + "k_proj.bias"] = query.repeat(heads), key.repeat(kv_heads)
        tensors[layer + "v_proj.bias"] = torch.zeros(kv_heads * dim)  # engines know biases of all four, or of none
        tensors[layer + "o_proj.bias"] = torch.zeros(len(mask))
        for part in "qk":
            tensors[f"{layer}{part}_norm.weight"].fill_((sharpness / dim**0.5) ** 0.5)
    return entries, {key: tensor.to(embedding).contiguous() for key, tensor in tensors.items()}


def noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return a weight that adds little to an output, on the generator's device."""
    weight = torch.empty(shape, device=generator.device)
    return weight.normal_(0, NOISE / math.sqrt(shape[-1]), generator=generator)


def block_config(
    target: Any, kind: str, block_size: int, num_layers: int, mask_token: int, rank: int
) -> dict[str, Any]:
    """Return the config of a drafter as wide as the target, with feature layers that shallow targets have."""
    target = full_attention_of(target)
    heads, kv_heads = target.num_attention_heads, kv_heads_of(target)
    deepest = target.num_hidden_layers - 2
    layers = sorted({round(i * deepest / 4) for i in range(5)})
    rope = dict(target.rope_parameters)
    config = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": "qwen3",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim_of(target),
        "hidden_act": "silu",
        "attention_bias": True,
        "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": {"rope_type": "default", "rope_theta": rope["rope_theta"]},
        "tie_word_embeddings": False,
        "num_target_layers": target.num_hidden_layers,
        "block_size": block_size,
    }
    own: dict[str, Any] = {"target_layer_ids": layers, "mask_token_id": mask_token}
    if kind == "dflash":
        return config | {"dflash_config": own}
    markov = {"markov_rank": rank, "markov_head_type": "vanilla", "enable_confidence_head": False}
    return config | own | markov


def shapes_of(config: dict[str, Any], kind: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a drafter's tensors by their names."""
    hidden, wide, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    features = (config.get("dflash_config") or config)["target_layer_ids"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, len(features) * hidden)}
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for layer in (f"layers.{index}." for index in range(config["num_hidden_layers"])):
        attention, mlp = layer + "self_attn.", layer + "mlp."
        shapes |= {f"{layer}{part}_layernorm.weight": (hidden,) for part in ("input", "post_attention")}
        shapes |= {f"{attention}q_proj.weight": (query, hidden), f"{attention}o_proj.weight": (hidden, query)}
        shapes |= {f"{attention}{part}_proj.weight": (key, hidden) for part in "kv"}
        shapes |= {f"{attention}{part}_norm.weight": (dim,) for part in "qk"}
        shapes |= {f"{mlp}{part}_proj.weight": (wide, hidden) for part in ("gate", "up")}
        shapes |= {f"{mlp}down_proj.weight": (hidden, wide)}
    if kind == "dspark":
        factor = config["vocab_size"], config["markov_rank"]
        shapes |= {f"markov_head.markov_w{which}.weight": factor for which in (1, 2)}
    return shapes


def attention_to_one(config: Any, rows: int) -> tuple[Tensor, float]:
    """Return frequencies of a rotation and a score by which attention goes to one distance alone.

    A query and a key that do not depend on the row have a score that depends on the distance of their rows alone: the
    mean of cos(frequency * (distance - wanted)), times the score. A few of the highest frequencies tell one distance
    best from all others of a text.
    """
    dim = head_dim_of(config)
    whole: Tensor = config.rope_parameters["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    distances = torch.arange(-2 * rows, config.max_position_embeddings, dtype=torch.float64)
    distances = distances[distances != 0]
    cosines = torch.cos(distances[:, None] * whole).cumsum(1)
    best = math.inf, 0
    for count in range(2, len(whole) + 1):
        gaps = 1 - cosines[:, count - 1] / count
        score = 16.0
        while torch.exp(-score * gaps).sum() > STRAY and score < best[0]:
            score *= 1.1
        best = min(best, (score, count))
    return whole[: best[1]].float(), best[0]


def save_block_drafter(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> Path:
    """Write a drafter's folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}, indent=2) + "\n")
    stored = {key: tensor.detach().cpu() for key, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
