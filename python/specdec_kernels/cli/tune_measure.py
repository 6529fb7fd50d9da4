"""The measurements of `specdec tune`."""

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
from ..models.weights.checkpoint import local_folder
from ..models.weights.model_config import config_of
from .algorithms import (
    BLOCK_ALGORITHMS,
    CHECKPOINT_ALGORITHMS,
    IN_TARGET,
    MODEL_ALGORITHMS,
    UNIONS,
    algorithm_of,
    draft_class,
    make_draft,
    model_part,
)
from .engine_flags import options_of as engine_options
from .progress import progress
from .prompts import read_prompts, with_template, without_template

MAX_PROMPTS = 12  # prompts that small batches generate from, batch after batch


class Options(NamedTuple):
    """Options of a draft, 0 for one that it does not have; num_nodes 1 is plain decoding."""

    num_steps: int
    topk: int
    num_nodes: int

    @property
    def name(self) -> str:
        return ", ".join(str(value) for value in self if value) if self.num_nodes > 1 else "plain"


@dataclass(frozen=True)
class Row:
    """The measurement of one draft at one batch size.

    Attributes:
        tokens_per_second: of all requests together, prefill excluded.
        accept_length: tokens per request and round.
        round_ms: milliseconds of a round of all requests.
    """

    options: Options
    batch: int
    tokens_per_second: float
    accept_length: float
    round_ms: float


@dataclass(frozen=True)
class Measured:
    """All measurements.

    Attributes:
        complete: False if time ran out or the user interrupted.
        calibrations: the learned calibrations of these drafts at the end, as in `Engine.tuning`.
    """

    model: str
    draft: str | None
    algorithm: str
    rows: list[Row]
    complete: bool
    calibrations: dict[Options, list[Any]] = field(default_factory=dict)

    @property
    def batches(self) -> list[int]:
        return sorted({row.batch for row in self.rows})

    def plain(self, batch: int) -> float | None:
        """Return the tokens per second without a draft, None if not measured."""
        plain = (row for row in self.rows if row.batch == batch and row.options.num_nodes == 1)
        return next((row.tokens_per_second for row in plain), None)

    @property
    def recommended(self) -> Options | None:
        """The draft with the best geometric mean of tokens per second over all batch sizes; None: plain decoding wins.

        The geometric mean gives each batch size the same weight.
        """
        of_options: dict[Options, list[float]] = {}
        for row in self.rows:
            of_options.setdefault(row.options, []).append(math.log(row.tokens_per_second))
        whole = {options: sum(logs) for options, logs in of_options.items() if len(logs) == len(self.batches)}
        best = max(whole, key=lambda options: whole[options], default=None)
        return None if best is None or best.num_nodes == 1 else best

    def facts(self) -> dict[str, Any]:
        """Return what `--out` writes."""
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
    """Return a row as JSON."""
    facts = asdict(row)
    return facts | {"options": row.options._asdict()}


def options_of(num_steps: Sequence[int], topk: Sequence[int], nodes: Sequence[int]) -> list[Options]:
    """List plain decoding, then chains, then trees whose depth and branches can fill their nodes."""
    chains = [Options(steps, 1, steps + 1) for steps in num_steps] if 1 in topk else []
    trees = [
        Options(steps, k, count)
        for k, steps, count in itertools.product(topk, num_steps, nodes)
        if k > 1 and steps + 1 < count <= 1 + k + (steps - 1) * k * k
    ]
    return [Options(0, 1, 1), *chains, *trees]


def of_blocks(depth: int, num_steps: Sequence[int], topk: Sequence[int], nodes: Sequence[int]) -> list[Options]:
    """List plain decoding, then chains and trees of a block drafter that yields `depth` positions in one pass.

    A tree has any width: all of its nodes may be of one depth.
    """
    steps = [count for count in num_steps if count <= depth] or [depth]
    chains = [Options(count, 1, count + 1) for count in steps] if 1 in topk else []
    trees = [Options(depth, count, count) for count in nodes if count > 1] if max(topk) > 1 else []
    return [Options(0, 1, 1), *chains, *trees]


