"""A whole engine on the ops alone: EAGLE-3 speculative decoding of a Llama, with continuous batching.

    python examples/minimal_engine.py "import os" "def quicksort(items):"

Everything that an engine of your own has to do around the ops is here, and nothing else: no transformers, no scheduler,
none of the package's engine. docs/round.md explains the layout of the rows.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

import specdec_kernels as sd
from specdec_kernels.tiny import tiny_model

STEPS, TOPK, NODES = 5, 8, 32  # depth of drafting, branches of each step, nodes verified
RESERVE = max(NODES, STEPS + 1, TOPK * (STEPS - 1)) + 1  # rows a round may write beyond the committed ones
PAGE, MAX_LEN, SLOTS = 16, 512, 4


class Weights:
    """A checkpoint, its configuration, and KV pages for each of its layers."""

    def __init__(self, folder: Path, device: str, num_pages: int) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors", device=device)
        self.tensors = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
        heads, width = self.config["num_key_value_heads"], self.config["head_dim"]
        shape = (self.config["num_hidden_layers"], num_pages, PAGE, heads, width)
        self.k_pools, self.v_pools = torch.zeros(shape, device=device), torch.zeros(shape, device=device)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], self.config["rms_norm_eps"])

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"])

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gated = F.silu(self.linear(f"{name}.gate_proj", x)) * self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", gated)

    def attention(self, name: str, layer: int, x: Tensor, positions: Tensor, write: dict, see: dict) -> Tensor:
        """Write the rows of `x` [B, Q, H] to the layer's pages, then attend over them."""
        q, k, v = (
            self.linear(f"{name}.{which}_proj", x).unflatten(-1, (-1, self.config["head_dim"])) for which in "qkv"
        )
        pools = self.k_pools[layer], self.v_pools[layer]
        sd.write_kv(self.rotate(k, positions), v, *pools, **write)
        out = sd.tree_attention(self.rotate(q, positions), *pools, **see)
        return self.linear(f"{name}.o_proj", out.flatten(2))

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.config["head_dim"] // 2
        inverse = self.config["rope_theta"] ** (-torch.arange(half, device=x.device) / half)
        angles = (positions[..., None] * inverse)[:, :, None]
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class MinimalEngine:
    """An engine with a slot for each running request. State between rounds is tensors with a row per slot."""

    def __init__(self, target: Path, head: Path, device: str = "cpu") -> None:
        self.device = device
        max_pages = -(-(MAX_LEN + RESERVE) // PAGE)
        self.target = Weights(target, device, SLOTS * max_pages)
        self.head = Weights(head, device, SLOTS * max_pages)
        self.feature_layers = self.head.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        self.id_map = self.head.tensors["d2t"].int() + torch.arange(
            len(self.head.tensors["d2t"]), dtype=torch.int32, device=device
        )
        hidden = self.target.config["hidden_size"]
        like = torch.empty(0, device=device)
        self.state = sd.make_slot_state(SLOTS, MAX_LEN, 1, like)
        self.state.stop_tokens.fill_(self.target.config["eos_token_id"])
        self.pool = sd.make_page_pool(SLOTS * max_pages, SLOTS, max_pages, PAGE, like)
        # State of the draft: each root's best children, and the head's output, which is the feature of them all.
        self.child_ids = self.ints(SLOTS, TOPK)
        self.child_logprobs = torch.zeros(SLOTS, TOPK, device=device)
        self.last_hidden = torch.zeros(SLOTS, hidden, device=device)

    def ints(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    # --- the two models: rows [B, Q] of some slots, from KV row `prefix_lens` + `offset` on

    def rows(
        self, slots: Tensor, prefix_lens: Tensor, *, tail: int, valid: Tensor | None = None, **options
    ) -> tuple[dict, dict]:
        common = {"page_table": self.pool.page_table, "prefix_lens": prefix_lens, "slots": slots}
        common["status"] = self.state.status
        write = common | {"row_offset": options.get("offset", 0), "num_valid": valid}
        see = common | {"tail_len": tail, "mask": options.get("mask"), "q_lens": valid}
        return write, see

    def run_target(self, tokens: Tensor, positions: Tensor, write: dict, see: dict) -> tuple[Tensor, Tensor]:
        """Return the final hidden states [B, Q, H] and the features [B, Q, 3 H], the inputs of three layers."""
        w, features = self.target, []
        x = w.tensors["model.embed_tokens.weight"][tokens]
        for layer in range(w.config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            features += [x] * self.feature_layers.count(layer - 1)
            normed = w.norm(f"{name}.input_layernorm", x)
            x = x + w.attention(f"{name}.self_attn", layer, normed, positions, write, see)
            x = x + w.mlp(f"{name}.mlp", w.norm(f"{name}.post_attention_layernorm", x))
        return w.norm("model.norm", x), torch.cat(features, dim=-1)

    def run_head(self, tokens: Tensor, features: Tensor, positions: Tensor, write: dict, see: dict) -> Tensor:
        """Return the head's output [B, Q, H] for pairs of a token and the feature of the previous position."""
        w = self.head
        embedding = self.target.tensors["model.embed_tokens.weight"][tokens]
        pair = torch.cat([w.norm("midlayer.input_layernorm", embedding), w.norm("midlayer.hidden_norm", features)], -1)
        x = features + w.attention("midlayer.self_attn", 0, pair, positions, write, see)
        return x + w.mlp("midlayer.mlp", w.norm("midlayer.post_attention_layernorm", x))

    def draft_topk(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return sd.select_topk(self.head.linear("lm_head", self.head.norm("norm", hidden)), TOPK, id_map=self.id_map)

    def keep_draft_state(self, slots: Tensor, hidden: Tensor) -> None:
        self.child_ids[slots], self.child_logprobs[slots] = self.draft_topk(hidden)
        self.last_hidden[slots] = hidden

    # --- a request's life

    def admit(self, slot: int, prompt: list[int], max_new_tokens: int) -> None:
        """Prefill the prompt but for its last token, which is the root of the first round's tree."""
        slots, text = self.ints(1) + slot, torch.tensor([prompt], dtype=torch.int32, device=self.device)
        length = len(prompt) - 1
        state = self.state
        state.finish_reasons[slot], state.seq_lens[slot], state.remaining[slot] = 0, 0, max_new_tokens
        sd.alloc_pages(self.pool, state.seq_lens, length + RESERVE, slots=slots, status=state.status)
        self.child_logprobs[slot] = -torch.inf
        if length > 0:
            positions, rows = (
                torch.arange(length, device=self.device)[None],
                self.rows(slots, state.seq_lens, tail=length),
            )
            _, features = self.run_target(text[:, :-1], positions, *rows)
            hidden = self.run_head(text[:, 1:], self.head.linear("fc", features), positions, *rows)
            self.keep_draft_state(slots, hidden[:, -1])
        state.seq_lens[slot], state.root_tokens[slot] = length, prompt[-1]

    def draft(self, slots: Tensor) -> sd.Tree:
        state = self.state
        candidates, frontier = sd.expand_root(self.child_ids, self.child_logprobs, state.seq_lens, STEPS, slots=slots)
        tokens, positions = frontier.tokens, frontier.positions
        feature = self.last_hidden[slots][:, None].expand(-1, TOPK, -1)
        for step in range(2, STEPS + 1):
            offset, tail = (step - 2) * TOPK, (step - 1) * TOPK
            rows = self.rows(slots, state.seq_lens, offset=offset, tail=tail, mask=frontier.mask)
            hidden = self.run_head(tokens, feature, positions, *rows).flatten(0, 1)
            ids, logprobs = (t.view(-1, TOPK, TOPK) for t in self.draft_topk(hidden))
            tokens, parent_rows, positions = sd.expand_tree(
                ids, logprobs, step, candidates, frontier, state.seq_lens, slots=slots
            )
            feature = hidden[parent_rows]
        return sd.build_tree(candidates, state.root_tokens, state.seq_lens, NODES, slots=slots)

    def round(self, slots: Tensor) -> list[list[int]]:
        """Run one round of these slots and return the new tokens of each."""
        state = self.state
        sd.alloc_pages(self.pool, state.seq_lens, RESERVE, slots=slots, status=state.status)
        tree = self.draft(slots)
        rows = self.rows(slots, state.seq_lens, tail=NODES, valid=tree.num_nodes, mask=tree.mask)
        hidden, features = self.run_target(tree.tokens, tree.positions, *rows)
        logits = F.linear(hidden, self.target.tensors["model.embed_tokens.weight"])  # tied
        accepted = sd.verify_tree(logits, tree, STEPS + 1, slots=slots, status=state.status)
        num_valid = sd.commit_tokens(accepted, state, slots=slots)
        pools = self.target.k_pools, self.target.v_pools
        where = self.pool.page_table, accepted.path, num_valid, state.prefix_lens
        sd.move_kv(*pools, *where, slots=slots, status=state.status)

        # Draft-extend: the head runs over the accepted tokens; its last valid row starts the next round.
        path = accepted.path.long()[:, :, None].expand(-1, -1, features.shape[-1])
        positions = state.prefix_lens[slots][:, None] + torch.arange(STEPS + 1, device=self.device)
        rows = self.rows(slots, state.prefix_lens, tail=STEPS + 1, valid=num_valid)
        features = self.head.linear("fc", features.gather(1, path))
        hidden = self.run_head(accepted.tokens.clamp(min=0), features, positions, *rows)
        last = (num_valid.long() - 1).clamp(min=0)
        self.keep_draft_state(slots, hidden[torch.arange(len(slots), device=self.device), last])
        return [row[:n] for row, n in zip(accepted.tokens.tolist(), accepted.num_valid.tolist(), strict=True)]

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        """Continue prompts greedily, each shorter than MAX_LEN; prompts beyond the slots wait their turn."""
        outputs: list[list[int]] = [[] for _ in prompts]
        waiting, running = deque(range(len(prompts))), dict[int, int]()  # indices of requests; slot -> request
        while waiting or running:
            for slot in range(SLOTS):
                if waiting and slot not in running:
                    running[slot] = waiting.popleft()
                    self.admit(slot, prompts[running[slot]], max_new_tokens)
            slots = torch.tensor(list(running), dtype=torch.int32, device=self.device)
            for slot, tokens in zip(list(running), self.round(slots), strict=True):
                outputs[running[slot]] += tokens
            for slot in [slot for slot in running if self.state.finish_reasons[slot]]:
                sd.free_pages(self.pool, torch.zeros_like(self.state.seq_lens), slots=self.ints(1) + slot)
                del running[slot]
        assert not self.state.status.any(), "an op found invalid state"
        return outputs


def main(texts: list[str]) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model("target") / "tokenizer.json"))
    device = "cuda" if torch.cuda.is_available() and sd.cuda_version else "cpu"
    engine = MinimalEngine(tiny_model("target"), tiny_model("eagle3"), device)
    for text, tokens in zip(texts, engine.generate([tokenizer.encode(t).ids for t in texts], 64), strict=True):
        print(text + tokenizer.decode(tokens) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:] or ["import os\n", "def quicksort(items):\n"])
