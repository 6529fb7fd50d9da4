"""What comes out: new tokens while a request runs, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from .._C import RoundCosts
from ..status import FinishReason


@dataclass(slots=True)
class RequestStats:
    """Counts of one request, over rounds that emitted something. The first token, which prefill yields, and that of a
    request that comes back after a retraction, are of none.

    Attributes:
        rounds: target forwards. drafted: candidates verified. accepted: candidates that stayed.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def accept_length(self) -> float:
        """Mean tokens per round, the bonus token included; 1 without speculation, 0 without a round."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """How likely the target held a token, and the tokens it held likeliest at its place, best first.

    They are of the distribution that temperature and filters would be applied to: log-softmax of the model's logits
    with the request's biases and penalties, without stop tokens that `min_new_tokens` rules out.
    """

    logprob: float
    top: list[tuple[int, float]]  # token, log-probability


@dataclass(slots=True)  # one for each request and round: a frozen one takes four times as long to make
class NewTokens:
    """Tokens that a request has gained: of one round, as `on_tokens` receives them, or of all since the last look.

    All tokens of a round but the last were drafted and accepted; the last is the target's own. So is the first of all,
    which stands for a round here.
    """

    index: int  # of the prompt in the list given to `generate` or `submit_many`
    tokens: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None = None  # of the tokens, where they were asked for
    rounds: list[int] = field(default_factory=list)  # how many of the tokens each round gave
    sample: int = 0  # of the prompt's n


@dataclass
class RequestOutput:
    """The result of one request.

    `index` is that of its prompt in the list that was given, `sample` which of its n samples this is. `text` is None
    where the engine has no tokenizer, `seed` where nothing was drawn, `logprobs` (one for each token) where they were
    not asked for. `cached_tokens` of the prompt's began in the prefix cache, and were not prefilled.
    """

    index: int
    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    text: str | None = None
    finish_reason: FinishReason = FinishReason.RUNNING
    stats: RequestStats = field(default_factory=RequestStats)
    seed: int | None = None
    logprobs: list[TokenLogprob] | None = None
    sample: int = 0
    cached_tokens: int = 0


class GenerationError(RuntimeError):
    """The device gave up on some requests (`FinishReason.ERROR`); the others finished.

    `outputs` are the results of all, in the order of the prompts; a failed one has the tokens from before.
    """

    def __init__(self, message: str, outputs: list[RequestOutput]) -> None:
        super().__init__(message)
        self.outputs = outputs


@dataclass(frozen=True)
class EngineStats:
    """What the rounds of an engine took since it was made; `b - a` is what they took from one to the other.

    Attributes:
        rounds, rows: rounds read, but for first ones of requests, and requests in them. retractions: requests that gave
            their slot back for a while.
        prefix_hits: requests that got a slot and began with pages of the prefix cache. cached_tokens: whose rows these
            held, and that were not prefilled.
        host_seconds: the loop's own work: launching rounds and records of commands, reading what rounds did, giving
            back slots, keeping its books. What `wait_seconds` and `prefill_seconds` count is not in it.
        wait_seconds: the loop's waiting for the device.
        prefill_seconds: admitting requests and launching prefill; where a pass is not captured and has more kernels
            than the device's queue has room for, waiting for that.
        emit_seconds: handing out results, by a thread beside the loop.
        device_seconds: rounds on the device, each from its first kernel to its last.
        following_seconds, gap_seconds: of these, the rounds that were launched while the one before was running, with
            nothing in between; and what lay between the two.
        rounds_by_nodes: rounds read, by the nodes that they verified for each request of their batch size: 1 is plain
            decoding, of 1.5 two requests share 3.
        costs: what a round takes, as measured when the engine was made; None where it is not adaptive.
    """

    rounds: int
    rows: int
    retractions: int
    prefix_hits: int
    cached_tokens: int
    host_seconds: float
    wait_seconds: float
    prefill_seconds: float
    emit_seconds: float
    device_seconds: float
    following_seconds: float
    gap_seconds: float
    rounds_by_nodes: dict[float, int]
    costs: RoundCosts | None

    def __sub__(self, before: EngineStats) -> EngineStats:
        rounds = {nodes: count - before.rounds_by_nodes[nodes] for nodes, count in self.rounds_by_nodes.items()}
        counts = [field.name for field in fields(self) if field.name not in ("rounds_by_nodes", "costs")]
        return EngineStats(
            **{name: getattr(self, name) - getattr(before, name) for name in counts},
            rounds_by_nodes=rounds,
            costs=self.costs,
        )

    def _of_a_round(self, seconds: float) -> float:
        return seconds / max(self.rounds, 1)

    @property
    def host_us(self) -> float:
        """The loop's own work for a round, in microseconds."""
        return 1e6 * self._of_a_round(self.host_seconds)

    @property
    def wait_us(self) -> float:
        """The loop's waiting for the device in a round, in microseconds."""
        return 1e6 * self._of_a_round(self.wait_seconds)

    @property
    def emit_us(self) -> float:
        """Handing out the results of a round, in microseconds."""
        return 1e6 * self._of_a_round(self.emit_seconds)

    @property
    def device_ms(self) -> float:
        """A round on the device, in milliseconds."""
        return 1e3 * self._of_a_round(self.device_seconds)

    @property
    def idle(self) -> float | None:
        """The share of its time that the device idles between rounds; None where none followed another at once."""
        busy = self.following_seconds
        return self.gap_seconds / (busy + self.gap_seconds) if busy else None
