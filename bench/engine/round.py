"""Rounds of the engine on synthetic models: the cost of a token at a batch size and an accept length.

Tokens are timed as the callback of `Engine.generate` receives them. Only rounds in which every request takes part are
counted; the whole run, from the call to its end, is reported as well.

A synthetic text has easy and hard stretches, so requests differ. If a batch is small, several batches run one after
another, each from other places of the text, until `REQUESTS` requests have run, or until they have written as much as
the whole text, which is short where a block drafter drafts.

A union with the n-gram index costs what it costs, and accepts what its model does: no request's text repeats what is
drafted.

Host times are means over all rounds of the run, including those in which requests join and leave. `host us` is the time
of the loop's thread in its turns, without waiting for the device (`wait us`) and launching prefill: it launches rounds,
reads results, assigns and frees slots. A launch that waits for room in the device's queue counts as work, polling as
waiting. `emit us` is the time of another thread that hands out results in parallel to the loop.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from specdec_kernels.engine import (
    MTP,
    DFlash,
    Draft,
    DSpark,
    Eagle3,
    Engine,
    NewTokens,
    SamplingParams,
    Standalone,
)
from specdec_kernels.engine.device.round import most_nodes
from specdec_kernels.engine.drafts import Needs
from specdec_kernels.engine.drafts.block import DEFAULT_NUM_NODES as BLOCK_NODES
from specdec_kernels.engine.drafts.block import BlockDraft
from specdec_kernels.engine.drafts.calibrated import CalibratedDraft
from specdec_kernels.engine.drafts.model import DEFAULT_NUM_NODES
from specdec_kernels.engine.drafts.union import Union
from specdec_kernels.models.families import family_of, kv_numbers
from specdec_kernels.models.heads.base import DraftHead
from specdec_kernels.models.heads.block import BlockHead
from specdec_kernels.models.heads.eagle3 import Eagle3Head
from specdec_kernels.models.heads.loading import load_checkpoint
from specdec_kernels.models.heads.mtp import MtpHead, config_of_layers
from specdec_kernels.models.layers.moe import QuantizedExperts
from specdec_kernels.models.layers.quantized import QuantizedLinear
from specdec_kernels.models.shard import WHOLE, Shard
from specdec_kernels.models.state_cache import StateSpec, bytes_of
from specdec_kernels.models.weights.config_entries import NUM_EXPERTS
from specdec_kernels.models.weights.mtp_layouts import NEXTN
from specdec_kernels.parallel.launch import Place
from specdec_kernels.status import FinishReason
from specdec_kernels.synthetic.acceptance import Acceptance, PublishedAcceptance
from specdec_kernels.synthetic.block import (
    block_config,
    block_text_length,
    save_block_drafter,
    shapes_of,
    synthetic_block,
)
from specdec_kernels.synthetic.models import (
    SyntheticText,
    eagle3_config,
    synthetic_causal_lm,
    synthetic_eagle3,
    write_text,
)
from specdec_kernels.synthetic.mtp import num_mtp_layers, synthetic_mtp_heads
from specdec_kernels.synthetic.shapes import draft_vocab_of, shape_config

from ..ops.ceilings import Ceilings
from ..ops.harness import Result
from ..ops.stored_weights import store_layers
from ..ops.timing import times_of
from ..sizes import WITH_NGRAMS, ngram_groups, setting_of, sized_draft
from .kernels import RoundProfile, profile_rounds

NAME = "round"
WARM_UP_TOKENS = 12
PROFILED_TOKENS = 24
REQUESTS = 8  # requests of a measurement at least, if their accept lengths differ
PAGE_SIZE = 16
HEADS: dict[Any, Callable[..., Any]] = {Eagle3: synthetic_eagle3, MTP: synthetic_mtp_heads}
BLOCK_KINDS: dict[Any, Literal["dspark", "dflash"]] = {DSpark: "dspark", DFlash: "dflash"}
STORABLE: tuple[Any, ...] = Eagle3, *BLOCK_KINDS  # whose weights may be stored in 8 bits
BLOCK_LAYERS, BLOCK_STEPS, MARKOV_RANK = 5, 7, 256  # of published block drafters
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Drafting:
    """A draft: one of the package's with a synthetic model, one of another class, or none."""

    name: str
    kind: type[Eagle3 | MTP | Standalone | DSpark | DFlash] | None  # whose synthetic model drafts
    num_steps: int = 0
    topk: int = 1
    num_nodes: int = 1
    adaptive: bool = False  # choose the number of nodes in each round
    make: Callable[[Any], Draft] | None = None  # of a class of one's own, from the model of `kind`, else from None
    scratch_rows: int = 0  # KV rows that it writes after the committed ones
    with_ngrams: bool = False  # in a union with the n-gram index

    @property
    def accepts_by_itself(self) -> bool:
        """Whether its acceptance is not the one of a synthetic model."""
        return self.make is not None and self.kind is None

    @property
    def block_size(self) -> int:
        """The rows of a block drafter's block, for `BLOCK_STEPS` drafts or for more; 0: of another drafter."""
        if self.kind not in BLOCK_KINDS:
            return 0
        return max(self.num_steps, BLOCK_STEPS) + (0 if self.kind is DSpark else 1)

    @property
    def drafter(self) -> str:
        """The published drafter whose acceptance it has by default."""
        return "mtp" if self.kind is MTP else BLOCK_KINDS.get(self.kind, "eagle3")


