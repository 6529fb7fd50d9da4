"""What a user chooses for a request: how it is sampled, and when it ends."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..status import Edit
from .device.logit_edits import LogitEdit
from .text.generation_config import values_of

if TYPE_CHECKING:
    from torch import nn
    from transformers import GenerationConfig

MAX_LOGPROBS = 20
MAX_SAMPLES = 1024
CONSTRAINTS = ("json_schema", "regex", "grammar")


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
        n: samples of the prompt, each a request of its own: sample i draws with seed + i, as a request with that seed
            does. For what returns a list.
        presence_penalty, frequency_penalty: what is subtracted from the logit of a token that the request has
            generated, once, and for each time. The prompt does not count. They may be below 0.
        repetition_penalty: above 0. The logit of a token in the prompt or the text is divided by it where that is above
            0, else multiplied. 1: as it was.
        logit_bias: what is added to the logits of tokens, by their ids, before penalties; -inf forbids a token.
        json_schema, regex, grammar: what the text must be, by xgrammar (the extra `grammar`), for an
            `Engine(grammars=True)`; one of them at most. A JSON schema (a dict, or JSON; whitespace in the text has 16
            characters in a row at most), a regular expression, or a grammar in EBNF whose root is `root`. Stop tokens
            come where it is complete, and there alone; a budget may cut it off before.
        prediction: what the text may repeat, text or token ids: an n-gram draft reads it as if it stood before the
            prompt. For a draft of `Ngram`, alone or in a `Union`. The text is the same.
        ngram_group: who shares this text as n-gram drafts (a tenant; the samples of one prompt): 1 to 2^31 - 1, or 0
            for everybody. A group's requests draft from its texts and everybody's, and only they do from its own.
        min_new_tokens: the first so many tokens are no stop tokens (the target chooses among the others), and complete
            no stop string.
        stop: a string, or several, before which the text is cut off; of the tokens, those are kept that completed it.
            Looked for on the host, as results come in.
        logprobs: True: the log-probability of each token. A number: also those of the so many likeliest tokens in its
            place, at most 20. They are of the distribution behind bias and penalties, before temperature and
            filters.
        priority: requests of a lower number get a slot first, and keep it longest where pages run out; among those of
            one number, who was submitted first. Who runs is not interrupted for others to begin.
        timeout: seconds from its submission, above 0, in which it has to end, waiting included. Else it ends with
            `FinishReason.TIMEOUT` behind the round that runs then; the output keeps what came until then. None: any.
        speculation: "on", as many drafts are verified as pay; "off", none. A number: so many nodes at most, the root
            of each round's tree included, so that 1 is "off". What a request does not take is others' to have. The text
            is the same.
    """

    max_new_tokens: int = 128
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    prediction: str | Sequence[int] | None = None
    ngram_group: int = 0
    min_new_tokens: int = 0
    stop: str | Sequence[str] = ()
    logprobs: bool | int | None = None
    priority: int = 0
    timeout: float | None = None
    speculation: Literal["on", "off"] | int = "on"

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
        expect("n", 1 <= self.n <= MAX_SAMPLES, f"1 to {MAX_SAMPLES}")
        for name in ("presence_penalty", "frequency_penalty"):
            expect(name, math.isfinite(getattr(self, name)), "a finite number")
        expect("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a finite number above 0")
        for token, bias in (self.logit_bias or {}).items():
            if isinstance(token, bool) or not isinstance(token, int):
                raise TypeError(f"SamplingParams: logit_bias has a {type(token).__name__}, expected token ids")
            if not bias < math.inf:
                raise ValueError(f"SamplingParams: logit_bias[{token}] is {bias}, expected a finite number or -inf")
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"SamplingParams: {given[1]} is given, expected none beside {given[0]}")
        expect("min_new_tokens", not given or self.min_new_tokens == 0, f"0 beside {''.join(given)}")
        expect("priority", -(2**31) <= self.priority < 2**31, "-2147483648 to 2147483647")
        expect("timeout", self.timeout is None or 0 < self.timeout < math.inf, "seconds above 0, or None")
        allowed = "'on', 'off' or a number of nodes from 1 on"
        good = self.speculation in ("on", "off") or (isinstance(self.speculation, int) and self.speculation >= 1)
        expect("speculation", good and self.speculation is not True, allowed)
        expect("ngram_group", 0 <= self.ngram_group < 2**31, "0 to 2147483647")

    @classmethod
    def from_generation_config(
        cls, source: str | Path | nn.Module | GenerationConfig, **overrides: Any
    ) -> SamplingParams:
        """What a model's generation config asks for, as `generate` of transformers reads it.

        Of it are taken max_new_tokens, min_new_tokens, stop_strings, repetition_penalty and eos_token_id (one or
        several, as stop_token_ids); where do_sample is true also temperature (1 where it is not given), top_k (50 where
        it is not given), top_p and min_p; else the text is greedy. Where it has no max_new_tokens the default here
        counts: max_length, which includes the prompt, is not read.

        Args:
            source: path or hub id of a model, the module itself, or a `GenerationConfig`.
            overrides: parameters that take the place of the config's; or one that is refused, by its name there and
                with the value that leaves it out: `no_repeat_ngram_size=0`.

        Raises:
            ValueError: it asks for what would change the text and is not supported: beams, other penalties and filters.
            TypeError: another source; an override that there is not.
            OSError: no such model, or it has no generation config.
        """
        return cls(**values_of(source, dict(overrides)))

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def max_nodes(self) -> int:
        """Of a round's tree at most, its root included; 0: as many as pay."""
        return {"on": 0, "off": 1}[self.speculation] if isinstance(self.speculation, str) else self.speculation

    @property
    def timeout_ns(self) -> int:
        """`timeout` in nanoseconds, above 0; 0: none. A century is as good as none."""
        return 0 if self.timeout is None else max(1, int(min(self.timeout, 3e9) * 1e9))

    @property
    def num_logprobs(self) -> int:
        """How many of the likeliest tokens are wanted beside each token; -1: not even its own log-probability."""
        if self.logprobs is None or self.logprobs is False:
            return -1
        return 0 if self.logprobs is True else self.logprobs

    @property
    def constraint(self) -> tuple[str, str]:
        """What the text must be: which of json_schema, regex and grammar is given, and as text; "" twice: none is."""
        for name in CONSTRAINTS:
            value = getattr(self, name)
            if value is not None:
                return name, value if isinstance(value, str) else json.dumps(value)
        return "", ""

    def edits(self, num_prompt_tokens: int, new_matcher: Callable[[], Any] | None = None) -> LogitEdit | None:
        """What it asks of the logits of a request with such a prompt; None: nothing."""
        kinds = Edit.BIAS if self.logit_bias else Edit(0)
        if self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1:
            kinds |= Edit.PENALTIES
        if new_matcher is not None:
            kinds |= Edit.MASK
        if not kinds:
            return None
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return LogitEdit(kinds, dict(self.logit_bias or {}), *penalties, num_prompt_tokens, new_matcher)

    def with_seed(self) -> SamplingParams:
        """These, with a seed drawn where there is none and one is needed."""
        if self.temperature == 0 or self.seed is not None:
            return self
        return replace(self, seed=secrets.randbits(63))

    def of_sample(self, number: int) -> SamplingParams:
        """These, which have a seed where one is needed, for one of the n samples."""
        if number == 0 or self.seed is None:
            return self
        return replace(self, seed=(self.seed + number + 2**63) % 2**64 - 2**63)  # of 64 bits again
