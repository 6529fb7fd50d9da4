"""Parameters of a request: how it is sampled, and when it ends."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..status import Edit
from .logit_edits import LogitEdit
from .text.generation_config import values_of

if TYPE_CHECKING:
    from torch import nn
    from transformers import GenerationConfig

MAX_LOGPROBS = 20
MAX_SAMPLES = 1024
BACKENDS = {"json_schema": "llguidance", "regex": "llguidance", "grammar": "xgrammar"}  # of constraints
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
INTEGERS = ("max_new_tokens", "min_new_tokens", "top_k", "seed", "n", "priority", "client", "ngram_group")
# Kinds of other values than None.
KINDS: tuple[tuple[str, type | tuple[type, ...], str], ...] = (
    ("ignore_eos", bool, "true or false"),
    ("stop", (str, Sequence), "a string or strings"),
    ("stop_token_ids", Sequence, "a list of token ids"),
    ("generated_token_ids", Sequence, "a list of token ids"),
    ("logit_bias", Mapping, "a number for each token id"),
    ("json_schema", (str, Mapping), "a JSON schema"),
    ("regex", str, "a string"),
    ("grammar", str, "a string"),
    ("constrain_after", Sequence, "a list of token ids"),
)
SMALLEST_FLOAT, LARGEST_FLOAT = 2.0**-126, 3.4028234663852886e38  # of float32, normal ones


@dataclass(frozen=True)
class SamplingParams:
    """The decoding of one request: greedily at temperature 0, else by sampling from the target's distribution.

    A draw depends only on the seed and the token's position. With the same seed a request has the same text, whatever
    the draft and the other requests of the batch.

    Attributes:
        max_new_tokens: the budget, at least 1.
        stop_token_ids: tokens that end the request (kept as its last); None: the model's end-of-sequence tokens.
        ignore_eos: with stop_token_ids None, stop at nothing but the budget.
        temperature: 0 is greedy; else the divisor of the logits. top_k, top_p and min_p apply above 0.
        top_k: sample from the k most likely tokens; 0: from all.
        top_p: then sample from the most likely tokens that together reach this probability; 1: from all.
        min_p: then sample from tokens with at least this fraction of the highest probability; 0: from all.
        seed: 64-bit integer. Requests with the same seed draw the same. None: a new one each time, which the output
            names.
        n: samples of the prompt, each a request of its own. Sample i draws with seed + i, as a request with that seed
            does. For calls that return a list.
        presence_penalty, frequency_penalty: subtracted from the logit of a token that the request has generated, once,
            and for each occurrence. The prompt does not count. Negative values are allowed.
        repetition_penalty: above 0. A positive logit of a token in prompt or output is divided by it, a negative one
            multiplied. 1: no change.
        logit_bias: added to the logits of tokens, by id, before penalties; -inf forbids a token.
        json_schema, regex, grammar: constraint on the text (the extra `grammar`), for an `Engine(grammars=True)`; at
            most one of them. A JSON schema (a dict or JSON; at most 16 whitespace characters in a row in the text) or
            a regular expression for the whole text, both by llguidance; or a grammar in EBNF with the root `root`, by
            xgrammar. What the text cannot be held to is refused by name. Stop tokens come only where the text is
            complete; max_new_tokens may cut it off earlier.
        constrain_after: token ids, such as the one of `</think>`. The constraint begins after their first occurrence in
            the output; before it, all tokens but stop tokens are allowed. Empty: the constraint begins at once.
        constrain_unless: a token id, such as the one of `<think>`, with `constrain_after`. Only an output that begins
            with this token is free up to there; any other one is constrained from its first token. None: every output
            begins free.
        generated_token_ids: tokens that the output begins with, as if the request had generated them: penalties,
            `stop`, the limits of tokens and a constraint count them, and draws go on at the next position. The output
            has them as its first tokens; its `logprobs` are those of the tokens after them. So a text that ended early
            goes on as it would have. They are refused where the request would not have gone on after them, or a
            constraint forbids one.
        prediction: what the output may repeat, text or token ids. An n-gram draft reads it as if it preceded the
            prompt. Needs a draft of `Ngram`, alone or in a `Union`. Does not change the text.
        ngram_group: requests that share their texts for n-gram drafting (a tenant; samples of one prompt): 1 to
            2^31 - 1, or 0 for all. Requests of a group draft from texts of their group and of group 0; no other request
            drafts from theirs.
        min_new_tokens: number of first tokens that are no stop tokens (the target chooses among the others) and
            complete no stop string.
        stop: a string, or several, before which the text is cut off. `tokens` keeps the tokens that complete it. The
            host looks for it as results come in. A special token, which no text contains, counts as a stop token.
        logprobs: True: the log-probability of each token. A number, at most 20: also those of as many most likely
            tokens at its position. The distribution is that after bias and penalties, before temperature and filters.
        prompt_logprobs: the same of each token of the prompt but the first, in `RequestOutput.prompt_logprobs`, by the
            model's own logits, without bias and penalties. The prompt is prefilled as a whole then, without cached
            rows. Does not change the text.
        priority: requests with a lower number get a slot first, and keep it longest if pages run out; then the order of
            submission decides, in which a large call lets later ones pass. A running request is not interrupted to let
            another start.
        client: whose request it is: 1 to 2^31 - 1, or 0 for nobody's. While requests of a client wait, its further ones
            queue as the texts of one large call do, so that those of others pass them. Does not change the text.
        timeout: seconds from submission to end, waiting included, above 0. A late request ends with
            `FinishReason.TIMEOUT` after the round that runs then; the output keeps the tokens up to then. None: no
            limit.
        speculation: "on": as many draft nodes as pay off. "off": none. A number: at most this many nodes per round, the
            root of the tree included, so 1 is "off". Other requests may use the rest of the budget. Does not change the
            text.
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
    constrain_after: Sequence[int] = ()
    constrain_unless: int | None = None
    generated_token_ids: Sequence[int] = ()
    prediction: str | Sequence[int] | None = None
    ngram_group: int = 0
    min_new_tokens: int = 0
    stop: str | Sequence[str] = ()
    logprobs: bool | int | None = None
    prompt_logprobs: bool | int | None = None
    priority: int = 0
    client: int = 0
    timeout: float | None = None
    speculation: Literal["on", "off"] | int = "on"

    def __post_init__(self) -> None:
        def expect(name: str, good: bool, what: str) -> None:
            if not good:
                raise ValueError(f"SamplingParams: {name} is {getattr(self, name)}, expected {what}")

        for name in INTEGERS:
            value = getattr(self, name)
            good = isinstance(value, Integral) and not isinstance(value, bool)
            expect(name, good or (name == "seed" and value is None), "an integer")
        for name in NUMBERS:
            expect(name, is_number(getattr(self, name)), "a number")
        for name, kinds, what in KINDS:
            expect(name, getattr(self, name) is None or isinstance(getattr(self, name), kinds), what)
        expect("stop", all(isinstance(string, str) for string in self.stop_strings), "a string or strings")
        expect("max_new_tokens", self.max_new_tokens >= 1, "at least 1")
        expect("max_new_tokens", self.max_new_tokens < 2**31, "at most 2147483647")
        expect("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "0 to max_new_tokens")
        expect("stop", all(self.stop_strings), "strings that are not empty")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            good = value is None or (isinstance(value, Integral) and 0 <= int(value) <= MAX_LOGPROBS)
            expect(name, good, f"True, or 0 to {MAX_LOGPROBS}")
        expect("temperature", 0 <= self.temperature <= LARGEST_FLOAT, "a number from 0 (greedy) on")
        expect("top_k", 0 <= self.top_k < 2**31, "at least 1, or 0 for all tokens")
        expect("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        expect("min_p", 0 <= self.min_p <= 1, "0 to 1")
        expect("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "64 bits with a sign, or None")
        expect("n", 1 <= self.n <= MAX_SAMPLES, f"1 to {MAX_SAMPLES}")
        for name in ("presence_penalty", "frequency_penalty"):
            good = -LARGEST_FLOAT <= getattr(self, name) <= LARGEST_FLOAT
            expect(name, good, "a finite number of 32 bits")
        good = SMALLEST_FLOAT <= self.repetition_penalty <= LARGEST_FLOAT
        expect("repetition_penalty", good, "a finite number of 32 bits above 0")
        for name in ("stop_token_ids", "constrain_after", "generated_token_ids"):
            for token in getattr(self, name) or ():
                if not is_token_id(token):
                    raise ValueError(f"SamplingParams: {name} has {token!r}, expected 0 to 2147483647")
        expect("generated_token_ids", self.generated_token_ids is not None, "a list of token ids")
        if (count := len(self.generated_token_ids)) >= self.max_new_tokens:
            expected = f"expected fewer than max_new_tokens ({self.max_new_tokens})"
            raise ValueError(f"SamplingParams: generated_token_ids has {count} entries, {expected}")
        for token, bias in (self.logit_bias or {}).items():
            if isinstance(token, bool) or not isinstance(token, int):
                raise TypeError(f"SamplingParams: logit_bias has a {type(token).__name__}, expected token ids")
            if not (is_number(bias) and bias <= LARGEST_FLOAT):
                raise ValueError(f"SamplingParams: logit_bias[{token}] is {bias}, expected a finite number or -inf")
        given = [name for name in BACKENDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"SamplingParams: {given[1]} is given, expected none with {given[0]}")
        expect("constrain_after", bool(given) or not self.constrain_after, "none without a constraint")
        opening = self.constrain_unless
        expect("constrain_unless", opening is None or is_token_id(opening), "0 to 2147483647, or None")
        expect("constrain_unless", opening is None or bool(self.constrain_after), "none without constrain_after")
        expect("min_new_tokens", not given or self.min_new_tokens == 0, f"0 with {''.join(given)}")
        expect("priority", -(2**31) <= self.priority < 2**31, "-2147483648 to 2147483647")
        seconds = self.timeout
        expect(
            "timeout", seconds is None or (is_number(seconds) and 0 < seconds < math.inf), "seconds above 0, or None"
        )
        allowed = "'on', 'off' or a number of nodes from 1 on"
        nodes = self.speculation
        good = nodes in ("on", "off") or (isinstance(nodes, Integral) and nodes is not True and 1 <= int(nodes) < 2**31)
        expect("speculation", good, allowed)
        expect("client", 0 <= self.client < 2**31, "0 to 2147483647")
        expect("ngram_group", 0 <= self.ngram_group < 2**31, "0 to 2147483647")

    @classmethod
    def from_generation_config(
        cls, source: str | Path | nn.Module | GenerationConfig, **overrides: Any
    ) -> SamplingParams:
        """Return the parameters that a model's generation config gives, as `generate` of transformers reads it.

        Read are max_new_tokens, min_new_tokens, stop_strings, repetition_penalty and eos_token_id (one or several, as
        stop_token_ids). If do_sample is true, also temperature (default 1), top_k (default 50), top_p and min_p; else
        decoding is greedy. Without max_new_tokens the default here counts: max_length, which includes the prompt, is
        not read.

        Args:
            source: path or hub id of a model, the module itself, or a `GenerationConfig`.
            overrides: parameters that replace the config's; or a setting that is refused, by its name in the config,
                with the value that disables it: `no_repeat_ngram_size=0`.

        Raises:
            ValueError: a setting that would change the text and is not supported: beams, other penalties and filters.
            TypeError: another source; an unknown override.
            OSError: no such model, or a model without a generation config.
        """
        return cls(**values_of(source, dict(overrides)))

    @property
    def stop_strings(self) -> list[str]:
        """Return the stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def max_nodes(self) -> int:
        """Return the most nodes of a round's tree, root included; 0: as many as pay off."""
        return {"on": 0, "off": 1}[self.speculation] if isinstance(self.speculation, str) else self.speculation

    @property
    def timeout_ns(self) -> int:
        """Return `timeout` in nanoseconds, at most a century; 0: none."""
        return 0 if self.timeout is None else max(1, int(min(self.timeout, 3e9) * 1e9))

    @property
    def num_logprobs(self) -> int:
        """Return how many of the most likely tokens to score at each position; -1: not even the token itself."""
        return count_of(self.logprobs)

    @property
    def num_prompt_logprobs(self) -> int:
        """Return the same for tokens of the prompt."""
        return count_of(self.prompt_logprobs)

    @property
    def constraint(self) -> tuple[str, str]:
        """Return the name of the constraint given (json_schema, regex or grammar) and its text; "" twice: none."""
        for name in BACKENDS:
            value = getattr(self, name)
            if value is not None:
                return name, value if isinstance(value, str) else json.dumps(value)
        return "", ""

    @property
    def grammar_backend(self) -> str:
        """Return the package that holds the text to the constraint given; "": none is given."""
        return BACKENDS.get(self.constraint[0], "")

    def edits(self, num_prompt_tokens: int, new_matcher: Callable[[], Any] | None = None) -> LogitEdit | None:
        """Return the edits of a request's logits, given the length of its prompt; None: no edits."""
        kinds = Edit.BIAS if self.logit_bias else Edit(0)
        if self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1:
            kinds |= Edit.PENALTIES
        if new_matcher is not None:
            kinds |= Edit.MASK
        if not kinds:
            return None
        penalties = float(self.presence_penalty), float(self.frequency_penalty), float(self.repetition_penalty)
        return LogitEdit(kinds, dict(self.logit_bias or {}), *penalties, num_prompt_tokens, new_matcher)

    def with_seed(self) -> SamplingParams:
        """Return the parameters with a seed, drawn if there is none and one is needed."""
        if self.temperature == 0 or self.seed is not None:
            return self
        return replace(self, seed=secrets.randbits(63))

    def of_sample(self, number: int) -> SamplingParams:
        """Return the parameters of one of the n samples, with a seed of its own."""
        if number == 0 or self.seed is None:
            return self
        return replace(self, seed=(self.seed + number + 2**63) % 2**64 - 2**63)  # of 64 bits again


def is_token_id(value: Any) -> bool:
    """Return whether a value is an integer that a vocabulary may have."""
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) < 2**31


def is_number(value: Any) -> bool:
    """Return whether a value is an integer or a float; a bool is neither."""
    return isinstance(value, Real) and not isinstance(value, bool)


def count_of(logprobs: bool | int | None) -> int:
    """Return the alternatives that `logprobs` asks for; -1: not even the token itself is scored."""
    if logprobs is None or logprobs is False:
        return -1
    return 0 if logprobs is True else logprobs
