"""Small random block drafters in their published formats, and what they draft by formulas of plain torch.

The formulas follow the descriptions of DFlash and DSpark: states of the target are projected once and become keys and
values of every layer; a block of a root and mask tokens attends to them and to itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from specdec_kernels.engine import DFlash, DFlash2, Draft, DraftBudget, DSpark, Engine, JetSpec
from specdec_kernels.engine.drafts.proposal import scored_tree_of
from specdec_kernels.reference import draft as reference
from support.random_checkpoints import VOCAB, save_random_model

HIDDEN, WIDE, HEADS, KV_HEADS, HEAD_DIM, RANK = 96, 160, 4, 2, 64, 32
MASK = 198
EPS, THETA = 1e-6, 1e4
NUM_TARGET_LAYERS = 4


@dataclass(frozen=True)
class Case:
    """A drafter to write: its kind, the config's entries beyond those of all, and the number of layers."""

    kind: str
    entries: dict[str, Any]
    num_layers: int = 2


def nested(**entries: Any) -> dict[str, Any]:
    return {"dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": MASK} | entries}


DSPARK = {"block_size": 5, "target_layer_ids": [0, 1, 2], "mask_token_id": MASK, "markov_rank": RANK}
DSPARK |= {"architectures": ["Qwen3DSparkModel"], "markov_head_type": "vanilla", "num_anchors": 512}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7, "use_sliding_window": True}
CASES = {
    "dflash": Case("dflash", {"block_size": 6, **nested()}),
    "dflash window": Case("dflash", {"block_size": 6, **WINDOW, **nested(attention_sink_bias=True)}),
    "jetspec": Case("dflash", {"block_size": 6, **nested(causal_head=True)}),
    "dflash2": Case(
        "dflash2",
        {
            "block_size": 6,
            "architectures": ["DFlash2DraftModel"],
            **nested(conv_kernel_size=3, conv_group_size=32, selector_rank=RANK, selector_top_k=8),
        }
        | {},
    ),
    "dspark": Case("dspark", DSPARK | {"enable_confidence_head": True, "confidence_head_with_markov": True}),
    "dspark gated": Case("dspark", DSPARK | {"markov_head_type": "gated"}, num_layers=1),
    "dspark neighbors": Case(
        "dspark",
        DSPARK
        | {"architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False, "enable_confidence_head": True},
    ),
    "dspark rnn": Case("dspark", DSPARK | {"markov_head_type": "rnn"}, num_layers=1),
    "dspark reduced": Case("dspark", DSPARK | {"draft_vocab_size": 120, "sample_from_anchor": False}),
}


def write_target(folder: Path, **changes: Any) -> Path:
    """Write a random target of few layers, whose text does not loop."""
    return save_random_model(folder, "qwen3", num_hidden_layers=NUM_TARGET_LAYERS, **changes)


def write_drafter(folder: Path, name: str, **changes: Any) -> Path:
    """Write a drafter; `changes` are entries of its config."""
    case = CASES[name]
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": case.num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 512,
        "num_target_layers": NUM_TARGET_LAYERS,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "use_cache": True,
    }
    config |= case.entries | changes
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    save_file(random_tensors(case, config), folder / "model.safetensors")
    return folder