ALGORITHMS = {
    "none": Drafting("none", None),
    "chain": Drafting("chain", Eagle3, 5, 1, 6),
    "tree": Drafting("tree", Eagle3, 5, 10, 32),
    "mtp_chain": Drafting("mtp_chain", MTP, 3, 1, 4),
    "mtp_tree": Drafting("mtp_tree", MTP, 4, 4, 16),
    "mtp_adaptive": Drafting("mtp_adaptive", MTP, 4, 4, 16, adaptive=True),
    "standalone": Drafting("standalone", Standalone, 5, 1, 6),
    "dspark_chain": Drafting("dspark_chain", DSpark, BLOCK_STEPS, 1, BLOCK_STEPS + 1),
    "dspark_tree": Drafting("dspark_tree", DSpark, BLOCK_STEPS, BLOCK_NODES, BLOCK_NODES),
    "dspark_adaptive": Drafting("dspark_adaptive", DSpark, BLOCK_STEPS, BLOCK_NODES, BLOCK_NODES, adaptive=True),
    "dflash_chain": Drafting("dflash_chain", DFlash, BLOCK_STEPS, 1, BLOCK_STEPS + 1),
    "dflash_tree": Drafting("dflash_tree", DFlash, BLOCK_STEPS, BLOCK_NODES, BLOCK_NODES),
    # The engine's defaults.
    "adaptive": Drafting("adaptive", Eagle3, Eagle3.num_steps, Eagle3.topk, DEFAULT_NUM_NODES, adaptive=True),
}


def drafting_of(algorithm: str) -> Drafting:
    """Return one of `ALGORITHMS`, or a chain or tree with a number of nodes, `chain4`, `mtp_tree8`, `dspark_tree16`.

    With `+ngram` at the end it is a union with the n-gram index.
    """
    drafting = setting_of(ALGORITHMS, algorithm)
    return replace(drafting, name=drafting.name + WITH_NGRAMS) if drafting.with_ngrams else drafting


def own_drafting(name: str, shape: str, own_class: Any, make: Callable[[Any], Draft], checkpoint: Any) -> Drafting:
    """Return the drafting of a class of one's own, with the sizes that it needs.

    Without a checkpoint a class that inherits from `Eagle3` or `Standalone` gets the synthetic model of that kind.

    Raises:
        ValueError: no draft; what `make` and `needs` refuse.
    """
    kinds = [k for k in (Eagle3, MTP, Standalone) if isinstance(own_class, type) and issubclass(own_class, k)]
    kind = kinds[0] if kinds and checkpoint is None else None
    draft = make(checkpoint if kind is None else meta_draft(kind, shape))
    if not isinstance(draft, Draft):
        raise ValueError(f"--speculative-algorithm is {name}, expected module:Class of a Draft")
    needs = draft.needs(shape_config(shape))
    return Drafting(
        name,
        kind,
        num_steps=needs.accept_width - 1,
        topk=getattr(draft, "topk", 1),
        num_nodes=needs.num_nodes,
        make=lambda model: make(checkpoint if kind is None else model),
        scratch_rows=needs.scratch_rows,
    )


