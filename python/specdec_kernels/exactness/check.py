"""Send the same requests to two servers, compare the answers, and judge what differs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from .answers import Answer
from .cases import BEGUN, BOTH, FEATURES, IDS, Case, Limits, make_case
from .client import Failed, Refused, Unreachable
from .judge import Finding, Judge, Suspect, mismatches_of
from .questions import DIFFERENCE, STREAM, Question, attempt
from .shrink import reproduce
from .sides import (
    Probe,
    Side,
    continues_ids,
    logit_step,
    measured_limits,
    noise_bodies,
    noise_of,
    probe,
    returns_ids,
)

LEAST_LIMIT, MOST_LIMIT = 1e-3, 0.5  # of logits that rounding may exchange
NOISE_FACTOR = 4.0
STEP_FACTOR = 16.0
MOST_ERRORS = 20  # answers that failed on one side, after which a run ends
DEFAULT_CONTEXT = 2048


@dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
        requests: number of requests; a conversation counts as one.
        seed: what requests are drawn from, with their index.
        concurrency: requests that run at the same time.
        max_tokens: tokens of most answers.
        context: tokens of prompt and answer; None: as the servers say.
        long_prompt: tokens of the longest prompts.
        limit: the largest margin between logits that rounding explains; None: measured.
        shrink: differences whose smallest request is looked for.
        only: indices to send; None: all.
        skip: features to leave out.
    """

    requests: int = 500
    seed: int = 1
    concurrency: int = 8
    max_tokens: int = 32
    context: int | None = None
    long_prompt: int = 1500
    limit: float | None = None
    shrink: int = 8
    only: Sequence[int] | None = None
    skip: Collection[str] = ()


@dataclass
class Counts:
    """Pairs of answers of one feature."""

    pairs: int = 0
    equal: int = 0
    rounding: int = 0
    differences: int = 0


@dataclass
class Result:
    """The findings of a run.

    Attributes:
        limit: the largest margin that rounding explains.
        pairs: compared answers; a conversation has several.
        texts: compared choices.
        tokens: completion tokens of the reference, as far as it counts them.
        counts: by feature.
        refused: messages of requests that both refused, and how many.
        failed: requests that failed on both sides, and their messages.
        complete: false: the run ended early.
    """

    probe: Probe
    limit: float
    pairs: int = 0
    texts: int = 0
    tokens: int = 0
    counts: dict[str, Counts] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    complete: bool = True

    def of_kind(self, *kinds: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind in kinds]

    @property
    def is_exact(self) -> bool:
        return not self.of_kind(DIFFERENCE, STREAM) and not self.probe.one_sided and not self.failed


