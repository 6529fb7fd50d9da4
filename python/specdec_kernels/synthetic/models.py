"""Planted models: any shape at its full cost, random weights, and yet a known text and a chosen acceptance.

    text = PlantedText.of(config.vocab_size, draft_vocab)
    target = plant_causal_lm(config, text, device=device, dtype=torch.bfloat16)
    head = plant_eagle3(target, text, PublishedAcceptance("chat"))
    engine = Engine(target, draft=Eagle3(head, num_steps=5, topk=1))

Speed depends on the shape and on how many drafts are accepted, not on what is said. So a target's residual branches are
scaled down until the state that enters the final norm is the token's own embedding, and the row of `lm_head` that
belongs to its successor in the text is that embedding: the next token is a function of the current one, with a margin
that no rounding closes. Every product is computed, every logit is real, and verification is real too.

A draft is planted likewise, with logits for a few tokens ahead of each token of the text: which, an acceptance says
(`acceptance.py`). They are exact: what the rows of `lm_head` that several tokens share would add is taken off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from ..models.families import head_dim_of
from ..models.heads.eagle3 import Eagle3Head, feature_layers
from .acceptance import NUMBERS_PER_CANDIDATE, PEAK, Acceptance, EvenAcceptance

BRANCH = 1e-3  # what residual branches are scaled by
NOISE = 4e-3  # what the random part of planted weights adds to an output, which is of order one
SELF_SCORE = 60.0  # a draft head's attention score of a row to itself
ROWS_AT_ONCE = 2048  # of lm_head, that are written together


@dataclass(frozen=True)
class PlantedText:
    """The text that planted models write: the tokens of the draft vocabulary, in one shuffled order, over and over.

    The rest of the vocabulary is a second, longer text in which no token comes twice, which targets write behind a
    token of it, and whose drafts know nothing of it."""

    vocab: int
    draft_ids: Tensor  # [Vd] int64, rising
    order: Tensor  # [Vd] int64, the draft ids as they follow each other
    other_order: Tensor  # [V - Vd] int64, the second text

    @classmethod
    def of(cls, vocab: int, draft_vocab: int, seed: int = 0) -> PlantedText:
        draft_ids = torch.arange(draft_vocab) * vocab // draft_vocab
        generator = torch.Generator().manual_seed(seed)
        shuffle = torch.randperm(draft_vocab, generator=generator)
        others = torch.ones(vocab, dtype=torch.bool)
        others[draft_ids] = False
        other_ids = others.nonzero()[:, 0]
        return cls(vocab, draft_ids, draft_ids[shuffle], other_ids[torch.randperm(len(other_ids), generator=generator)])

    def tokens(self, start: int, count: int) -> list[int]:
        """`count` tokens of the text from position `start` on."""
        return self.order[torch.arange(start, start + count) % len(self.order)].tolist()

    def other_tokens(self, start: int, count: int) -> list[int]:
        """`count` tokens of the second text from position `start` on.

        Raises:
            ValueError: it ends before.
        """
        if not 0 <= start <= start + count <= len(self.other_order):
            raise ValueError(
                f"other_tokens: start + count is {start + count}, expected at most {len(self.other_order)}"
            )
        return self.other_order[start : start + count].tolist()


@torch.no_grad()
def plant_causal_lm(
    config: Any,
    text: PlantedText,
    *,
    device: torch.device,
    dtype: torch.dtype,
    acceptance: Acceptance | None = None,
    seed: int = 0,
) -> Any:
    """A causal language model of the config that writes the text: the target, or with an acceptance its draft."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                parameter.mul_(BRANCH)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding.bernoulli_(0.5).mul_(2).sub_(1)  # every row is as long as any other
        plant_successors(head, embedding, text.order, text.order, acceptance or EvenAcceptance())
        if acceptance is None and len(text.other_order):
            write_successors(head, embedding, text.other_order, text.other_order, EvenAcceptance())
    return model.requires_grad_(False).eval()