@dataclass(frozen=True)
class Setup:
    """A model, its drafts and the sizes of requests."""

    shape: str
    drafting: Drafting
    acceptance: Acceptance
    input: int
    output: int
    device: torch.device
    dtype: torch.dtype
    max_len: int | None = None  # longest sequence of the engine; None: what a request needs
    weights: str | None = None  # how the target's layers are stored, one of `STORED`; None: in dtype
    draft_weights: str | None = None  # how the draft's are, "fp8" or "fp8-head"; None: in dtype
    implementation: str = "native"  # backend of the target
    cuda_graph: bool = True
    custom_all_reduce: bool = True
    profile: bool = False  # also time the kernels of a round by name
    place: Place | None = None  # of this process among the ranks; None: it is alone

    def __post_init__(self) -> None:
        if self.draft_weights is not None and self.drafting.kind not in (None, *STORABLE):
            raise ValueError(f"--draft-weights is {self.draft_weights}, expected none with {self.drafting.name}")
        if self.weights == "int4" and hasattr(shape_config(self.shape), "num_experts"):
            raise ValueError(f"--weights is int4, expected fp8 or fp8-rows with --shape {self.shape}, a MoE model")
        most = num_mtp_layers(shape_config(self.shape))
        if self.drafting.kind is MTP and 1 < most < self.drafting.num_steps:
            raise ValueError(
                f"--speculative-num-steps is {self.drafting.num_steps} with {self.drafting.name}, expected at most "
                f"{most} with --shape {self.shape}, whose MTP layers draft one step each"
            )
        if self.max_len is not None and self.max_len < self.needed_len:
            raise ValueError(
                f"--max-len is {self.max_len}, expected at least {self.needed_len}, the tokens of prompt and output"
            )

    @property
    def shard(self) -> Shard:
        return WHOLE if self.place is None else self.place.shard

    @property
    def needed_len(self) -> int:
        return self.input + self.output + 1

    @property
    def engine_len(self) -> int:
        return self.max_len or self.needed_len

    def num_pages(self, num_slots: int) -> int:
        """Return the pages that `num_slots` requests need, and at least those of the longest sequence."""
        d = self.drafting
        # Rows that a round writes at most.
        grown = 0 if d.block_size else d.topk * d.num_steps + 1
        written = max(d.num_nodes, d.num_steps + 1, grown, d.block_size, d.scratch_rows) + 1
        return max(
            num_slots * -(-(self.needed_len + written) // PAGE_SIZE), -(-(self.engine_len + written) // PAGE_SIZE)
        )

    def params(self, batch: int) -> dict[str, Any]:
        """Return the parameters of a result."""
        d = self.drafting
        return {
            "shape": self.shape,
            "algorithm": d.name,
            "batch": batch,
            "num_steps": d.num_steps,
            "topk": d.topk,
            "nodes": d.num_nodes,
            "adaptive": d.adaptive,
            **({"block": d.block_size} if d.block_size else {}),
            "accept": "its own" if d.accepts_by_itself else self.acceptance.name if d.num_steps else 1,
            "input": self.input,
            "output": self.output,
            "max_len": self.engine_len,
            "dtype": str(self.dtype).removeprefix("torch."),
            **({} if self.weights is None else {"weights": self.weights}),
            **({} if self.draft_weights is None or not d.kind else {"draft_weights": self.draft_weights}),
            **({} if self.implementation == "native" else {"implementation": self.implementation}),
            **({} if self.cuda_graph else {"cuda_graph": False}),
            **({} if self.place is None else {"tp": self.place.size, "custom_all_reduce": self.custom_all_reduce}),
        }


@dataclass
class RoundClock:
    """`on_tokens` of a `generate`: groups tokens into rounds by the time at which they arrive."""

    batch: int
    began: float = 0.0
    ended: float = 0.0
    # Stored on arrival and analyzed later, since the callback is part of what is timed.
    arrivals: list[tuple[float, NewTokens]] = field(default_factory=list)

    def end(self) -> None:
        """End the run."""
        self.ended = time.perf_counter()

    def __call__(self, new: NewTokens) -> None:
        self.arrivals.append((time.perf_counter(), new))

    def full_rounds(self) -> tuple[list[float], list[int]]:
        """Return the seconds from one full round to the next, and the tokens of each."""
        starts: list[float] = []
        tokens: list[int] = []
        sizes: list[int] = []
        seen: set[int] = set()
        known: set[int] = set()  # requests with a first token
        for at, new in self.arrivals:
            if not starts or new.index in seen:
                starts.append(at)
                tokens.append(0)
                sizes.append(0)
                seen.clear()
            seen.add(new.index)
            tokens[-1] += len(new.tokens)
            # A request's last round, cut by its token limit, is not full, nor is a first token, which prefill yields.
            sizes[-1] += new.finish_reason == FinishReason.RUNNING and new.index in known
            known.add(new.index)
        # The time after a first token includes a prefill, and its round starts inside a stretch of right drafts; all
        # others start after one.
        pairs = [i for i in range(1, len(starts)) if sizes[i - 1] == sizes[i] == self.batch]
        return [starts[i] - starts[i - 1] for i in pairs], [tokens[i] for i in pairs]

    def accept_lengths(self) -> list[float]:
        """Return the mean tokens per round of each request, without its first two rounds and the last.

        The last round is cut by the token limit.
        """
        rounds: dict[int, list[int]] = {}
        for _, new in self.arrivals:
            rounds.setdefault(new.index, []).append(len(new.tokens))
        return [sum(whole) / len(whole) for whole in (tokens[2:-1] for tokens in rounds.values()) if whole]

    def run(self) -> dict[str, float]:
        """Return throughput of the whole run, and how long requests waited for their first tokens."""
        first_tokens = {new.index: at for at, new in reversed(self.arrivals)}
        waits = sorted(at - self.began for at in first_tokens.values())
        return {
            "run_tokens_per_second": sum(len(new.tokens) for _, new in self.arrivals) / (self.ended - self.began),
            "first_token_ms": 1e3 * waits[len(waits) // 2],
            "last_first_token_ms": 1e3 * waits[-1],
        }


class SharedParts(NamedTuple):
    """The parts of the target that a block drafter shares."""

    config: Any
    embedding: nn.Embedding
    lm_head: nn.Linear


class SyntheticModels:
    """A text, a target that continues it, and drafts for it.

    Block drafters draft short texts: the target changes its text where a setup needs another.
    """

    def __init__(self, setup: Setup) -> None:
        self._config = shape_config(setup.shape)
        self.text = self._text_of(setup)
        self._place: dict[str, Any] = {"device": setup.device, "dtype": setup.dtype}
        self.target = synthetic_causal_lm(self._config, self.text, **self._place)
        if setup.weights is not None:
            store_layers(self.target, setup.weights)
        self._draft: tuple[Any, Any] = None, None

    def _text_of(self, setup: Setup) -> SyntheticText:
        length = block_text_length(self._config) if setup.drafting.block_size else draft_vocab_of(self._config)
        return SyntheticText.of(self._config.vocab_size, length)

    def use(self, setup: Setup) -> None:
        """Let the target continue the text that a setup's draft needs."""
        text = self._text_of(setup)
        if len(text.order) != len(self.text.order):
            self._draft, self.text = (None, None), text
            write_text(self.target, text)

    def draft(self, setup: Setup) -> Any:
        """Return a draft model of the setup's kind and acceptance; the last one is cached."""
        kind = setup.drafting.kind
        if kind is None:
            return None
        key = kind, setup.drafting.block_size, setup.acceptance
        if self._draft[0] != key:
            self._draft = None, None
            self._draft = key, self._make_draft(setup)
        return self._draft[1]

    def _make_draft(self, setup: Setup) -> Any:
        kind = setup.drafting.kind
        if kind in HEADS:
            return HEADS[kind](self.target, self.text, setup.acceptance)
        if kind is not None and issubclass(kind, BlockDraft):
            parts = synthetic_block(
                self.target,
                self.text,
                setup.acceptance,
                BLOCK_KINDS[kind],
                block_size=setup.drafting.block_size,
                num_layers=BLOCK_LAYERS,
                rank=MARKOV_RANK,
            )
            shared = SharedParts(
                self.target.config, self.target.get_input_embeddings(), self.target.get_output_embeddings()
            )
            with TemporaryDirectory(prefix="specdec-bench-") as folder:
                return load_checkpoint(kind.kind, save_block_drafter(*parts, Path(folder)), shared)
        small = standalone_config(setup.shape)
        return synthetic_causal_lm(small, self.text, acceptance=setup.acceptance, **self._place)


class Bench:
    """An engine on synthetic models, for batches up to `max_batch`."""

    def __init__(self, setup: Setup, max_batch: int, models: SyntheticModels | None = None) -> None:
        self.setup = setup
        models = models or SyntheticModels(setup)
        models.use(setup)
        self.text, self.target, self.draft = models.text, models.target, models.draft(setup)
        self.engine = Engine(
            self.target,
            draft=draft_of(setup, self.draft),
            implementation=setup.implementation,
            cuda_graph=setup.cuda_graph,
            adaptive=setup.drafting.adaptive,
            max_len=setup.engine_len,
            num_slots=max_batch,
            num_pages=setup.num_pages(max_batch),
            page_size=PAGE_SIZE,
            device=setup.device,
            dtype=setup.dtype,
            tp=setup.shard.size,
            custom_all_reduce=setup.custom_all_reduce,
        )
        self._groups = ngram_groups(setup.drafting)
        draft = self.engine.draft.first if isinstance(self.engine.draft, Union) else self.engine.draft
        if isinstance(draft, CalibratedDraft) and (setup.drafting.block_size or setup.draft_weights is not None):
            self.draft = draft.loaded  # as it is stored

    def measure(self, batch: int, ceilings: Ceilings) -> Result:
        """Measure a batch size."""
        setup = self.setup
        shape: dict[str, Any] = {"op": NAME, "params": setup.params(batch), "device": str(setup.device)}
        # An adaptive engine learns acceptance and costs in a long warm-up.
        self.generate(batch, 0, setup.output if setup.drafting.adaptive else WARM_UP_TOKENS, None)
        drafts, by_itself = setup.drafting.num_steps > 0, setup.drafting.accepts_by_itself
        if by_itself:
            self.engine.core.forget_texts()  # of the warm-up and of other batch sizes
        requests_differ = drafts and (by_itself or isinstance(setup.acceptance, PublishedAcceptance))
        waves = self.waves(batch) if requests_differ else 1
        before, clocks = self.engine.stats(), []
        with nothing_collected():
            for wave in range(waves):
                clocks.append(RoundClock(batch, time.perf_counter()))
                wrong = self.generate(batch, wave, setup.output, clocks[-1])
                if wrong is not None:
                    return Result(**shape, error=wrong)
                clocks[-1].end()
        stats = self.engine.stats() - before
        seconds, tokens = (
            list(chain.from_iterable(lists)) for lists in zip(*(c.full_rounds() for c in clocks), strict=True)
        )
        if not seconds:
            few = (
                f"no round had all {batch} requests: the first ended before the last began, expected a larger --output"
            )
            return Result(**shape, skipped=few)
        shares = {nodes: count / stats.rounds for nodes, count in stats.rounds_by_nodes.items() if count}
        accept_length = sum(tokens) / (len(tokens) * batch)
        moved = self.moved(batch, accept_length, shares, ceilings)
        facts = {
            "accept_length": accept_length,
            "weight_bytes": moved.weights,
            "kv_bytes": moved.kv,
            **({} if not moved.states else {"state_bytes": moved.states, "scratch_share": self.scratch_share}),
            **(accept_spread([length for clock in clocks for length in clock.accept_lengths()]) if drafts else {}),
            "tokens_per_second": sum(tokens) / sum(seconds),
            **{name: median([run[name] for run in map(RoundClock.run, clocks)]) for name in clocks[0].run()},
        }
        if setup.device.type == "cuda":
            facts |= {
                "gpu_us": stats.device_ms * 1e3,
                "host_us": stats.host_us,
                "emit_us": stats.emit_us,
                "wait_us": stats.wait_us,
            }
            if stats.idle is not None:
                facts["idle"] = stats.idle
            if (graphs := self.engine.graphs) is not None:
                facts |= {"graphs": graphs.count, "capture_seconds": graphs.seconds}
        return Result(
            **shape,
            time=times_of(seconds),
            bytes_moved=round(moved.nbytes),
            flops=round(moved.flops),
            floor=moved.seconds,
            cold=setup.device.type == "cuda",
            facts={name: round(value, 4) for name, value in facts.items()} | {"nodes": nodes_text(shares)},
            profile=self.profile(batch),
        )

    def waves(self, batch: int) -> int:
        """Return the batches after which `REQUESTS` requests have run, or all of a text that is shorter than theirs."""
        whole_text = -(-len(self.text.order) // (batch * self.setup.output))
        return min(-(-REQUESTS // batch), whole_text)

    def profile(self, batch: int) -> RoundProfile | None:
        """Return the kernels of the most common round of a batch, if the setup asks for them."""
        if not self.setup.profile:
            return None
        return profile_rounds(lambda: self.generate(batch, 0, min(PROFILED_TOKENS, self.setup.output), None))

    def generate(self, batch: int, wave: int, output: int, on_tokens: Any) -> str | None:
        """Continue a batch of pieces of the text; return what is wrong with the result, None for nothing.

        Each wave's pieces are from the middle of the longest stretches that earlier waves left out.
        """
        length, whole = self.setup.input, len(self.text.order)
        at = [int(whole * (i + GOLDEN * wave % 1) / batch) for i in range(batch)]
        # The n-gram index of a union finds nothing: a request knows its own text alone, which repeats late or never.
        groups = islice(self._groups, batch)
        params = [SamplingParams(max_new_tokens=output, ignore_eos=True, ngram_group=group) for group in groups]
        results = self.engine.generate([self.text.tokens(start, length) for start in at], params, on_tokens=on_tokens)
        for start, result in zip(at, results, strict=True):
            expected = self.text.tokens(start + length, len(result.tokens))
            if result.tokens != expected:
                first = next(
                    i for i, pair in enumerate(zip(result.tokens, expected, strict=True)) if len(set(pair)) > 1
                )
                return f"request {result.index} differs from the synthetic text at token {first}"
        return None

    def moved(self, batch: int, accept_length: float, shares: dict[float, float], ceilings: Ceilings) -> Moved:
        """Return what rounds must move and multiply, as a mean over rounds by their numbers of nodes."""
        total = Moved()
        for num_nodes, share in shares.items():
            for each in self.passes(batch, accept_length, num_nodes):
                total += each.moved(ceilings).scaled(share)
        return total

    def passes(self, batch: int, accept_length: float, num_nodes: float) -> list[Pass]:
        """Return the forward passes of a round.

        A pass reads its weights once, and all KV rows. The target's pass reads and writes the recurrent states, too.
        Activations and logits are not counted, and the target's head counts only for nodes that verification visits.
        """
        setup, d = self.setup, self.setup.drafting
        states = 2 * batch * sum(spec.nbytes for spec in self.state_specs)
        target_head = weights(self.target.get_output_embeddings())
        visited = math.ceil(batch * min(num_nodes, accept_length))
        num_rows = round(batch * num_nodes)
        kv = self.kv_bytes(self.target, batch, setup.shard)
        passes = [Pass(weights(self.target, num_rows) - target_head, num_rows, kv, states), Pass(target_head, visited)]
        if isinstance(self.draft, BlockHead):
            return passes + (self.block_passes(batch) if num_nodes > 1 else [])
        if self.draft is not None and num_nodes > 1:
            needs = Needs(num_nodes=d.num_nodes, accept_width=d.num_steps + 1, num_steps=d.num_steps)
            num_steps = min(d.num_steps, most_nodes(batch, num_rows, needs) - 1)
            layers = self.draft[: d.num_steps] if isinstance(self.draft, tuple) else (self.draft,)
            read = [self.draft_weights(layer, batch * d.topk) for layer in layers]
            kv = sum(self.kv_bytes(layer, batch) for layer in layers)
            for step in range(1, num_steps):
                # Rows of a chain pass the layer that drafts the step, and those after it.
                ran = read[step:] or read
                body = sum((each.body - each.committed for each in ran), Weights())
                passes += [
                    Pass(body, batch * d.topk, kv * len(ran) // len(read)),
                    Pass(ran[0].lm_head, batch * d.topk),
                ]
            body = sum((each.body for each in read), Weights())
            passes += [Pass(body, batch * (num_steps + 1), kv), Pass(read[0].lm_head, batch)]
        return passes

    def draft_weights(self, model: Any, num_rows: int) -> DraftWeights:
        """Return the weights of a draft model, with the experts that `num_rows` rows select."""
        own = model.lm if isinstance(model, MtpHead) else model
        body = weights(model, num_rows) - weights(own.lm_head)
        lm_head = weights(own.lm_head) if self.setup.draft_weights is None else logits_weights(model)
        return DraftWeights(body, lm_head, weights(model.fc) if isinstance(model, Eagle3Head) else Weights())

    def block_passes(self, batch: int) -> list[Pass]:
        """Return the forward passes of a block drafter: the block's, its LM head's, and the injection's.

        The rows of a serial head's tables that candidates gather are not counted.
        """
        head, d = self.draft, self.setup.drafting
        body, lm_head = weights(head.layers), logits_weights(head)
        injected = weights(head.fc)
        for layer in head.layers:
            injected += weights(layer.self_attn.k_proj) + weights(layer.self_attn.v_proj)
        kv = self.kv_bytes(head, batch)
        return [
            Pass(body, batch * d.block_size, kv),
            Pass(lm_head, batch * d.num_steps),
            Pass(injected, batch * (d.num_steps + 1)),
        ]

    def kv_bytes(self, model: Any, batch: int, shard: Shard = WHOLE) -> int:
        """Return the bytes of the KV that all layers of a model read for a batch, on the rank of a shard."""
        length, item = self.setup.input + self.setup.output // 2, self.setup.dtype.itemsize
        if isinstance(model, BlockHead):
            return batch * length * kv_numbers(model.config, len(model.layers)) * item
        config = shard.config(model.config)
        family = family_of(config)
        windows = [family.window(layer) or length for layer in range(family.num_kv_layers)]
        return batch * sum(min(length, window) for window in windows) * kv_numbers(config, 1) * item

    @property
    def state_specs(self) -> list[StateSpec]:
        """The states of the target's recurrent layers for each request, on this rank."""
        return family_of(self.setup.shard.config(self.target.config)).state_specs(self.setup.dtype)

    @property
    def scratch_share(self) -> float:
        """The records of recurrent layers, as a share of a copy of a request's states for each node."""
        specs, num_nodes = self.state_specs, self.setup.drafting.num_nodes
        states = sum(spec.nbytes for spec in specs)
        return (sum(bytes_of(spec, 1, num_nodes) for spec in specs) - states) / (num_nodes * states)


@dataclass(frozen=True)
class Moved:
    """Bytes that passes read and write at least, their flops, and the least seconds that these take."""

    weights: float = 0
    kv: float = 0
    states: float = 0
    flops: float = 0
    seconds: float = 0

    @property
    def nbytes(self) -> float:
        return self.weights + self.kv + self.states

    def __add__(self, other: Moved) -> Moved:
        return Moved(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def scaled(self, share: float) -> Moved:
        """Return all values multiplied by `share`."""
        return Moved(*(share * value for value in astuple(self)))


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Freeze the garbage collector's objects, as a server does: a collection takes a quarter of a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def accept_spread(lengths: list[float]) -> dict[str, float]:
    """Return the first and last decile of requests' accept lengths; nothing for a single request."""
    if len(lengths) < 2:
        return {}
    tenths = quantiles(lengths, n=10, method="inclusive")
    return {"accept_length_p10": tenths[0], "accept_length_p90": tenths[-1]}


def nodes_text(shares: dict[float, float]) -> str:
    """Return the shares of rounds by mean nodes per request, as text."""
    return ", ".join(f"{nodes:.3g}: {share:.0%}" for nodes, share in shares.items())


def draft_of(setup: Setup, model: Any) -> Draft | None:
    """Return the draft, None for plain decoding."""
    d = setup.drafting
    if d.make is not None:
        return d.make(model)
    if d.kind is None:
        return None
    options: dict[str, Any] = {} if setup.draft_weights is None else {"draft_weights": setup.draft_weights}
    return sized_draft(d, d.kind, model, **options)


@dataclass(frozen=True)
class Weights:
    """Weights that a forward pass reads: elements and bytes."""

    elements: int = 0
    nbytes: int = 0

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.elements + other.elements, self.nbytes + other.nbytes)

    def __sub__(self, other: Weights) -> Weights:
        return Weights(self.elements - other.elements, self.nbytes - other.nbytes)


class DraftWeights(NamedTuple):
    """Weights of a draft model, whose `body` has those that committed rows alone are multiplied with."""

    body: Weights
    lm_head: Weights
    committed: Weights


@dataclass(frozen=True)
class Pass:
    """A forward pass: the weights that it reads, its rows, and the bytes of KV and states that it moves."""

    read: Weights
    num_rows: int
    kv: int = 0
    states: int = 0

    def moved(self, ceilings: Ceilings) -> Moved:
        """Return what the pass moves, and its time if it were limited by memory or by arithmetic alone."""
        flops = 2 * self.read.elements * self.num_rows
        nbytes = self.read.nbytes + self.kv + self.states
        seconds = max(nbytes / ceilings.bytes_per_second, flops / ceilings.flops_per_second)
        return Moved(self.read.nbytes, self.kv, self.states, flops, seconds)


def weights(module: nn.Module, num_rows: int | None = None) -> Weights:
    """Return the weights of all linear layers and norms, without embeddings, whose reads are negligible.

    With `num_rows`, experts count as the elements that each row is multiplied with, and the bytes of the experts that
    the rows are expected to select if routing is uniform. None: all experts.
    """
    total = Weights()
    for part in module.modules():
        if isinstance(part, QuantizedLinear):
            total += Weights(math.prod(part.weight.shape), part.weight.nbytes)
        if isinstance(part, QuantizedExperts):
            total += selected(module, Weights(part.numel(), part.nbytes), num_rows)
        if not isinstance(part, nn.Embedding):
            for p in part.parameters(recurse=False):
                mine = Weights(p.numel(), p.nbytes)
                is_experts = p.ndim == 3 and not isinstance(part, nn.Conv1d)
                total += selected(module, mine, num_rows) if is_experts else mine
    return total


def logits_weights(head: DraftHead) -> Weights:
    """Return the weights of a draft's LM head, which may be a copy of the target's."""
    weight = head.logits_weight
    return Weights(math.prod(weight.shape), weight.nbytes)


def selected(module: Any, experts: Weights, num_rows: int | None) -> Weights:
    """Return what `num_rows` rows read of a layer's experts."""
    if num_rows is None:
        return experts
    count = next(getattr(module.config, name) for name in NUM_EXPERTS if hasattr(module.config, name))
    share = module.config.num_experts_per_tok / count
    return Weights(round(experts.elements * share), round(experts.nbytes * (1 - (1 - share) ** num_rows)))


def memory_needed(setup: Setup, max_batch: int) -> int:
    """Return the bytes of weights and KV, plus a tenth for everything else; allocates nothing.

    The checkpoint of a draft of one's own is not counted. Each rank makes the whole models; on a CPU they share memory.
    """
    config = shape_config(setup.shape)
    item = setup.dtype.itemsize
    kind, elements, kv_width = setup.drafting.kind, 0, 0
    with torch.device("meta"):
        models: list[Any] = [AutoModelForCausalLM.from_config(config)]
    if kind in BLOCK_KINDS:
        name = BLOCK_KINDS[kind]
        entries = block_config(config, name, setup.drafting.block_size, BLOCK_LAYERS, 0, MARKOV_RANK)
        elements += sum(map(math.prod, shapes_of(entries, name).values()))
        kv_width += 2 * BLOCK_LAYERS * entries["num_key_value_heads"] * entries["head_dim"]
    elif kind is not None:
        draft = meta_draft(kind, setup.shape)
        models += draft if isinstance(draft, tuple) else [draft]
    kv_width += sum(kv_numbers(m.config, family_of(m.config).num_kv_layers) for m in models)
    states = sum(bytes_of(s, max_batch, setup.drafting.num_nodes) for s in family_of(config).state_specs(setup.dtype))
    # A head shares the target's embeddings.
    shared = [0, *(m.embed_tokens.weight.numel() for m in models[1:] if isinstance(m, Eagle3Head))]
    elements += sum(p.numel() for m in models for p in m.parameters()) - sum(shared)
    elements += setup.num_pages(max_batch) * PAGE_SIZE * kv_width
    models_here = setup.shard.size if setup.device.type == "cpu" else 1
    return int(1.1 * models_here * (item * elements + states))


def meta_draft(kind: Any, shape: str) -> nn.Module | tuple[MtpHead, ...]:
    """Return the draft model of a shape without memory for its weights, or those of a chain."""
    config = shape_config(shape)
    with torch.device("meta"):
        if kind is Eagle3:
            return Eagle3Head(eagle3_config(config), 3, draft_vocab_of(config))
        if kind is MTP:
            heads = tuple(meta_mtp_head(config, index) for index in range(num_mtp_layers(config)))
            return heads if len(heads) > 1 else heads[0]
        model: nn.Module = AutoModelForCausalLM.from_config(standalone_config(shape))
        return model


def meta_mtp_head(config: Any, index: int) -> MtpHead:
    has_experts = any(hasattr(config, name) for name in NUM_EXPERTS)
    lm: Any = AutoModelForCausalLM.from_config(config_of_layers(config, index, has_experts=has_experts))
    lm.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    return MtpHead(lm, NEXTN, "")


def free_memory(device: torch.device) -> int:
    """Return the free bytes, as the driver or the system estimates them."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux: all memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def standalone_config(shape: str) -> Any:
    """Return the config of the small model that drafts for a shape."""
    config = shape_config("tiny" if shape.startswith("tiny") else "qwen3-0.6b")
    config.vocab_size = shape_config(shape).vocab_size
    return config


def measure_rounds(setups: Sequence[Setup], batches: Sequence[int], ceilings: Ceilings) -> Iterator[Result]:
    """Yield a result for each batch and setup, all of one target on one device, one engine after another."""
    models = SyntheticModels(setups[0])
    for setup in setups:
        bench = Bench(setup, max(batches), models)
        for batch in batches:
            yield bench.measure(batch, ceilings)
        bench.engine.close()
        del bench
        gc.collect()
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()
