"""Small random checkpoints of targets with an MTP layer, in the published layouts."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from support.hybrid_cases import DELTA, EXPERTS, NEMOTRON
from support.latent_cases import EXPERTS as LATENT_EXPERTS
from support.latent_cases import YARN
from support.random_checkpoints import save_random_model

NUM_LAYERS = 2  # of the target


@dataclass(frozen=True)
class Case:
    """A layout, with the names that a checkpoint gives to the parts.

    Attributes:
        model_type: of the target.
        names: of the parts that no decoder layer has, by the names in transformers' `MtpLayer`.
        block: prefix of the decoder layer.
        own: names of copies of the target's embedding and LM head.
        changes: entries of the config.
        state_first: the projection reads the state, then the embedding.
        zeroes_first_embedding: the embedding of row 0 is zero.
        adds_one: norms multiply by 1 + weight.
    """

    model_type: str
    names: dict[str, str]
    block: str
    own: dict[str, str] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    state_first: bool = False
    zeroes_first_embedding: bool = False
    adds_one: bool = False


NEXTN, MIMO = f"model.layers.{NUM_LAYERS}.", "model.mtp_layers.0."
QWEN = {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc"}
QWEN |= {"post_norm": "mtp.norm"}
LAYER = {"enorm": f"{NEXTN}enorm", "hnorm": f"{NEXTN}hnorm", "eh_proj": f"{NEXTN}eh_proj"}
LAYER |= {"post_norm": f"{NEXTN}shared_head.norm"}
COPIES = {"model.embed_tokens": f"{NEXTN}embed_tokens", "lm_head": f"{NEXTN}shared_head.head"}
LATENT: dict[str, Any] = LATENT_EXPERTS | {
    "num_key_value_heads": 6, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
    "v_head_dim": 20, "head_dim": 16,
}  # fmt: skip
CASES = {
    "glm4_moe": Case("glm4_moe", LAYER, NEXTN, COPIES, {"partial_rotary_factor": 0.5}),
    "deepseek_v3": Case("deepseek_v3", LAYER, NEXTN, COPIES, LATENT | {"rope_parameters": YARN}),
    "glm4_moe_lite": Case("glm4_moe_lite", LAYER, NEXTN, COPIES, LATENT | {"n_group": 1, "topk_group": 1}),
    "hy_v3": Case("hy_v3", LAYER | {"post_norm": f"{NEXTN}final_layernorm"}, NEXTN),
    "mimo": Case(
        "mimo",
        {"enorm": f"{MIMO}token_layernorm", "hnorm": f"{MIMO}hidden_layernorm", "eh_proj": f"{MIMO}input_proj"}
        | {"post_norm": f"{MIMO}final_layernorm"},
        MIMO,
        state_first=True,
        zeroes_first_embedding=True,
    ),
    "ernie4_5_moe": Case(
        "ernie4_5_moe",
        {"enorm": "model.mtp_emb_norm.0", "hnorm": "model.mtp_hidden_norm.0", "eh_proj": "model.mtp_linear_proj.0"},
        "model.mtp_block.0.",
        changes={"moe_layer_end_index": 1},  # the layer after the target's is dense
        zeroes_first_embedding=True,
    ),
    "qwen3_next": Case(
        "qwen3",
        QWEN,
        "mtp.layers.0.",
    ),
    "qwen3_next hybrid": Case(
        "qwen3_next",
        QWEN,
        "mtp.layers.0.",
        changes=DELTA | EXPERTS | {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
        adds_one=True,
    ),
    "qwen3_5 hybrid": Case(
        "qwen3_5_text",
        QWEN,
        "mtp.layers.0.",
        changes=DELTA | {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
        adds_one=True,
    ),
}


def write_target_with_mtp(folder: Path, name: str, changes: dict[str, Any] | None = None, **extra: Tensor) -> Path:
    """Write a target of NUM_LAYERS layers whose MTP layer has the decoder layer that would be its next.

    `changes` are entries of the config, `extra` further tensors, or others in place of the layer's.
    """
    case = CASES[name]
    save_random_model(folder, case.model_type, num_hidden_layers=NUM_LAYERS + 1, **(case.changes | (changes or {})))
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = NUM_LAYERS
    for key in ("layer_types", "mlp_layer_types"):
        if config.get(key):
            config[key] = config[key][:NUM_LAYERS]
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "model.safetensors"
    last = f"model.layers.{NUM_LAYERS}."
    tensors = {
        key.replace(last, case.block) if key.startswith(last) else key: tensor
        for key, tensor in load_file(file).items()
    }
    hidden = config["hidden_size"]
    torch.manual_seed(5)
    for part, stored in case.names.items():
        shape = (hidden, 2 * hidden) if part == "eh_proj" else (hidden,)
        values = torch.randn(shape) / (2 * hidden) ** 0.5 if part == "eh_proj" else torch.rand(shape) + 0.5
        tensors[f"{stored}.weight"] = values
    tensors["model.norm.weight"] = torch.rand(hidden) + 0.5  # else a norm of the normed state is that of the state
    for module, stored in case.own.items():
        tensors[f"{stored}.weight"] = tensors[f"{module}.weight"].clone()
    save_file(tensors | extra, file, metadata={"format": "pt"})
    return folder


def write_target_with_chain(folder: Path, num_mtp_layers: int) -> Path:
    """Write a GLM of NUM_LAYERS layers with several MTP layers, each with an LM head of its own."""
    case = CASES["glm4_moe"]
    save_random_model(folder, case.model_type, num_hidden_layers=NUM_LAYERS + num_mtp_layers, **case.changes)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": num_mtp_layers}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    hidden = config["hidden_size"]
    torch.manual_seed(6)
    for layer in range(num_mtp_layers):
        for part, stored in case.names.items():
            shape = (hidden, 2 * hidden) if part == "eh_proj" else (hidden,)
            values = torch.randn(shape) / hidden**0.5 if part == "eh_proj" else torch.rand(shape) + 0.5
            tensors[f"{of_layer(stored, layer)}.weight"] = values
        for module, stored in case.own.items():
            noise = torch.randn_like(tensors[f"{module}.weight"]) / hidden**0.5 if module == "lm_head" else 0
            tensors[f"{of_layer(stored, layer)}.weight"] = tensors[f"{module}.weight"] + noise
    tensors["model.norm.weight"] = torch.rand(hidden) + 0.5
    save_file({key: t.contiguous() for key, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def of_layer(stored: str, layer: int) -> str:
    """Return the name of a module in another MTP layer than the first."""
    return stored.replace(NEXTN, f"model.layers.{NUM_LAYERS + layer}.")


def write_nemotron_with_mtp(folder: Path) -> tuple[list[Any], dict[str, Tensor]]:
    """Write a Nemotron-H whose MTP layer is attention and experts.

    Returns:
        These two layers as transformers' modules, and the tensors that no such layer has.
    """
    kinds = ["linear_attention", "full_attention", "full_attention", "moe"]
    save_random_model(
        folder, "nemotron_h", **(NEMOTRON | {"layers_block_type": kinds, "num_hidden_layers": len(kinds)})
    )
    longer: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    hidden, prefix = longer.config.hidden_size, "mtp.layers."
    parts = {f"{prefix}{name}.weight": torch.rand(hidden) + 0.5 for name in ("0.enorm", "0.hnorm", "1.final_layernorm")}
    parts[f"{prefix}0.eh_proj.weight"] = torch.randn(hidden, 2 * hidden) / hidden**0.5
    file, moved = folder / "model.safetensors", dict[str, Tensor]()
    for key, tensor in load_file(file).items():
        moved[re.sub(r"^\w+\.layers\.([23])\.", lambda match: f"{prefix}{int(match[1]) - 2}.", key)] = tensor
    save_file(moved | parts, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"layers_block_type": kinds[:2], "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return list(longer.model.layers[2:]), parts


class Reference:
    """The MTP layer of a checkpoint by its published formula, over a whole text at once.

    The decoder layer is transformers' own.

    Args:
        folder: of the checkpoint.
        name: of its case.
        layer: which of several MTP layers.
    """

    def __init__(self, folder: Path, name: str, layer: int = 0) -> None:
        self.case, tensors = CASES[name], load_file(folder / "model.safetensors")
        self.target: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        names = {part: of_layer(stored, layer) for part, stored in self.case.names.items()}
        own = {module: of_layer(stored, layer) for module, stored in self.case.own.items()}
        self.weights = {part: tensors[f"{stored}.weight"] for part, stored in names.items()}
        self.weights.setdefault("post_norm", tensors["model.norm.weight"])
        embedding, head = ("model.embed_tokens", "lm_head")
        if self.case.adds_one:
            self.weights |= {part: self.weights[part] + 1 for part in ("enorm", "hnorm", "post_norm")}
        self.embedding = tensors[f"{own.get(embedding, embedding)}.weight"]
        self.head = tensors[f"{own.get(head, head)}.weight"]
        config = copy.deepcopy(self.target.config)
        config.num_hidden_layers += 1
        if getattr(config, "layer_types", None):
            config.layer_types = [*config.layer_types, "full_attention"]
        if getattr(config, "mlp_layer_types", None):
            config.mlp_layer_types = [*config.mlp_layer_types, "sparse"]
        last = f"model.layers.{NUM_LAYERS}."
        stored = of_layer(self.case.block, layer)
        block = {key.replace(stored, last): t for key, t in tensors.items() if key.startswith(stored)}
        longer = type(self.target).from_pretrained(None, config=config, state_dict=tensors | block, dtype=torch.float32)
        self.block, self.rotary = longer.model.layers[NUM_LAYERS].eval(), longer.model.rotary_emb

    def norm(self, part: str, x: Tensor) -> Tensor:
        eps = self.target.config.rms_norm_eps
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * self.weights[part]

    def states(self, tokens: list[int], states: Tensor) -> Tensor:
        """Return states [T, H] after the final norm, of tokens 1.. and states [T, H] of positions 0.."""
        embedded = self.embedding[tokens].clone()
        if self.case.zeroes_first_embedding:
            embedded[0] = 0
        pair = [self.norm("enorm", embedded), self.norm("hnorm", states)]
        if self.case.state_first:
            pair.reverse()
        x = (torch.cat(pair, -1) @ self.weights["eh_proj"].T)[None]
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        # Rotations for images want the positions of three grids, which are equal in a text.
        grids = positions.expand(3, 1, -1) if hasattr(self.rotary, "mrope_section") else positions
        rotations = self.rotary(x, grids)
        out = self.block(x, position_embeddings=rotations, attention_mask=mask, position_ids=positions)
        return self.norm("post_norm", (out[0] if isinstance(out, tuple) else out)[0])

    @torch.inference_mode()
    def chain(self, text: list[int], steps: int) -> tuple[list[int], Tensor]:
        """Return the likeliest chain after a text, and its logits [steps, V]."""
        states = self.target.model(torch.tensor([text])).last_hidden_state[0, :-1]
        tokens, logits = text[1:], []
        for _ in range(steps):
            last = self.states(tokens, states)[-1]
            logits.append(self.head @ last)
            tokens, states = [*tokens, int(logits[-1].argmax())], torch.cat([states, last[None]])
        return tokens[len(text) - 1 :], torch.stack(logits)


class ChainReference:
    """Several MTP layers of a GLM by the formula of DeepSeek-V3, over a whole text at once.

    Row i of layer m pairs token i + m + 1 with row i of layer m - 1.
    """

    def __init__(self, folder: Path, num_layers: int) -> None:
        self.layers = [Reference(folder, "glm4_moe", layer) for layer in range(num_layers)]
        self.target = self.layers[0].target

    @torch.inference_mode()
    def chain(self, text: list[int], steps: int, given: list[int] | None = None) -> tuple[list[int], Tensor]:
        """Return the likeliest chain after a text, or after its `given` first nodes, and its logits [steps, V]."""
        states = self.target.model(torch.tensor([text])).last_hidden_state[0, :-1]
        tokens, logits, nodes = list(text), [], given or []
        for index, layer in enumerate(self.layers[:steps]):
            states = layer.states(tokens[index + 1 :], states)
            logits.append(layer.head @ states[-1])
            tokens.append(nodes[index] if index < len(nodes) else int(logits[-1].argmax()))
        return tokens[len(text) :], torch.stack(logits)
