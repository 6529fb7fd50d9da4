"""Prompts as parts of responses: their texts (`echo`) and the log-probabilities of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine import TokenLogprob
from ..engine.text.detokenizer import Detokenizer
from .text import TokenText

Logprobs = dict[str, list[Any]]


def finite(logprob: float) -> float:
    """Replace -inf, the log-probability of an excluded token, because JSON has no infinity."""
    return max(logprob, -9999.0)


def legacy_logprobs(
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    offsets: Sequence[int],
    num_top: int,
    name: Callable[[int], str],
) -> Logprobs:
    """Return log-probabilities in the form of OpenAI's completions; null for the first token of a prompt."""

    def top(token: int, one: TokenLogprob) -> dict[str, float]:
        # The token itself and the most likely ones. Those that share a text with an earlier one are named by their ids.
        found: dict[str, float] = {}
        others = [(other, value) for other, value in one.top[:num_top] if other != token]
        for other, value in [(token, one.logprob), *others]:
            key = name(other)
            found[f"token_id:{other}" if key in found else key] = finite(value)
        return found

    pairs = list(zip(tokens, logprobs, strict=True))
    return {
        "tokens": [name(token) for token in tokens],
        "token_logprobs": [None if one is None else finite(one.logprob) for one in logprobs],
        "top_logprobs": [None if one is None else top(token, one) for token, one in pairs],
        "text_offset": list(offsets),
    }


def vllm_logprobs(
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    num_top: int,
    token_text: Callable[[int], TokenText],
) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of a prompt in vLLM's form: by token id, the prompt's own token first.

    The rank is that among the listed tokens; null for a prompt's token that is less likely than these.
    """

    def listed(token: int, one: TokenLogprob) -> dict[str, Any]:
        ranks = {other: rank for rank, (other, _) in enumerate(one.top[:num_top], 1)}
        values = {token: one.logprob} | dict(one.top[:num_top])
        return {
            str(other): {"logprob": finite(value), "rank": ranks.get(other), "decoded_token": token_text(other).text}
            for other, value in values.items()
        }

    return [None if one is None else listed(token, one) for token, one in zip(tokens, logprobs, strict=True)]


@dataclass(frozen=True)
class EchoedPrompt:
    """The beginning of a completion with `echo`.

    Attributes:
        text: of the prompt, as it was given.
        logprobs: of its tokens; None: none were asked for.
    """

    text: str
    logprobs: Logprobs | None

    @classmethod
    def of(
        cls,
        given: str | Sequence[int],
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob | None] | None,
        num_top: int,
        detokenizer: Detokenizer,
        token_text: Callable[[int], TokenText],
        name: Callable[[int], str],
    ) -> EchoedPrompt:
        """Return the part of a prompt.

        Args:
            given: by the client: text, or token ids, which are decoded with special tokens.
            tokens: of the prompt.
            logprobs: of these; None: not asked for.
            num_top: alternatives to each.
            detokenizer: decodes the ids.
            token_text: returns the text and bytes of a token.
            name: returns what log-probabilities call a token.
        """
        text = given if isinstance(given, str) else detokenizer.decode(given, skip_special_tokens=False)
        if logprobs is None:
            return cls(text, None)
        # Special tokens that the tokenizer has added to a text are not in it.
        lengths = [len(token_text(token).text) for token in tokens]
        offset = min(len(text) - sum(lengths), 0)
        offsets = []
        for length in lengths:
            offsets.append(min(max(offset, 0), len(text)))
            offset += length
        return cls(text, legacy_logprobs(tokens, logprobs, offsets, num_top, name))

    def before(self, text: str, logprobs: Logprobs | None) -> dict[str, Any]:
        """Return the text and the log-probabilities of a choice with the prompt before them."""
        both: Logprobs | None = self.logprobs
        if both is not None and logprobs is not None:
            both = {name: [*values, *logprobs[name]] for name, values in both.items()}
        return {"text": self.text + text, "logprobs": both}