class Run:
    """A run against two servers.

    Args:
        ours: the server under test.
        theirs: the reference, which may be the same server with other fields.
        options: see `Options`.
        notify: called with what is done now, once for each request.
    """

    def __init__(
        self, ours: Side, theirs: Side, options: Options, notify: Callable[[str], None] = lambda _: None
    ) -> None:
        self.ours, self.theirs, self.options, self._notify = ours, theirs, options, notify
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._suspects: list[Suspect] = []
        self._questions: dict[int, Question] = {}
        self._errors = 0

    def run(self) -> Result:
        """Send all requests, and judge what differs.

        Raises:
            Unreachable: a server does not accept connections.
            ValueError: the servers share no endpoint.
        """
        begun = time.monotonic()
        result = self._prepare()
        indices = range(self.options.requests) if self.options.only is None else self.options.only
        with ThreadPoolExecutor(self.options.concurrency) as clients:
            for done in [clients.submit(self._run_case, result, index) for index in indices]:
                try:
                    done.result()
                except BaseException as error:
                    running = ", ".join(map(str, sorted(self._running)))
                    clients.shutdown(cancel_futures=True)
                    if isinstance(error, Unreachable):
                        raise Unreachable(f"{error}, while requests {running} ran") from error
                    raise
        self._judge(result)
        result.seconds = time.monotonic() - begun
        return result

    def _prepare(self) -> Result:
        """Find out what the servers know, how long texts may be, and how much the reference rounds."""
        options = self.options
        contexts = [options.context] if options.context else [side.context for side in (self.ours, self.theirs)]
        context = min([length for length in contexts if length], default=DEFAULT_CONTEXT)
        guess = Limits(context, min(options.max_tokens, context // 8), {}, options.long_prompt)
        self._notify("asking what the servers know")
        wanted = [name for name in FEATURES if name not in options.skip]
        found = probe(self.ours, self.theirs, guess, wanted, options.concurrency)
        paths = [path for path in BOTH[::-1] if path in found.usable]
        found.has_ids = IDS not in options.skip and all(returns_ids(side, paths) for side in (self.ours, self.theirs))
        if found.has_ids:
            self.ours, self.theirs = replace(self.ours, gives_ids=True), replace(self.theirs, gives_ids=True)
            if BEGUN not in options.skip and all(continues_ids(side, paths) for side in (self.ours, self.theirs)):
                found.usable.add(BEGUN)
        found.limits = measured_limits(self.theirs, guess, paths[0])
        limit = options.limit
        if limit is None:
            if "logprobs" in found.usable:
                self._measure_rounding(found)
                # A seed's draw is a place in the cumulative distribution, which any rounded logit moves. How far it
                # is from the other token can be asked where token ids give the exact text before it.
                if found.step is not None and "seeded" in found.usable and not found.has_ids:
                    found.usable.discard("seeded")
                    found.skipped["seeded"] = f"logits have steps of {found.step:g}, and rounding decides draws"
            measured = max(NOISE_FACTOR * (found.noise or 0.0), STEP_FACTOR * (found.step or 0.0))
            limit = min(max(measured, LEAST_LIMIT), MOST_LIMIT)
        return Result(found, limit)

    def _measure_rounding(self, found: Probe) -> None:
        """Measure the distance between log-probabilities of the reference alone and under load, and their step."""
        self._notify("measuring the reference's rounding")
        bodies = noise_bodies(found.limits, self.options.seed, found.usable)

        def ask(one: tuple[str, dict[str, object]]) -> Answer | None:
            try:
                return self.theirs.ask(*one)
            except (Refused, Failed):
                return None

        alone = [ask(one) for one in bodies]
        with ThreadPoolExecutor(len(bodies)) as clients:
            loaded = list(clients.map(ask, bodies))
        pairs = [(a, b) for a, b in zip(alone, loaded, strict=True) if a is not None and b is not None]
        found.noise = noise_of([a for a, _ in pairs], [b for _, b in pairs])
        found.step = logit_step([a for a, _ in pairs])

    # --- requests

    def _run_case(self, result: Result, index: int) -> None:
        """Send a request, or all of a conversation, to both servers."""
        if self._errors >= MOST_ERRORS:
            result.complete = False
            return
        case = make_case(self.options.seed, index, result.probe.limits, result.probe.usable)
        with self._lock:
            self._running.add(index)
        neighbors: set[int] = set()
        try:
            question = Question(case.path, case.body, case.stream, case.leaves_after, case.depth)
            self._questions[index] = question
            for turn in range(len(case.turns) + 1):
                neighbors |= self._running
                answer = self._compare(result, case, turn, question, neighbors)
                if answer is None or turn == len(case.turns):
                    break
                said = {"role": "assistant", "content": answer.choices[0].text}
                then = {"role": "user", "content": case.turns[turn]}
                question = question.with_fields(messages=[*question.body["messages"], said, then])
        finally:
            with self._lock:
                self._running.discard(index)
            self._notify("comparing answers")

    def _compare(self, result: Result, case: Case, turn: int, question: Question, neighbors: set[int]) -> Answer | None:
        """Ask both servers, count the result, and return the reference's answer."""
        asks = [lambda: question.to_ours(self.ours), lambda: question.to_theirs(self.theirs)]
        order = -1 if case.index % 2 else 1  # either side meets a cold cache as often as a warm one
        outcomes = [attempt(ask) for ask in asks[::order]][::order]
        ours, theirs = outcomes
        mismatches = mismatches_of(ours, theirs, result.limit)
        neighbors |= self._running
        with self._lock:
            self._errors += any(isinstance(outcome, Failed) for outcome in outcomes)
            if isinstance(ours, Exception) and isinstance(theirs, Exception):
                counted = result.refused if isinstance(theirs, Refused) else result.failed
                counted[str(theirs)] = counted.get(str(theirs), 0) + 1
                return None
            answer, wanted = (None if isinstance(outcome, Exception) else outcome for outcome in outcomes)
            result.pairs += 1
            result.texts += len(wanted.choices) if wanted else 1
            result.tokens += wanted.usage[1] if wanted and wanted.usage else 0
            for name in case.features:
                counts = result.counts.setdefault(name, Counts())
                counts.pairs += 1
                counts.equal += not mismatches
            if mismatches:
                others = tuple(sorted(neighbors - {case.index}))
                self._suspects.append(Suspect(case, turn, question, answer, wanted, mismatches, others))
        return wanted

    # --- what differs

    def _judge(self, result: Result) -> None:
        """Judge all suspects: by margins together, since bfloat16 has many near ties, then the others one at a time.

        The servers are idle but for the one that is judged then, so what "alone" says of it is true.
        """
        judge = Judge(self.ours, self.theirs, result.limit, result.probe.usable, self._questions)
        shrunk = 0
        suspects = sorted(self._suspects, key=lambda suspect: (suspect.case.index, suspect.turn))
        self._notify(f"asking {len(suspects)} requests again")
        with ThreadPoolExecutor(self.options.concurrency) as clients:
            explained = list(clients.map(judge.explained, suspects))
        for suspect, known in zip(suspects, explained, strict=True):
            self._notify(f"asking request {suspect.case.index} again")
            finding = known or judge.judge(suspect)
            if finding.kind == DIFFERENCE:
                self._notify(f"looking for the smallest request like {suspect.case.index}")
                reproduce(judge, finding, shrink=shrunk < self.options.shrink)
                shrunk += 1
            result.findings.append(finding)
            for name in suspect.case.features:
                counts = result.counts[name]
                is_rounding = finding.kind not in (DIFFERENCE, STREAM)
                counts.rounding += is_rounding
                counts.differences += not is_rounding
