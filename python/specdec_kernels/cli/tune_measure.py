"""The measurements behind `specdec tune`."""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from transformers.utils import logging

from .. import __version__
from ..engine import Draft, Engine, RequestStats, SamplingParams
from ..engine.text.prompts import load_tokenizer
from ..engine.tuning import SCHEMA
from ..models.weights.checkpoint import EAGLE, EAGLE3, kind_of, local_folder
from .bench import progress
from .doctor_shifts import KINDS
from .engine_options import options_of as engine_options
from .prompts import read_prompts, with_template, without_template

MOST_PROMPTS = 12  # that small batches take one after the other


class Options(NamedTuple):
    """Of a draft; of none, with num_nodes 1."""

    num_steps: int
    topk: int
    num_nodes: int

    @property
    def name(self) -> str:
        return ", ".join(map(str, self)) if self.num_nodes > 1 else "plain"


@dataclass(frozen=True)
class Row:
    """What one batch size made with one draft.

    Attributes:
        tokens_per_second: of all requests together, prefill left out.
        accept_length: tokens of a request's round. round_ms: of a round of all requests, milliseconds.
    """

    options: Options
    batch: int
    tokens_per_second: float
    accept_length: float
    round_ms: float


@dataclass(frozen=True)
class Measured:
    """All that was measured; `complete` unless time ran out or somebody interrupted. `calibrations`: what the drafts of
    these options had learnt by the end, as `Engine.tuning` has it."""

    model: str
    draft: str
    algorithm: str
    rows: list[Row]
    complete: bool
    calibrations: dict[Options, list[Any]] = field(default_factory=dict)

    @property
    def batches(self) -> list[int]:
        return sorted({row.batch for row in self.rows})

    def plain(self, batch: int) -> float | None:
        """Tokens a second without a draft."""
        plain = (row for row in self.rows if row.batch == batch and row.options.num_nodes == 1)
        return next((row.tokens_per_second for row in plain), None)

    @property
    def recommended(self) -> Options | None:
        """The draft with the best mean over all batches, of logarithms of tokens a second, so that each batch counts
        alike; None where plain decoding has it."""
        of_options: dict[Options, list[float]] = {}
        for row in self.rows:
            of_options.setdefault(row.options, []).append(math.log(row.tokens_per_second))
        whole = {options: sum(logs) for options, logs in of_options.items() if len(logs) == len(self.batches)}
        best = max(whole, key=lambda options: whole[options], default=None)
        return None if best is None or best.num_nodes == 1 else best

    def facts(self) -> dict[str, Any]:
        """What `--out` writes."""
        best = self.recommended
        fastest = (
            max((row for row in self.rows if row.batch == b), key=lambda r: r.tokens_per_second) for b in self.batches
        )
        return {
            "schema": SCHEMA,
            "specdec_kernels": __version__,
            "model": self.model,
            "draft": self.draft,
            "algorithm": self.algorithm,
            "complete": self.complete,
            "recommended": best._asdict() if best else None,
            "fastest_by_batch": [facts_of(row) for row in fastest],
            "measured": [facts_of(row) for row in self.rows],
            "calibrations": self.calibrations.get(best, []) if best else [],
        }


def facts_of(row: Row) -> dict[str, Any]:
    facts = asdict(row)
    return facts | {"options": row.options._asdict()}


def options_of(num_steps: Sequence[int], topk: Sequence[int], nodes: Sequence[int]) -> list[Options]:
    """Plain decoding, then chains, then trees, whose depth and branches give them as many nodes."""
    chains = [Options(steps, 1, steps + 1) for steps in num_steps] if 1 in topk else []
    trees = [
        Options(steps, k, count)
        for k, steps, count in itertools.product(topk, num_steps, nodes)
        if k > 1 and steps + 1 < count <= 1 + k + (steps - 1) * k * k
    ]
    return [Options(0, 1, 1), *chains, *trees]


def measure(args: argparse.Namespace, now: Callable[[], float] = time.monotonic) -> Measured:
    """Every batch with every draft, until `args.seconds` have passed.

    Raises:
        ValueError: no tokenizer; no prompts; sizes of which there are none; what the engine refuses.
        OSError: no such model or file.
    """
    logging.disable_progress_bar()
    end = now() + args.seconds
    tokenizer, reason = load_tokenizer(args.model, None, False)
    if tokenizer is None:
        raise ValueError(f"model is {args.model}, expected one with a tokenizer ({reason})")
    if args.max_new_tokens < 2:
        raise ValueError(f"--max-new-tokens is {args.max_new_tokens}, expected at least 2")
    chat = bool(getattr(tokenizer, "chat_template", None))
    prompts = [
        with_template(prompt, tokenizer) if chat else tokenizer(without_template(prompt))["input_ids"]
        for prompt in read_prompts(args.prompts)
    ]
    folder = local_folder(args.draft, "--draft")
    algorithm = args.algorithm or {EAGLE: "EAGLE", EAGLE3: "EAGLE3"}.get(kind_of(folder), "STANDALONE")
    model: Any = args.model
    drafts = options_of(args.num_steps, args.topk, args.nodes)
    rows: list[Row] = []
    calibrations: dict[Options, list[Any]] = {}

    def engine(options: Options) -> Engine:
        draft: Draft | None = None
        if options.num_nodes > 1:
            draft = KINDS[algorithm](folder, **options._asdict())
        return Engine(model, draft, options=engine_options(args, adaptive=False, num_slots=max(args.batch)))

    complete = False
    try:
        with progress(len(drafts) * len(args.batch)) as advance:
            for options in drafts:
                if now() >= end:
                    break
                with closing(engine(options)) as opened:
                    if not args.kv_dtype:  # a module brings no scales of 8-bit KV along
                        model = opened.target.model
                    for batch in args.batch:
                        if now() >= end:
                            break
                        advance(f"{options.name}, batch {batch}")
                        rows.append(timed(opened, options, batch, prompts, args.max_new_tokens))
                        calibrations[options] = opened.tuning["calibrations"]
            complete = len(rows) == len(drafts) * len(args.batch)
    except KeyboardInterrupt:  # what there is, is kept
        pass
    return Measured(str(args.model), str(args.draft), algorithm, rows, complete, calibrations)


def timed(engine: Engine, options: Options, batch: int, prompts: Sequence[list[int]], max_new_tokens: int) -> Row:
    """So many prompts at once, one wave after the other until MOST_PROMPTS or all have had their turn."""
    waves = -(-min(len(prompts), MOST_PROMPTS) // batch)
    requests = itertools.cycle(prompts)
    engine.generate(list(itertools.islice(prompts, batch)), SamplingParams(4, ignore_eos=True))  # warms up
    before, seconds, outputs = engine.stats(), 0.0, []
    for _ in range(waves):
        wave = list(itertools.islice(requests, batch))
        begin = time.perf_counter()
        outputs += engine.generate(wave, SamplingParams(max_new_tokens, ignore_eos=True))
        seconds += time.perf_counter() - begin
    counts = engine.stats() - before
    seconds -= counts.prefill_seconds
    tokens = sum(len(output.tokens) for output in outputs)
    of_requests = RequestStats(
        rounds=sum(output.stats.rounds for output in outputs),
        accepted=sum(output.stats.accepted for output in outputs),
    )
    return Row(options, batch, tokens / seconds, of_requests.accept_length, 1e3 * seconds / counts.rounds)
