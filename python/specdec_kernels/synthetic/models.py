"""Synthetic models: random weights of any shape, at full cost, with a known output and a chosen acceptance.

    text = SyntheticText.of(config.vocab_size, draft_vocab)
    target = synthetic_causal_lm(config, text, device=device, dtype=torch.bfloat16)
    head = synthetic_eagle3(target, text, PublishedAcceptance("chat"))
    engine = Engine(target, draft=Eagle3(head, num_steps=5, topk=1))

Speed depends on the shape and on how many drafts are accepted, not on the text. A target's residual branches are scaled
down until the state before the final norm is the token's own embedding, and the row of `lm_head` of the token's
successor in the text is that embedding. So the next token is a function of the current one, with a margin that exceeds
any rounding. Every product and every logit is computed, and drafts are verified as usual.

A draft has, after each token of the text, logits for a few of the tokens ahead; an acceptance chooses them
(`acceptance.py`). They are exact: a row of `lm_head` is a candidate after several tokens, and its weights are solved
for all of them.
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
from .acceptance import ELEMENTS_PER_CANDIDATE, PEAK, Acceptance, EvenAcceptance
from .shapes import full_attention_of

BRANCH = 1e-3  # scale of residual branches
TARGET_PEAK = 64.0  # logit of the next token: drafts that share the LM head divide it among their candidates
NOISE = 4e-3  # what the random part of weights adds to an output of order one
SELF_SCORE = 60.0  # a draft head's attention score of a row to itself
ROWS_AT_ONCE = 2048  # rows of lm_head that are written together


@dataclass(frozen=True)
class SyntheticText:
    """The text of synthetic models: the tokens of the draft vocabulary in a shuffled order, repeated.

    The rest of the vocabulary is a second text, in which no token occurs twice. Targets continue it as well; drafts do
    not.
    """

    vocab: int
    draft_ids: Tensor  # [Vd] int64, increasing
    order: Tensor  # [Vd] int64, the draft ids in the order of the text
    other_order: Tensor  # [V - Vd] int64, the second text

    @classmethod
    def of(cls, vocab: int, draft_vocab: int, seed: int = 0) -> SyntheticText:
        """Return the text of a vocabulary of `vocab` tokens, `draft_vocab` of them in the draft's."""
        draft_ids = torch.arange(draft_vocab) * vocab // draft_vocab
        generator = torch.Generator().manual_seed(seed)
        shuffle = torch.randperm(draft_vocab, generator=generator)
        others = torch.ones(vocab, dtype=torch.bool)
        others[draft_ids] = False
        other_ids = others.nonzero()[:, 0]
        return cls(vocab, draft_ids, draft_ids[shuffle], other_ids[torch.randperm(len(other_ids), generator=generator)])

    def tokens(self, start: int, count: int) -> list[int]:
        """Return `count` tokens of the text from position `start` on."""
        return self.order[torch.arange(start, start + count) % len(self.order)].tolist()

    def other_tokens(self, start: int, count: int) -> list[int]:
        """Return `count` tokens of the second text from position `start` on.

        Raises:
            ValueError: the text ends before.
        """
        if not 0 <= start <= start + count <= len(self.other_order):
            raise ValueError(
                f"other_tokens: start + count is {start + count}, expected at most {len(self.other_order)}"
            )
        return self.other_order[start : start + count].tolist()


@torch.no_grad()
def synthetic_causal_lm(
    config: Any,
    text: SyntheticText,
    *,
    device: torch.device,
    dtype: torch.dtype,
    acceptance: Acceptance | None = None,
    seed: int = 0,
) -> Any:
    """Return a causal language model that continues the text: a target, or with an acceptance its draft."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")):
                parameter.mul_(BRANCH)
        embedding = model.get_input_embeddings().weight
        embedding.bernoulli_(0.5).mul_(2).sub_(1)  # all rows have the same length
        write_text(model, text, acceptance)
    return model.requires_grad_(False).eval()


@torch.no_grad()
def write_text(model: Any, text: SyntheticText, acceptance: Acceptance | None = None) -> None:
    """Let a model of `synthetic_causal_lm` continue a text: as a target, or with an acceptance as its draft."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    certain = EvenAcceptance(peak=TARGET_PEAK)
    init_successors(head, embedding, text.order, text.order, acceptance or certain)
    if acceptance is None and len(text.other_order):
        write_successors(head, embedding, text.other_order, text.other_order, certain)


