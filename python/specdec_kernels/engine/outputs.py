"""Results of requests: new tokens while one runs, and its output."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..status import FinishReason


@dataclass(slots=True)
class RequestStats:
    """Counts over the rounds of a request that emitted tokens.

    Excludes the first token, which prefill yields, and the first one after a retraction.

    Attributes:
        rounds: target forward passes. drafted: draft tokens verified. accepted: draft tokens accepted.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def accept_length(self) -> float:
        """Return the mean tokens per round, bonus token included; 1 without speculation, 0 without a round."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token, and the most likely tokens at its position, best first.

    The distribution is the log-softmax of the model's logits after logit bias and penalties, without stop tokens that
    `min_new_tokens` rules out, and before temperature and filters. For a token of the prompt it is that of the model's
    own logits.
    """

    logprob: float
    top: list[tuple[int, float]]  # token, log-probability


@dataclass(slots=True)  # made for each request and round: a frozen dataclass takes four times as long to make
class NewTokens:
    """New tokens of a request: of one round for `on_tokens`, of all rounds since the last look in an iteration.

    All tokens of a round but the last are accepted draft tokens; the last is the target's own. The very first token of
    a request counts as a round of its own here. Tokens of `SamplingParams.generated_token_ids` come with it.
    """

    index: int  # of the prompt in the list given to `generate` or `submit_many`
    tokens: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None = None  # one for each token that was generated; None: not requested
    rounds: list[int] = field(default_factory=list)  # tokens generated in each round
    sample: int = 0  # among the n samples of the prompt


@dataclass
class RequestOutput:
    """The result of one request.

    Attributes:
        index: of its prompt in the list that was given. sample: among the n samples of the prompt.
        prompt_tokens, tokens: token ids; a stop token is the last of `tokens`, and `SamplingParams.generated_token_ids`
            are the first.
        text: what `tokens` add to the text of the prompt, without special tokens; None without a tokenizer.
        seed: of the draws; None for greedy decoding.
        logprobs: one for each token after `SamplingParams.generated_token_ids`; None if not requested.
        prompt_logprobs: one for each token of the prompt, None for the first; None if not requested, or if the request
            ended before its prompt was prefilled.
        cached_tokens: prompt tokens whose KV came from the prefix cache.
    """

    index: int
    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    text: str | None = None
    finish_reason: FinishReason = FinishReason.RUNNING
    stats: RequestStats = field(default_factory=RequestStats)
    seed: int | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    sample: int = 0
    cached_tokens: int = 0


class GenerationError(RuntimeError):
    """Raised if the device gave up on some requests (`FinishReason.ERROR`); the others finished.

    `outputs` are the results of all requests, in the order of the prompts. A failed one has the tokens up to then.
    """

    def __init__(self, message: str, outputs: list[RequestOutput]) -> None:
        super().__init__(message)
        self.outputs = outputs