def random_tensors(case: Case, config: dict[str, Any]) -> dict[str, Tensor]:
    """Return tensors that draft with a preference, so that trees have an order."""
    torch.manual_seed(11)
    options = config | config.get("dflash_config", {})
    whole = config["vocab_size"]
    vocab = config.get("draft_vocab_size", whole)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, len(options["target_layer_ids"]) * HIDDEN)}
    for layer in (f"layers.{i}." for i in range(case.num_layers)):
        shapes |= {
            layer + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            layer + "mlp.gate_proj.weight": (WIDE, HIDDEN),
            layer + "mlp.up_proj.weight": (WIDE, HIDDEN),
            layer + "mlp.down_proj.weight": (HIDDEN, WIDE),
        }
    if case.kind == "dspark":
        shapes |= {"markov_head.markov_w1.weight": (whole, RANK), "markov_head.markov_w2.weight": (vocab, RANK)}
    match options.get("markov_head_type"):
        case "gated":
            shapes |= {"markov_head.gate_proj.weight": (RANK, HIDDEN + RANK), "markov_head.gate_proj.bias": (RANK,)}
        case "rnn":
            inputs = 2 * RANK + HIDDEN
            shapes |= {"markov_head.joint_proj.weight": (3 * RANK, inputs), "markov_head.joint_proj.bias": (3 * RANK,)}
    if options.get("enable_confidence_head"):
        inputs = HIDDEN + RANK * options.get("confidence_head_with_markov", False)
        shapes |= {"confidence_head.proj.weight": (1, inputs), "confidence_head.proj.bias": (1,)}
    if case.kind == "dflash2":
        shapes["candidate_selector.predecessor_codebook"] = shapes["candidate_selector.successor_codebook"] = (
            whole,
            RANK,
        )
        shapes["candidate_selector.hidden_projection.weight"] = RANK, HIDDEN
        taps, groups = options["conv_kernel_size"], HIDDEN // options["conv_group_size"]
        for part in (f"layers.{i}.{part}_conv." for i in range(case.num_layers) for part in ("attention", "mlp")):
            shapes |= {part + "base_kernel": (2, taps, HIDDEN)}
            shapes |= {part + "kernel_projection.weight": (2 * taps * groups, HIDDEN)}
    if vocab != whole:
        shapes["lm_head.weight"] = vocab, HIDDEN
    tensors = {name: torch.randn(shape) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
        if name in tensors:
            tensors[name] *= 4
    norms = ["hidden_norm", "norm"]
    for layer in (f"layers.{i}." for i in range(case.num_layers)):
        norms += [layer + "input_layernorm", layer + "post_attention_layernorm"]
        tensors |= {f"{layer}self_attn.{part}_norm.weight": torch.rand(HEAD_DIM) + 0.5 for part in "qk"}
        if options.get("attention_sink_bias"):
            tensors[layer + "self_attn.attention_sink_bias"] = torch.randn(HEADS)
    tensors |= {f"{name}.weight": torch.rand(HIDDEN) + 0.5 for name in norms}
    if vocab != whole:
        ids = torch.randperm(whole)[:vocab].sort().values
        tensors["d2t"] = ids - torch.arange(vocab)
        tensors["t2d"] = torch.zeros(whole, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def in_8_bits(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows rounded to 8 bits times a factor by which the largest of a row is the largest that there is."""
    factor = 448.0 / rows.abs().amax(-1, keepdim=True)
    return (rows * factor).to(torch.float8_e4m3fn).float(), factor


def linear_in_8_bits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product of rows and weights that are rounded to 8 bits."""
    rows, weights = (part / scale for part, scale in map(in_8_bits, (x, weight)))
    return functional.linear(rows, weights, bias)


class Drafter:
    """A drafter by its formulas, over a target as transformers runs it; `weights` as `draft_weights`."""

    def __init__(self, target: Any, folder: Path, *, weights: str | None = None) -> None:
        self.in_8_bits, is_folder = weights is not None, isinstance(target, Path)
        self.copies_head = weights == "fp8-head"
        self.target: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32) if is_folder else target
        self.target.eval()
        self.tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        config = json.loads((folder / "config.json").read_text())
        self.config = config | config.get("dflash_config", {})
        self.is_dspark = "markov_head.markov_w1.weight" in self.tensors
        self.from_root = self.config.get("sample_from_anchor", self.is_dspark)

    @property
    def depth(self) -> int:
        depth: int = self.config["block_size"] - (not self.from_root)
        return depth

    def linear(self, name: str, x: Tensor) -> Tensor:
        weight = self.tensors[f"{name}.weight"]
        if self.in_8_bits and name.startswith(("fc", "layers.", "lm_head")):
            return linear_in_8_bits(x, weight, self.tensors.get(f"{name}.bias"))
        return functional.linear(x, weight, self.tensors.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.tensors[f"{name}.weight"]

    def heads(self, name: str, norm: str | None, x: Tensor, positions: Tensor) -> Tensor:
        """Return rows [T, heads, dim], normalized and rotated where there is a norm."""
        x = self.linear(name, x).view(len(x), -1, HEAD_DIM)
        if norm is None:
            return x
        x = self.norm(norm, x)
        angles = positions[:, None, None] * THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        is_neox = self.config.get("rope_is_neox_style", True)
        first, second = x.chunk(2, -1) if is_neox else (x[..., 0::2], x[..., 1::2])
        cos, sin = angles.cos(), angles.sin()
        rotated = first * cos - second * sin, second * cos + first * sin
        return torch.cat(rotated, -1) if is_neox else torch.stack(rotated, -1).flatten(-2)

    def visible(self, layer: int, length: int) -> Tensor:
        """Return which of the context's and block's rows [Q, length + Q] each row of the block sees."""
        rows = self.config["block_size"]
        types = self.config.get("layer_types", ["full_attention"] * 8)
        is_window = types[layer] == "sliding_attention"
        key, query = torch.arange(length + rows), length + torch.arange(rows)[:, None]
        sees = torch.ones(rows, length + rows, dtype=torch.bool)
        if is_window or self.config.get("causal_head"):
            sees = key <= query
        return sees & (query - key < self.config["sliding_window"]) if is_window else sees

    def convolve(self, part: str, x: Tensor, of: Tensor, side: int) -> Tensor:
        """Return rows of a block after the convolution, whose coefficients come of rows `of`."""
        base = self.tensors.get(f"{part}.base_kernel")
        if base is None:
            return x
        _, taps, _ = base.shape
        delta = self.linear(f"{part}.kernel_projection", of).view(len(x), 2, taps, -1)[:, side]
        kernel = base[side] + delta.repeat_interleave(self.config["conv_group_size"], -1)
        out = torch.zeros_like(x)
        for row in range(len(x)):
            for tap in range(min(taps, row + 1)):
                out[row] += kernel[row, tap] * x[row - tap]
        return out

    @torch.inference_mode()
    def states(self, text: Sequence[int]) -> Tensor:
        """Return the states [D, H] that predict the tokens after a text."""
        context, length = text[:-1], len(text) - 1
        outputs = self.target(torch.tensor([list(text)]), output_hidden_states=True).hidden_states
        features = torch.cat([outputs[i + 1][0, :length] for i in self.config["target_layer_ids"]], -1)
        injected = self.norm("hidden_norm", self.linear("fc", features))
        before, positions = torch.arange(len(context)), length + torch.arange(self.config["block_size"])
        tokens = torch.tensor([text[-1]] + [MASK] * (self.config["block_size"] - 1))
        x = self.target.get_input_embeddings()(tokens)
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}."
            attention = name + "self_attn."
            entered = self.norm(name + "input_layernorm", x)
            normed = self.convolve(name + "attention_conv", entered, entered, 0)
            q = self.heads(attention + "q_proj", attention + "q_norm", normed, positions)
            k, v = (
                torch.cat(
                    [
                        self.heads(attention + part, norm, injected, before),
                        self.heads(attention + part, norm, normed, positions),
                    ]
                )
                for part, norm in (("k_proj", attention + "k_norm"), ("v_proj", None))
            )
            k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
            scores = scores.masked_fill(~self.visible(layer, length), -torch.inf)
            if (sinks := self.tensors.get(attention + "attention_sink_bias")) is not None:
                scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(tokens), 1)], -1)
            weights = scores.softmax(-1)[..., : len(k)]
            mixed = self.linear(attention + "o_proj", torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
            x = x + self.convolve(name + "attention_conv", mixed, entered, 1)
            entered = self.norm(name + "post_attention_layernorm", x)
            normed = self.convolve(name + "mlp_conv", entered, entered, 0)
            gate, up = (self.linear(f"{name}mlp.{part}_proj", normed) for part in ("gate", "up"))
            output = self.linear(name + "mlp.down_proj", functional.silu(gate) * up)
            x = x + self.convolve(name + "mlp_conv", output, entered, 1)
        return self.norm("norm", x)[0 if self.from_root else 1 :]

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        if "lm_head.weight" in self.tensors:
            return self.linear("lm_head", states)
        head = self.target.lm_head
        return linear_in_8_bits(states, head.weight, None) if self.copies_head else head(states)

    @property
    def id_map(self) -> Tensor | None:
        d2t = self.tensors.get("d2t")
        return None if d2t is None else (torch.arange(len(d2t)) + d2t).int()

    @torch.inference_mode()
    def chain(self, text: Sequence[int]) -> list[int]:
        """Return the tokens chosen one after another, each among all by the head's scores after the one before."""
        states, before, tokens = self.states(text), text[-1], list[int]()
        state = torch.zeros(RANK)
        for hidden, logits in zip(states, self.logits(states), strict=True):
            if self.is_dspark:
                bias, state = self.bias(before, hidden, state)
                logits = logits + bias
            best = int(logits.argmax())
            before = best if self.id_map is None else int(self.id_map[best])
            tokens.append(before)
        return tokens

    def bias(self, before: int, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return a serial head's scores of all tokens after one, and the state that it carries on."""
        embedded = self.tensors["markov_head.markov_w1.weight"][before]
        match self.config["markov_head_type"]:
            case "gated":
                gate = self.linear("markov_head.gate_proj", torch.cat([hidden, embedded])).sigmoid()
                return self.linear("markov_head.markov_w2", gate * embedded), state
            case "rnn":
                joint = self.linear("markov_head.joint_proj", torch.cat([state, embedded, hidden]))
                gate, candidate, output = joint.chunk(3)
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
                return self.linear("markov_head.markov_w2", output.tanh()), state
        return self.linear("markov_head.markov_w2", embedded), state

    @torch.inference_mode()
    def confidences(self, text: Sequence[int]) -> list[float]:
        """Return log P of the tokens of a chain, each given those before it."""
        before, inputs = [text[-1], *self.chain(text)[:-1]], self.states(text)
        if self.tensors["confidence_head.proj.weight"].shape[1] > HIDDEN:
            inputs = torch.cat([inputs, self.tensors["markov_head.markov_w1.weight"][before]], -1)
        rows = self.linear("confidence_head.proj", inputs)
        sums: list[float] = functional.logsigmoid(rows[:, 0]).cumsum(0).tolist()
        return sums

    @torch.inference_mode()
    def tree(self, text: Sequence[int], num_candidates: int, top_k: int) -> dict[tuple[int, ...], float]:
        """Return the best paths after a text with their scores, by the reference of `expand_trellis`."""
        states = self.states(text)
        ids, logprobs = reference.select_topk(self.logits(states), top_k)
        ids, options = ids[None], dict[str, Any]()
        root = torch.tensor([text[-1]], dtype=torch.int32)
        if self.is_dspark:
            tokens = ids if self.id_map is None else self.id_map[ids]
            before = torch.cat([root.expand(1, 1, top_k), tokens[:, :-1]], 1)[0]
            rows = torch.stack(
                [
                    torch.stack([self.factor(int(token), hidden) for token in row])
                    for row, hidden in zip(before, states, strict=True)
                ]
            )
            options = {"predecessors": rows[None], "successors": self.tensors["markov_head.markov_w2.weight"]}
        elif "candidate_selector.predecessor_codebook" in self.tensors:
            options = {
                f"{part}s": self.tensors[f"candidate_selector.{part}_codebook"] for part in ("predecessor", "successor")
            }
            options |= {"root_tokens": root, "gates": self.linear("candidate_selector.hidden_projection", states)[None]}
        nodes = reference.expand_trellis(ids, logprobs[None].float(), num_candidates, id_map=self.id_map, **options)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(nodes.tokens[0].tolist(), nodes.parents[0].tolist(), strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        return dict(zip(paths, nodes.scores[0].tolist(), strict=True))

    def factor(self, token: int, hidden: Tensor) -> Tensor:
        embedded = self.tensors["markov_head.markov_w1.weight"][token]
        if self.config["markov_head_type"] == "vanilla":
            return embedded
        return self.linear("markov_head.gate_proj", torch.cat([hidden, embedded])).sigmoid() * embedded


# --- engines

CLASSES: dict[str, Any] = {"dflash": DFlash, "dflash2": DFlash2, "dspark": DSpark}


def draft_of(name: str, folder: Path, **options: Any) -> Draft:
    draft: Draft = (JetSpec if name == "jetspec" else CLASSES[CASES[name].kind])(folder, **options)
    return draft


Tree = dict[tuple[int, ...], float]


def record(engine: Engine, patch: pytest.MonkeyPatch) -> list[tuple[int, Tree]]:
    """Return a list that each round extends with each request's text length, and the tree with its scores."""
    drafted: list[tuple[int, Tree]] = []
    propose = engine.draft.propose

    def keep(slots: Tensor, budget: DraftBudget) -> Any:
        proposal = propose(slots, budget)
        tree, scores = scored_tree_of(proposal.drafts, slots, budget.num_nodes, engine.state)
        for b in range(len(slots)):
            paths: list[tuple[int, ...]] = [()]
            count = int(tree.num_nodes[b])
            for token, parent in zip(tree.tokens[b, 1:count].tolist(), tree.parents[b, 1:count].tolist(), strict=True):
                paths.append((*paths[parent], token))
            if count > 1:
                drafted.append(
                    (int(tree.positions[b, 0]), dict(zip(paths[1:], scores[b, 1:count].tolist(), strict=True)))
                )
        return proposal

    patch.setattr(engine.draft, "propose", keep)
    return drafted


def is_same(tree: Tree, want: Tree) -> bool:
    """Return whether two trees have the same paths with the same scores, but for nodes near the cut."""
    least = min(want.values()) + 1e-3
    return all(abs(tree.get(path, least) - score) < 2e-3 for path, score in want.items()) and len(tree) == len(want)