def of_unions(drafts: Sequence[Options], nodes: Sequence[int]) -> list[Options]:
    """List drafts of a model in a union with the n-gram index, which gives chains these numbers of nodes."""
    chains = [each for each in drafts if each.topk == 1 and each.num_nodes > 1]
    sized = [chain._replace(num_nodes=count) for chain in chains for count in nodes if count >= chain.num_nodes]
    return [drafts[0], *sized, *(each for each in drafts if each.topk > 1)]


def nodes_alone(nodes: Sequence[int]) -> list[Options]:
    """List plain decoding, then drafts that have no other option than their nodes."""
    return [Options(0, 1, 1), *(Options(0, 0, count) for count in nodes if count > 1)]


def measure(args: argparse.Namespace, now: Callable[[], float] = time.monotonic) -> Measured:
    """Measure every draft at every batch size, until `args.seconds` have passed.

    Raises:
        ValueError: no tokenizer; no prompts; what the engine refuses.
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
    path, nodes = args.speculative_draft_model_path, args.speculative_num_draft_tokens
    folder = None if path is None else local_folder(path, "--speculative-draft-model-path")
    algorithm = args.speculative_algorithm or ("NGRAM" if folder is None else algorithm_of(folder))
    part = model_part(algorithm)
    takes_either = part in IN_TARGET or ":" in algorithm
    if (folder is None) == (part in CHECKPOINT_ALGORITHMS) and not takes_either:
        what, expected = ("missing", "a folder or hub id") if folder is None else (path, "none")
        raise ValueError(f"--speculative-draft-model-path is {what}, expected {expected} for {algorithm}")
    model: Any = args.model
    drafts = nodes_alone(nodes)
    if part in MODEL_ALGORITHMS:
        drafts = options_of(args.speculative_num_steps, args.speculative_eagle_topk, nodes)
    elif part in BLOCK_ALGORITHMS:
        depth = draft_class(part)(folder).needs(config_of(args.model)).accept_width - 1
        drafts = of_blocks(depth, args.speculative_num_steps, args.speculative_eagle_topk, nodes)
    if algorithm in UNIONS:
        drafts = of_unions(drafts, nodes)
    rows: list[Row] = []
    calibrations: dict[Options, list[Any]] = {}

    def engine(options: Options) -> Engine:
        draft: Draft | None = None
        if options.num_nodes > 1:
            given = {name: value for name, value in options._asdict().items() if value}
            draft = make_draft(algorithm, folder, given)
        return Engine(model, draft, options=engine_options(args, adaptive=False, num_slots=max(args.batch)))

    complete = False
    try:
        with progress(len(drafts) * len(args.batch)) as advance:
            for options in drafts:
                if now() >= end:
                    break
                with closing(engine(options)) as opened:
                    # A module has no KV scales of its checkpoint, and other ranks none at all.
                    if not args.kv_cache_dtype and not args.tp:
                        model = opened.target.model
                    for batch in args.batch:
                        if now() >= end:
                            break
                        advance(f"{options.name}, batch {batch}")
                        rows.append(timed(opened, options, batch, prompts, args.max_new_tokens))
                        calibrations[options] = opened.tuning["calibrations"]
            complete = len(rows) == len(drafts) * len(args.batch)
    except KeyboardInterrupt:  # keep what has been measured
        pass
    return Measured(str(args.model), None if path is None else str(path), algorithm, rows, complete, calibrations)


def timed(engine: Engine, options: Options, batch: int, prompts: Sequence[list[int]], max_new_tokens: int) -> Row:
    """Time waves of `batch` prompts, until MAX_PROMPTS or all prompts have been used."""
    waves = -(-min(len(prompts), MAX_PROMPTS) // batch)
    requests = itertools.cycle(prompts)
    engine.generate(list(itertools.islice(prompts, batch)), SamplingParams(4, ignore_eos=True))  # warms up
    engine.core.forget_texts()  # of all batch sizes: they have the same prompts
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