@torch.no_grad()
def plant_eagle3(target: Any, text: PlantedText, acceptance: Acceptance, *, seed: int = 0) -> Eagle3Head:
    """An EAGLE-3 head of the target's shape over the text's draft vocabulary, with the target's embeddings.

    Its attention scores are planted so that a row sees itself alone, whose value is the token's embedding less the
    feature: what was `feature + attended` is then the embedding of the current token.
    """
    embedding = target.get_input_embeddings().weight
    config: Any = eagle3_config(target.config)
    layers = feature_layers(config, target.config.num_hidden_layers)
    hidden, head_dim = config.hidden_size, head_dim_of(config)
    kv_width = config.num_key_value_heads * head_dim
    carried = min(hidden, kv_width)  # numbers of an embedding that the values have room for
    draft_of = torch.full((text.vocab,), -1)
    draft_of[text.draft_ids] = torch.arange(len(text.draft_ids))

    cuda = [embedding.device] if embedding.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.device(embedding.device):
        torch.manual_seed(seed)
        with torch.device("meta"):
            head = Eagle3Head(config, len(layers), len(text.draft_ids))
        head.embed_tokens = target.get_input_embeddings()
        for name, parameter in list(head.named_parameters()):
            if not parameter.is_meta:
                continue
            weight = torch.empty_like(parameter, device=embedding.device, dtype=embedding.dtype)
            if weight.dim() == 1:
                weight.fill_(1)
            else:
                weight.normal_(0, NOISE / math.sqrt(weight.shape[1]))
            module, leaf = name.rsplit(".", 1)
            setattr(head.get_submodule(module), leaf, nn.Parameter(weight, requires_grad=False))

        attention: Any = head.layers[0].self_attn
        numbers = torch.arange(carried)
        groups = config.num_attention_heads // config.num_key_value_heads
        query = (numbers // head_dim * groups * head_dim + numbers % head_dim)[:, None] + torch.arange(
            groups
        ) * head_dim
        share = math.sqrt(carried / hidden)  # of a feature's length after and before its norm
        sharpness = math.sqrt(SELF_SCORE / math.sqrt(head_dim))
        head.fc.weight[numbers, numbers] += 1
        attention.q_proj.weight[query, numbers[:, None]] += sharpness
        attention.k_proj.weight[numbers, numbers] += sharpness
        attention.v_proj.weight[numbers, numbers] += 1
        attention.v_proj.weight[numbers, hidden + numbers] -= share
        attention.o_proj.weight[numbers[:, None], query] += 1 / groups
        plant_successors(head.lm_head.weight, embedding[:, :carried], text.order, draft_of[text.order], acceptance)
        head.id_map = text.draft_ids.to(embedding.device, torch.int32)
    return head.requires_grad_(False).eval()


def eagle3_config(target: Any) -> LlamaConfig:
    """A head as wide as the target, as published ones are, over features of layers that shallow targets have too."""
    deepest = target.num_hidden_layers
    layers = [min(2, deepest) - 1, deepest // 2 - 1, max(deepest - 3, 1) - 1]
    config = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=head_dim_of(target),
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters=target.rope_parameters,
    )
    config.eagle_config = {"eagle_aux_hidden_state_layer_ids": layers}
    return config


def plant_successors(head: Tensor, embedding: Tensor, tokens: Tensor, rows: Tensor, acceptance: Acceptance) -> None:
    """Write `lm_head` [V or Vd, H]: behind tokens[i] of the text, row rows[i + d] gets the acceptance's logit for d.

    Args:
        embedding: [V, C], the C <= H first numbers of the tokens' rows: a final state has these alone, normed to the
            length of a whole one.
    """
    head.normal_(0, NOISE * PEAK / math.sqrt(head.shape[1] * embedding.shape[1]))
    write_successors(head, embedding, tokens, rows, acceptance)


def write_successors(head: Tensor, embedding: Tensor, tokens: Tensor, rows: Tensor, acceptance: Acceptance) -> None:
    """`plant_successors` of one text more: other rows stay as they are."""
    device, (count, carried), hidden = embedding.device, (len(tokens), embedding.shape[1]), head.shape[1]
    tokens, rows = tokens.to(device), rows.to(device)
    with torch.device("cpu"):  # where the draws are the same for every device
        logits = acceptance.logits(count, carried // NUMBERS_PER_CANDIDATE).to(device, torch.float32)
    distances = torch.arange(1, logits.shape[1] + 1, device=device)
    for at in torch.split(torch.arange(count, device=device), ROWS_AT_ONCE):
        # A row is a candidate behind one token of the text for each column. Its weights are the sum of these tokens'
        # states that gives each of them its logit.
        behind = (at[:, None] - distances) % count
        states = embedding[tokens[behind]].float() * math.sqrt(hidden / carried)
        missing = logits[behind, distances - 1] - torch.einsum("rkc,rc->rk", states, head[rows[at], :carried].float())
        shares = torch.linalg.solve(states @ states.mT, missing)
        head[rows[at], :carried] += torch.einsum("rk,rkc->rc", shares, states).to(head.dtype)
