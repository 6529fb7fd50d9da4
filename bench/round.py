"""Whole rounds of the engine, on planted models: what a token costs at a batch size and an accept length.

Tokens are timed as the callback of `Engine.generate` receives them. Counted are rounds in which every request takes
part; the whole run, from the call to its end, is told beside them.

What the host does is a mean over all rounds of the run, those in which requests join and leave included. `host us` is
the time of the loop's thread between its first turn and its last, but for what it waits for the device (`wait us`),
what it takes to launch prefill, and what it hands out results for (`emit us`, with this module's callback): launching
rounds, reading what they did, giving slots away and back. A launch that waits for room in the device's queue counts
as work, and polling as waiting.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from specdec_kernels.engine import Engine, NewTokens, SamplingParams, Speculation
from specdec_kernels.models.planted import PlantedText, plant_causal_lm, plant_eagle3
from specdec_kernels.models.shapes import draft_vocab_of, shape_config
from specdec_kernels.status import FinishReason

from .ceilings import Ceilings
from .harness import Result
from .timing import times_of

NAME = "round"
WARM_UP_TOKENS = 12


@dataclass(frozen=True)
class Drafting:
    """How to draft: the numbers of `Speculation`, of an EAGLE-3 head or a standalone model."""

    name: str
    algorithm: str
    num_steps: int = 0
    topk: int = 1
    num_nodes: int = 1


ALGORITHMS = {
    "none": Drafting("none", "NONE"),
    "chain": Drafting("chain", "EAGLE3", 5, 1, 6),
    "tree": Drafting("tree", "EAGLE3", 5, 10, 32),
    "standalone": Drafting("standalone", "STANDALONE", 5, 1, 6),
}


@dataclass(frozen=True)
class Setup:
    shape: str
    drafting: Drafting
    accept: float
    input: int
    output: int
    device: torch.device
    dtype: torch.dtype
    adaptive: bool = False

    def accept_length(self) -> float:
        return min(self.accept, self.drafting.num_steps + 1)

    def params(self, batch: int) -> dict[str, Any]:
        d = self.drafting
        return {
            "shape": self.shape,
            "algorithm": d.name,
            "batch": batch,
            "num_steps": d.num_steps,
            "topk": d.topk,
            "nodes": d.num_nodes,
            "adaptive": self.adaptive,
            "accept": self.accept_length(),
            "input": self.input,
            "output": self.output,
            "dtype": str(self.dtype).removeprefix("torch."),
        }


@dataclass
class RoundClock:
    """`on_tokens` of a `generate`: groups what arrives into rounds, and notes when each one's first tokens came."""

    batch: int
    began: float = 0.0
    # Noted as it arrives, and looked at afterwards: this counts as handing out.
    arrivals: list[tuple[float, NewTokens]] = field(default_factory=list)

    def __call__(self, new: NewTokens) -> None:
        self.arrivals.append((time.perf_counter(), new))

    def full_rounds(self) -> tuple[list[float], list[int]]:
        """Seconds from one full round to the next, and the tokens of each."""
        starts: list[float] = []
        tokens: list[int] = []
        sizes: list[int] = []
        seen: set[int] = set()
        for at, new in self.arrivals:
            if not starts or new.index in seen:
                starts.append(at)
                tokens.append(0)
                sizes.append(0)
                seen.clear()
            seen.add(new.index)
            tokens[-1] += len(new.tokens)
            # The last round of a request is cut by its budget and counts for no full one.
            sizes[-1] += new.finish_reason == FinishReason.RUNNING
        pairs = [i for i in range(1, len(starts)) if sizes[i - 1] == sizes[i] == self.batch]
        return [starts[i] - starts[i - 1] for i in pairs], [tokens[i] for i in pairs]

    def run(self) -> dict[str, float]:
        """Of the whole run: its tokens a second, and how long requests waited for their first tokens."""
        now = time.perf_counter()
        first_tokens = {new.index: at for at, new in reversed(self.arrivals)}
        waits = sorted(at - self.began for at in first_tokens.values())
        return {
            "run_tokens_per_second": sum(len(new.tokens) for _, new in self.arrivals) / (now - self.began),
            "first_token_ms": 1e3 * waits[len(waits) // 2],
            "last_first_token_ms": 1e3 * waits[-1],
        }


class Bench:
    """An engine on planted models, for batches up to `max_batch`."""

    def __init__(self, setup: Setup, max_batch: int) -> None:
        self.setup = setup
        config = shape_config(setup.shape)
        self.text = PlantedText.of(config.vocab_size, draft_vocab_of(config))
        place = {"device": setup.device, "dtype": setup.dtype}
        self.target = plant_causal_lm(config, self.text, **place)
        self.draft: Any = None
        accept = setup.accept_length()
        if setup.drafting.algorithm == "EAGLE3":
            self.draft = plant_eagle3(self.target, self.text, accept_length=accept)
        elif setup.drafting.algorithm == "STANDALONE":
            small = shape_config("tiny" if setup.shape == "tiny" else "qwen3-0.6b")
            small.vocab_size = config.vocab_size
            self.draft = plant_causal_lm(small, self.text, accept_length=accept, **place)
        self.engine = Engine(
            self.target,
            speculation=speculation(setup.drafting, self.draft, setup.adaptive),
            max_len=setup.input + setup.output + 1,
            num_slots=max_batch,
            device=setup.device,
            dtype=setup.dtype,
        )

    def measure(self, batch: int, ceilings: Ceilings) -> Result:
        setup = self.setup
        self.generate(batch, setup.output if setup.adaptive else WARM_UP_TOKENS, None)  # what drafts bring is learnt
        before, clock = self.engine.stats(), RoundClock(batch, time.perf_counter())
        wrong = self.generate(batch, setup.output, clock)
        run = clock.run()
        stats = self.engine.stats() - before
        if wrong is not None:
            return Result(NAME, setup.params(batch), str(setup.device), error=wrong)
        seconds, tokens = clock.full_rounds()
        if not seconds:
            short = (
                f"no round had all {batch} requests: the first ended before the last began, which takes more --output"
            )
            return Result(NAME, setup.params(batch), str(setup.device), error=short)
        shares = {nodes: count / stats.rounds for nodes, count in stats.rounds_by_nodes.items() if count}
        bytes_moved, flops, floor = self.floor(batch, shares, ceilings)
        facts = {
            "accept_length": sum(tokens) / (len(tokens) * batch),
            "tokens_per_second": sum(tokens) / sum(seconds),
            **run,
        }
        median = times_of(seconds)
        if setup.device.type == "cuda":
            facts |= {
                "gpu_us": stats.device_ms * 1e3,
                "host_us": stats.host_us,
                "emit_us": stats.emit_us,
                "wait_us": stats.wait_us,
            }
            if stats.idle is not None:
                facts["idle"] = stats.idle
        return Result(
            NAME,
            setup.params(batch),
            str(setup.device),
            time=median,
            bytes_moved=bytes_moved,
            flops=flops,
            floor=floor,
            cold=setup.device.type == "cuda",
            facts={name: round(value, 4) for name, value in facts.items()} | {"nodes": nodes_text(shares)},
        )

    def generate(self, batch: int, output: int, on_tokens: Any) -> str | None:
        """A batch of pieces of the text, continued; says what is wrong with the result, if something is."""
        length = self.setup.input
        at = [i * len(self.text.order) // batch for i in range(batch)]
        results = self.engine.generate(
            [self.text.tokens(start, length) for start in at],
            SamplingParams(max_new_tokens=output, ignore_eos=True),
            on_tokens=on_tokens,
        )
        for start, result in zip(at, results, strict=True):
            expected = self.text.tokens(start + length, len(result.tokens))
            if result.tokens != expected:
                first = next(
                    i for i, pair in enumerate(zip(result.tokens, expected, strict=True)) if len(set(pair)) > 1
                )
                return f"request {result.index} strays from the planted text at token {first}"
        return None

    def floor(self, batch: int, shares: dict[int, float], ceilings: Ceilings) -> tuple[int, int, float]:
        """`floor_of`, as a mean of the rounds' numbers of nodes."""
        floors = [[share * value for value in self.floor_of(batch, n, ceilings)] for n, share in shares.items()]
        bytes_moved, flops, seconds = map(sum, zip(*floors, strict=True))
        return round(bytes_moved), round(flops), seconds

    def floor_of(self, batch: int, num_nodes: int, ceilings: Ceilings) -> tuple[int, int, float]:
        """Bytes and flops of a round's forward passes, and the least seconds they could take, pass by pass.

        A pass reads its weights once, and the target's all KV rows; activations and logits are not counted, and of the
        nodes that the target's head multiplies those that walks visit.
        """
        setup, d = self.setup, self.setup.drafting
        item = setup.dtype.itemsize
        config = self.target.config
        rows = setup.input + setup.output // 2
        kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * item * rows * batch
        target_head = weights(self.target.get_output_embeddings())
        visited = math.ceil(batch * min(num_nodes, setup.accept_length()))
        passes = [(weights(self.target) - target_head, batch * num_nodes, kv), (target_head, visited, 0)]
        if self.draft is not None:
            num_steps = min(d.num_steps, num_nodes - 1)
            head = weights(self.draft.lm_head)
            body = weights(self.draft) - head
            fc = weights(self.draft.fc) if hasattr(self.draft, "fc") else 0
            steps = [(body - fc, batch * d.topk, 0), (head, batch * d.topk, 0)] * max(num_steps - 1, 0)
            passes += [*steps, (body, batch * (num_steps + 1), 0), (head, batch, 0)]
        bytes_moved = [n * item + extra for n, _, extra in passes]
        flops = [2 * n * m for n, m, _ in passes]
        floor = sum(
            max(b / ceilings.bytes_per_second, f / ceilings.flops_per_second)
            for b, f in zip(bytes_moved, flops, strict=True)
        )
        return sum(bytes_moved), sum(flops), floor


def nodes_text(shares: dict[int, float]) -> str:
    """What share of the rounds had trees of how many nodes."""
    return ", ".join(f"{nodes}: {share:.0%}" for nodes, share in shares.items())


def speculation(d: Drafting, draft: nn.Module | None, adaptive: bool) -> Speculation:
    if d.algorithm == "NONE":
        return Speculation()
    return Speculation(
        d.algorithm, draft, num_steps=d.num_steps, topk=d.topk, num_draft_tokens=d.num_nodes, adaptive=adaptive
    )


def weights(module: nn.Module) -> int:
    """Numbers that a forward pass reads, the embeddings' few rows left out."""
    embedded = sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Embedding))
    return sum(p.numel() for p in module.parameters()) - embedded


def measure_rounds(setups: Sequence[Setup], batches: Sequence[int], ceilings: Ceilings) -> Iterator[Result]:
    """One result for each setup and batch; a setup's models are gone before the next one's are made."""
    for setup in setups:
        bench = Bench(setup, max(batches))
        for batch in batches:
            yield bench.measure(batch, ceilings)
        del bench
        gc.collect()
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()