@torch.no_grad()
def synthetic_eagle3(target: Any, text: SyntheticText, acceptance: Acceptance, *, seed: int = 0) -> Eagle3Head:
    """Return an EAGLE-3 head of the target's shape over the text's draft vocabulary, with the target's embeddings.

    Its attention weights make a row attend to itself alone. The row's value is the token's embedding minus the feature,
    so that `feature + attended` is the embedding of the current token.
    """
    embedding = target.get_input_embeddings().weight
    config: Any = eagle3_config(target.config)
    layers = feature_layers(config, target.config.num_hidden_layers)
    hidden, head_dim = config.hidden_size, head_dim_of(config)
    kv_width = config.num_key_value_heads * head_dim
    carried = min(hidden, kv_width)  # elements of an embedding that fit into the values
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
        elements = torch.arange(carried)
        groups = config.num_attention_heads // config.num_key_value_heads
        query = (elements // head_dim * groups * head_dim + elements % head_dim)[:, None] + torch.arange(
            groups
        ) * head_dim
        scale = math.sqrt(carried / hidden)  # a feature's length after its norm over that before
        sharpness = math.sqrt(SELF_SCORE / math.sqrt(head_dim))
        head.fc.weight[elements, elements] += 1
        attention.q_proj.weight[query, elements[:, None]] += sharpness
        attention.k_proj.weight[elements, elements] += sharpness
        attention.v_proj.weight[elements, elements] += 1
        attention.v_proj.weight[elements, hidden + elements] -= scale
        attention.o_proj.weight[elements[:, None], query] += 1 / groups
        init_successors(head.lm_head.weight, embedding[:, :carried], text.order, draft_of[text.order], acceptance)
        head.id_map = text.draft_ids.to(embedding.device, torch.int32)
    return head.requires_grad_(False).eval()


def eagle3_config(target: Any) -> LlamaConfig:
    """Return the config of a head as wide as the target, with feature layers that shallow targets have."""
    target = full_attention_of(target)
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


def init_successors(head: Tensor, embedding: Tensor, tokens: Tensor, rows: Tensor, acceptance: Acceptance) -> None:
    """Write `lm_head` [V or Vd, H]: after tokens[i] of the text, row rows[i + d] has the acceptance's logit for d.

    Args:
        head: the weight to write.
        embedding: [V, C], the first C <= H elements of the tokens' rows. A final state has only these, scaled to the
            length of a whole row.
        tokens: the text.
        rows: each token's row of the head.
        acceptance: the acceptance rates to reach.
    """
    head.normal_(0, NOISE * PEAK / math.sqrt(head.shape[1] * embedding.shape[1]))
    write_successors(head, embedding, tokens, rows, acceptance)


def write_successors(head: Tensor, embedding: Tensor, tokens: Tensor, rows: Tensor, acceptance: Acceptance) -> None:
    """Write the rows of a text and leave other rows as they are; see `init_successors`."""
    device, (count, carried), hidden = embedding.device, (len(tokens), embedding.shape[1]), head.shape[1]
    tokens, rows = tokens.to(device), rows.to(device)
    with torch.device("cpu"):  # same random numbers for every device
        logits = acceptance.logits(count, carried // ELEMENTS_PER_CANDIDATE).to(device, torch.float32)
    distances = torch.arange(1, logits.shape[1] + 1, device=device)
    for at in torch.split(torch.arange(count, device=device), ROWS_AT_ONCE):
        # A row is a candidate after one token of the text for each column. Its weights are the linear combination of
        # these tokens' states that gives each of them its logit.
        before = (at[:, None] - distances) % count
        states = embedding[tokens[before]].float() * math.sqrt(hidden / carried)
        missing = logits[before, distances - 1] - torch.einsum("rkc,rc->rk", states, head[rows[at], :carried].float())
        factors = torch.linalg.solve(states @ states.mT, missing)
        head[rows[at], :carried] += torch.einsum("rk,rkc->rc", factors, states).to(head.dtype)
