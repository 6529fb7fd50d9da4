"""What a user chooses: how to speculate (once, per engine) and how to sample (per request)."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

MAX_LOGPROBS = 20
ALGORITHMS = ("NONE", "NGRAM", "EAGLE", "EAGLE3", "STANDALONE", "EAGLE3+NGRAM")


@dataclass(frozen=True)
class Speculation:
    """How candidates are drafted. The names are those of the field's command lines.

    Attributes:
        algorithm: NONE (plain decoding), NGRAM (an index over all text seen), EAGLE (a draft head of EAGLE or EAGLE-2),
            EAGLE3 (one of EAGLE-3), STANDALONE (a small model with the target's tokenizer), or EAGLE3+NGRAM (the best
            nodes of both).
        draft_model: folder or hub id of the head or small model, or the module itself; all but NONE and NGRAM need it.
        num_steps: depth of drafting of a model draft (NGRAM drafts as deep as its nodes reach).
        topk: branches per step; 1 drafts a chain.
        num_draft_tokens: tree nodes verified per round, including the root. None: num_steps + 1 for a model's
            chain, 16 for NGRAM, else 32.
        sampled_drafts: draw the drafts of requests that sample, and accept or reject them as a block, instead of taking
            the likeliest: rounds of a chain (topk 1) give more tokens. One seed then gives one text for this draft
            alone, as long as the request is not retracted and `adaptive` is not set.
        adaptive: choose for each round how many of these nodes to draft, from measured costs and the acceptance seen so
            far, down to none. None: where rounds are captured as CUDA graphs and no drafts are drawn.
        ngram_max_tokens: tokens the n-gram index holds before the oldest age out.
        ngram_corpus: text files that the n-gram index starts with: what answers may repeat (documentation, code, past
            answers).
    """

    algorithm: str = "NONE"
    draft_model: str | Path | nn.Module | None = None
    num_steps: int = 5
    topk: int = 8
    num_draft_tokens: int | None = None
    adaptive: bool | None = None
    sampled_drafts: bool = False
    ngram_max_tokens: int = 1 << 20
    ngram_corpus: Sequence[str | Path] = ()

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"Speculation: algorithm is {self.algorithm!r}, expected one of {ALGORITHMS}")
        if self.uses_model and self.draft_model is None:
            raise ValueError(f"Speculation: draft_model is None, expected a path or hub id for {self.algorithm}")
        if not self.uses_model and self.draft_model is not None:
            raise ValueError(f"Speculation: draft_model is given, expected None for {self.algorithm}")
        if self.ngram_corpus and not self.uses_ngram:
            raise ValueError(f"Speculation: ngram_corpus is given, expected none for {self.algorithm}")
        for name, low, high in (("num_steps", 1, 64), ("topk", 1, 64), ("num_draft_tokens", 1, 256)):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"Speculation: {name} is {value}, expected {low} to {high}")

        if self.sampled_drafts and (self.topk != 1 or self.algorithm not in ("EAGLE", "EAGLE3", "STANDALONE")):
            raise ValueError(
                f"Speculation: sampled_drafts is True, expected False for {self.algorithm} with topk {self.topk} "
                "(a chain of EAGLE, EAGLE3 or STANDALONE can be drawn)"
            )

    @property
    def uses_model(self) -> bool:
        return self.algorithm not in ("NONE", "NGRAM")

    @property
    def uses_eagle3(self) -> bool:
        return self.algorithm.startswith("EAGLE3")

    @property
    def uses_ngram(self) -> bool:
        return self.algorithm.endswith("NGRAM")

    @property
    def num_nodes(self) -> int:
        """Tree nodes of a round, the root included."""
        if self.algorithm == "NONE":
            return 1
        if self.num_draft_tokens is not None:
            return self.num_draft_tokens
        if self.algorithm == "NGRAM":
            return 16
        return self.num_steps + 1 if self.topk == 1 and self.algorithm != "EAGLE3+NGRAM" else 32

    @property
    def ladder(self) -> list[int]:
        """The numbers of nodes that an adaptive engine chooses from: 1, plain decoding, and twice as many each."""
        return [1 << power for power in range(8) if 1 << power < self.num_nodes] + [self.num_nodes]


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded: greedily at temperature 0, else by draws from the target's distribution.

    A draw depends on the seed and the token's position alone: with one seed a request has the same text whatever drafts
    for it and whatever runs beside it.

    Attributes:
        max_new_tokens: the budget, at least 1.
        stop_token_ids: tokens that end the request (kept as its last); None: the model's end-of-sequence tokens.
        ignore_eos: with stop_token_ids None, stop at nothing but the budget.
        temperature: 0, greedy; else what the logits are divided by. What follows is for temperatures above 0.
        top_k: draw from the k likeliest tokens; 0, from all.
        top_p: of these, draw from the likeliest that together reach this probability; 1, from all.
        min_p: of these, draw from those at least this times as likely as the likeliest; 0, from all.
        seed: of the draws, an integer of 64 bits. Requests that share it draw alike. None: another one each time,
            which the request's output names.
        ngram_group: who shares this text as n-gram drafts (a tenant; the samples of one prompt): 1 to 2^31 - 1, or 0
            for everybody. A group's requests draft from its texts and everybody's, and only they do from its own.
        min_new_tokens: the first so many tokens are no stop tokens (the target chooses among the others), and complete
            no stop string.
        stop: a string, or several, before which the text is cut off; of the tokens, those are kept that completed it.
            Looked for on the host, as results come in.
        logprobs: True: the log-probability of each token. A number: also those of the so many likeliest tokens in its
            place, at most 20. They are of the model's own distribution, before temperature and filters.
    """

    max_new_tokens: int = 128
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    ngram_group: int = 0
    min_new_tokens: int = 0
    stop: str | Sequence[str] = ()
    logprobs: bool | int | None = None

    def __post_init__(self) -> None:
        def expect(name: str, good: bool, what: str) -> None:
            if not good:
                raise ValueError(f"SamplingParams: {name} is {getattr(self, name)}, expected {what}")

        expect("max_new_tokens", self.max_new_tokens >= 1, "at least 1")
        expect("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "0 to max_new_tokens")
        expect("stop", all(self.stop_strings), "strings that are not empty")
        good = self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS
        expect("logprobs", good, f"True, or 0 to {MAX_LOGPROBS}")
        expect("temperature", 0 <= self.temperature < math.inf, "a number from 0 (greedy) on")
        expect("top_k", 0 <= self.top_k < 2**31, "at least 1, or 0 for all tokens")
        expect("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        expect("min_p", 0 <= self.min_p <= 1, "0 to 1")
        expect("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "64 bits with a sign, or None")
        expect("ngram_group", 0 <= self.ngram_group < 2**31, "0 to 2147483647")

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def num_logprobs(self) -> int:
        """How many of the likeliest tokens are wanted beside each token; -1: not even its own log-probability."""
        if self.logprobs is None or self.logprobs is False:
            return -1
        return 0 if self.logprobs is True else self.logprobs

    def with_seed(self) -> SamplingParams:
        """These, with a seed drawn where there is none and one is needed."""
        if self.temperature == 0 or self.seed is not None:
            return self
        return replace(self, seed=secrets.randbits(63))
