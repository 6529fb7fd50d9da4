"""What comes out: new tokens while a request runs, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..status import FinishReason


@dataclass
class RequestStats:
    """Counts of one request, over rounds that emitted something.

    Attributes:
        rounds: target forwards. drafted: candidates verified. accepted: candidates that stayed.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def accept_length(self) -> float:
        """Mean tokens per round, the bonus token included; 1 without speculation."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class NewTokens:
    """One round's tokens of one request, as the streaming callback receives them.

    All but the last were drafted and accepted; the last is the target's own.
    """

    index: int  # of the prompt in the list given to `generate`
    tokens: list[int]
    finish_reason: FinishReason


@dataclass
class RequestOutput:
    """The result of one request. `text` is None where the engine has no tokenizer, `seed` where nothing was drawn."""

    index: int
    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    text: str | None = None
    finish_reason: FinishReason = FinishReason.RUNNING
    stats: RequestStats = field(default_factory=RequestStats)
    seed: int | None = None


class GenerationError(RuntimeError):
    """The device gave up on some requests (`FinishReason.ERROR`); the others finished.

    `outputs` are the results of all, in the order of the prompts; a failed one has the tokens from before.
    """

    def __init__(self, message: str, outputs: list[RequestOutput]) -> None:
        super().__init__(message)
        self.outputs = outputs


@dataclass(frozen=True)
class EngineStats:
    """What the rounds of an engine took since it was made.

    Attributes:
        rounds, rows: rounds read, and requests in them. retractions: requests that gave their slot back for a while.
        host_us: the loop's own work per round, in microseconds, without waiting and without prefill.
        device_ms: a round on the device, from its first kernel to its last.
        idle: share of its time that the device idled between rounds, over those that were launched while the round
            before was running, with nothing in between; None where there were none.
    """

    rounds: int
    rows: int
    retractions: int
    host_us: float
    device_ms: float
    idle: float | None
