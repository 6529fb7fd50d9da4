"""Draft heads for training: EAGLE-3 (arXiv 2503.01840) and DSpark, with the names of their published checkpoints.

Both read the target's hidden states that enter a few of its layers, and predict a part of its vocabulary: their LM head
is the target's rows of these tokens, and is not trained.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Config = dict[str, Any]


class Observed:
    """The outputs of a target for texts.

    Attributes:
        tokens: [B, L], padded. features: [B, L, F], the hidden states that enter the feature layers.
        counts: [B, L], positions whose next token counts: N in all. The first one never does.
        next_counts: [B, L], those whose next position counts.
        position: [N], in the texts.
        probabilities: [N, Vd], of the next token, over the draft vocabulary; the rest of 1 is outside.
        best, next_ids: [N], draft ids of the likeliest next token and of the text's own; -1: outside.
        row: [B * L], which of the N a position is.
    """

    def __init__(self, tokens: Tensor, counts: Tensor, features: Tensor, logits: Tensor, kept: Tensor) -> None:
        self.tokens, self.counts, self.features = tokens, counts, features
        self.next_counts = counts.roll(-1, 1)  # the first position never counts
        self.position = counts.nonzero()[:, 1]
        self.row = counts.flatten().long().cumsum(0) - 1
        self.probabilities = (logits[:, kept].float() - logits.float().logsumexp(-1, keepdim=True)).exp()
        draft_ids = torch.full((logits.shape[1],), -1, device=kept.device)
        draft_ids[kept] = torch.arange(len(kept), device=kept.device)
        self.best = draft_ids[logits.argmax(-1)]
        self.next_ids = draft_ids[tokens.roll(-1, 1)[counts]]

    def flat(self, at: Tensor) -> Tensor:
        """Return the indices in flattened texts of positions [B, ...] in each."""
        begin = torch.arange(len(at), device=at.device) * self.tokens.shape[1]
        return at + begin.view(-1, *[1] * (at.dim() - 1))


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Projections and attention with a mask, over `inputs` elements a row."""

    def __init__(self, config: Config, inputs: int, has_norms: bool) -> None:
        super().__init__()
        self.dim, self.theta = config["head_dim"], config["rope_theta"]
        width, kv_width = config["num_attention_heads"] * self.dim, config["num_key_value_heads"] * self.dim
        self.groups = width // kv_width
        self.q_proj = nn.Linear(inputs, width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(inputs, kv_width, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(width, config["hidden_size"], bias=False)
        if has_norms:
            self.q_norm, self.k_norm = (RMSNorm(self.dim, config["rms_norm_eps"]) for _ in range(2))

    def heads(self, x: Tensor, positions: Tensor, part: str) -> Tensor:
        """Return queries or keys [B, heads, T, D] of rows [B, T, H] at positions [B, T], rotated."""
        x = getattr(self, f"{part}_proj")(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
        if hasattr(self, "q_norm"):
            x = getattr(self, f"{part}_norm")(x)
        frequencies = self.theta ** (-torch.arange(0, self.dim, 2, device=x.device) / self.dim)
        angles = positions[:, None, :, None] * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, kv heads, T, D]."""
        return self.heads(x, positions, "k"), self.v_proj(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)

    def forward(self, x: Tensor, positions: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attend to keys and values; `mask` says which, [..., T, keys]. None: those before and at each row."""
        q = self.heads(x, positions, "q")
        k, v = (part.repeat_interleave(self.groups, 1).to(q.dtype) for part in (keys, values))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, intermediate, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: Config, inputs: int, has_norms: bool) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        if inputs > hidden:
            self.hidden_norm = RMSNorm(hidden, eps)  # of EAGLE-3's features
        self.self_attn = Attention(config, inputs, has_norms)
        self.mlp = MLP(hidden, config["intermediate_size"])

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class Head(nn.Module, ABC):
    """The base of both kinds of heads.

    Args:
        config: of the checkpoint.
        kept: the target's ids of the draft vocabulary, increasing.
        embedding: the target's.
        lm_head: the target's. Its rows `kept` are the head's.
        num_features: layers that the features are of.
    """

    def __init__(self, config: Config, kept: Tensor, embedding: Tensor, lm_head: Tensor, num_features: int) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.config, self.kept = config, kept
        self.embedding, self.rows = embedding, lm_head[kept]
        self.fc = nn.Linear(num_features * hidden, hidden, bias=False)
        self.norm = RMSNorm(hidden, eps)

    def start(self) -> None:
        """Set weights to small random values, and those that lead out of a layer to smaller ones."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                depth = 4 if name.endswith(("o_proj", "down_proj")) else 1
                nn.init.normal_(module.weight, std=module.in_features**-0.5 / depth)

    @abstractmethod
    def loss(self, text: Observed, rng: torch.Generator, **options: Any) -> Tensor:
        """Return the loss on texts."""

    @abstractmethod
    def accepted(self, text: Observed) -> Tensor:
        """Return the drafts that greedy verification accepts of a chain after each token [B, L], its own root."""

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self.norm(hidden), self.rows.to(hidden.dtype))

    def tensors(self) -> dict[str, Tensor]:
        """Return what is stored: the trained parameters."""
        return {name: tensor.detach() for name, tensor in self.state_dict().items()}


class Eagle3(Head):
    """Row i reads the embedding of token i + 1 and the feature of position i, and predicts token i + 2."""

    def __init__(self, config: Config, kept: Tensor, embedding: Tensor, lm_head: Tensor, num_features: int) -> None:
        super().__init__(config, kept, embedding, lm_head, num_features)
        self.midlayer = DecoderLayer(config, 2 * config["hidden_size"], has_norms=False)
        self.start()

    def unroll(self, tokens: Tensor, features: Tensor, steps: int) -> list[Tensor]:
        """Return the states [B, T, H] of the steps of training-time test, for tokens [B, T].

        Step s holds at position p the row that a draft begun at row p - s reaches after s steps. Its feature is the
        output of step s - 1 at p - 1. It sees rows with the target's features up to p - s, and of each step m after the
        first the row at p - s + m. Rows p < s have no such draft.
        """
        layer, count = self.midlayer, tokens.shape[1]
        embedded = layer.input_layernorm(F.embedding(tokens.roll(-1, 1), self.embedding).to(features.dtype))
        positions = torch.arange(count, device=tokens.device).expand(len(tokens), -1)
        row, column = positions[0][:, None], positions[0][None]
        feature, states, keys, values = self.fc(features), [], [], []
        for step in range(steps):
            x = torch.cat((embedded, layer.hidden_norm(feature)), -1)
            key, value = layer.self_attn.keys(x, positions)
            keys.append(key)
            values.append(value)
            seen = [column <= row - step, *(column == row - step + m for m in range(1, step + 1))]
            mask = torch.cat(seen, 1) if step else None
            attended = layer.self_attn(x, positions, torch.cat(keys, 2), torch.cat(values, 2), mask)
            states.append(layer.finish(feature, attended))
            feature = F.pad(states[-1], (0, 0, 1, 0))[:, :-1]
        return states

    def loss(self, text: Observed, rng: torch.Generator, *, steps: int = 5, decay: float = 0.8, **_: Any) -> Tensor:
        """Return the cross-entropy of all steps against the target's distribution over the draft vocabulary."""
        total = torch.zeros((), device=text.tokens.device)
        among = text.probabilities / text.probabilities.sum(-1, keepdim=True).clamp(min=1e-6)
        for step, state in enumerate(self.unroll(text.tokens, text.features, steps)):
            logprobs = self.logits(state[text.next_counts]).float().log_softmax(-1)
            # As published, rows whose likeliest token is outside the draft vocabulary teach nothing.
            weight = ((text.position > step) & (text.best >= 0)).float()
            total = total - decay**step * (weight * (among * logprobs).sum(-1)).sum() / weight.sum().clamp(min=1)
        return total / sum(decay**step for step in range(steps))

    def accepted(self, text: Observed, steps: int = 5) -> Tensor:
        rows, columns = text.tokens.shape
        right = torch.zeros(steps, rows, columns + steps, dtype=torch.bool, device=text.tokens.device)
        for step, state in enumerate(self.unroll(text.tokens, text.features, steps)):
            best = self.logits(state[text.next_counts]).argmax(-1) == text.next_ids
            right[step, :, :columns][text.counts] = best  # at the root that the draft would have after `step` tokens
        chains = torch.stack([right[step, :, step : step + columns] for step in range(steps)])
        return chains.int().cumprod(0).sum(0)


class MarkovHead(nn.Module):
    def __init__(self, vocab: int, draft_vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1, self.markov_w2 = nn.Embedding(vocab, rank), nn.Linear(rank, draft_vocab, bias=False)


class DSpark(Head):
    """A block of rows after each root, its token and mask tokens, predicts the tokens after the root.

    Keys and values of all layers come from the target's features of tokens before the root, and from the block.
    """

    def __init__(self, config: Config, kept: Tensor, embedding: Tensor, lm_head: Tensor, num_features: int) -> None:
        super().__init__(config, kept, embedding, lm_head, num_features)
        hidden = config["hidden_size"]
        self.block = config["block_size"]
        self.layers = nn.ModuleList(
            DecoderLayer(config, hidden, has_norms=True) for _ in range(config["num_hidden_layers"])
        )
        self.hidden_norm = RMSNorm(hidden, config["rms_norm_eps"])
        self.markov_head = MarkovHead(len(embedding), len(kept), config["markov_rank"])
        self.start()
        nn.init.normal_(self.markov_head.markov_w1.weight, std=config["markov_rank"] ** -0.5)
        nn.init.zeros_(self.markov_head.markov_w2.weight)

    def blocks(self, text: Observed, roots: Tensor) -> Tensor:
        """Return the states [B, A, Q, H] of blocks after roots [B, A], positions in the texts."""
        batch, length = text.tokens.shape
        rows = torch.arange(self.block, device=roots.device)
        tokens = torch.full((*roots.shape, self.block), self.config["mask_token_id"], device=roots.device)
        tokens[..., 0] = text.tokens.gather(1, roots)
        x = F.embedding(tokens.flatten(1), self.embedding).to(text.features.dtype)
        positions = (roots[..., None] + rows).flatten(1)
        before = torch.arange(length, device=roots.device)
        block = torch.arange(roots.shape[1], device=roots.device).repeat_interleave(self.block)
        mask = torch.cat(
            (
                before < roots.repeat_interleave(self.block, 1)[..., None],
                (block[:, None] == block).expand(batch, -1, -1),
            ),
            2,
        )[:, None]
        context, where = self.hidden_norm(self.fc(text.features)), before.expand(batch, -1)
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            normed = layer.input_layernorm(x)
            ours, theirs = layer.self_attn.keys(normed, positions), layer.self_attn.keys(context, where)
            keys, values = (torch.cat(pair, 2) for pair in zip(theirs, ours, strict=True))
            x = layer.finish(x, layer.self_attn(normed, positions, keys, values, mask))
        return x.unflatten(1, (-1, self.block))

    def after(self, states: Tensor, before: Tensor) -> Tensor:
        """Return the logits of states [N, H] after tokens [N]."""
        return self.logits(states) + self.markov_head.markov_w2(self.markov_head.markov_w1(before))

    def counted(self, text: Observed, roots: Tensor) -> tuple[Tensor, Tensor]:
        """Return which rows of blocks [B, A, Q] predict a token that counts, and the positions of its predecessor."""
        at = roots[..., None] + torch.arange(self.block, device=roots.device)
        inside = at < text.tokens.shape[1]
        at = at.clamp(max=text.tokens.shape[1] - 1)
        counts = text.counts.gather(1, at.flatten(1)).view(at.shape) & inside
        return counts.int().cumprod(-1).bool(), at

    def loss(self, text: Observed, rng: torch.Generator, *, ce: float = 0.1, gamma: float = 4.0, **_: Any) -> Tensor:
        """Return a cross-entropy with the text and the distance to the target's distribution, at random roots."""
        length = text.tokens.shape[1]
        chances = torch.rand(text.counts.shape, generator=rng, device=rng.device) * text.counts
        # About as many rows as the text has, and a multiple of 8 of them, as kernels of attention want it.
        roots = chances.topk(min(length, max(1, length // (8 * self.block)) * 8), 1).indices
        counts, at = self.counted(text, roots)
        states, at = self.blocks(text, roots)[counts], text.flat(at)[counts]
        logits = self.after(states, text.tokens.flatten()[at]).float()
        weight = torch.exp(-torch.arange(self.block, device=at.device) / gamma).expand(counts.shape)[counts]
        row = text.row[at]
        distance = (logits.softmax(-1) - text.probabilities[row]).abs().sum(-1)
        label = text.next_ids[row]
        entropy = F.cross_entropy(logits, label, reduction="none", ignore_index=-1)
        return (weight * (ce * entropy + (1 - ce) * distance)).sum() / weight.sum().clamp(min=1)

    def accepted(self, text: Observed) -> Tensor:
        accepted = torch.zeros_like(text.tokens)
        for roots in text.counts.any(0).nonzero()[:, 0].split(64):
            roots = roots.expand(len(text.tokens), -1)
            counts, at = self.counted(text, roots)
            states, at = self.blocks(text, roots)[counts], text.flat(at)[counts]
            right = counts.clone()
            best = self.after(states, text.tokens.flatten()[at]).argmax(-1)
            right[counts] = best == text.next_ids[text.row[at]]
            accepted.scatter_(1, roots, right.int().cumprod(-1).sum(-1))
        return accepted
