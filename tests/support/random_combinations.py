"""Random combinations of targets, drafts, sizes and requests, whose texts and scores are those of plain decoding.

Pools are small. Requests are cancelled, move out of an engine and back, and go on after sleep and updates of weights.
"""

from __future__ import annotations

import functools
import pickle
import random
import re
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specdec_kernels.engine import Draft, Engine, Request, RequestOutput, SamplingParams
from support.block_drafters import CASES as BLOCKS
from support.block_drafters import HIDDEN, write_drafter
from support.hybrid_cases import hybrid_module
from support.latent_cases import latent_module
from support.leaks import expect_nothing_lost
from support.mtp_checkpoints import CASES as MTP_CASES
from support.mtp_checkpoints import write_nemotron_with_mtp, write_target_with_chain, write_target_with_mtp
from support.random_checkpoints import VOCAB, save_random_model
from support.tiny_checkpoint import Comparison

WITH_MTP = [*MTP_CASES, "chain", "nemotron"]
ROUNDOFF = 3e-4  # between logits of passes with other rows
PASSES = 2e-3  # between log-probabilities of such passes


class Targets:
    """Random targets by name, each made once: what an engine loads, and the module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = functools.cache(self._target)
        self.dense = functools.cache(self._dense)
        self.drafter = functools.cache(self._drafter)

    def _target(self, kind: str, name: str, as_wide: bool = False, vocab: int = VOCAB) -> tuple[Any, Any]:
        """Return a target; `as_wide`: as drafters are, and in a folder."""
        if as_wide:
            folder = self.folder / f"{kind} {name} {vocab}"
            sizes = {"hidden_size": HIDDEN, "vocab_size": vocab}
            if kind in ("dense", "experts"):
                save_random_model(folder, name, **sizes)
            else:
                (hybrid_module if kind == "hybrid" else latent_module)(name, **sizes).save_pretrained(folder)
            return folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        if kind != "mtp":
            module = (hybrid_module if kind == "hybrid" else latent_module)(name)
            return module, module
        folder = self.folder / f"mtp {name}"
        writers: dict[str, Callable[[], object]] = {
            "chain": lambda: write_target_with_chain(folder, 3),
            "nemotron": lambda: write_nemotron_with_mtp(folder),
        }
        writers.get(name, lambda: write_target_with_mtp(folder, name))()
        return folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def _dense(self, vocab: int) -> Path:
        return save_random_model(self.folder / f"dense {vocab}", "llama", vocab_size=vocab, num_hidden_layers=2)

    def _drafter(self, name: str, vocab: int, num_layers: int) -> Path:
        layers = [0, max(num_layers - 2, 0)]
        changes: dict[str, Any] = {"num_target_layers": num_layers, "vocab_size": vocab}
        if name.startswith("dspark"):
            changes |= {"target_layer_ids": layers, "mask_token_id": vocab - 1}
        else:
            nested = BLOCKS[name].entries["dflash_config"]
            changes["dflash_config"] = nested | {"target_layer_ids": layers, "mask_token_id": vocab - 1}
        return write_drafter(self.folder / f"{name} {vocab} {num_layers}", name, **changes)


def run_each(seeds: Iterable[int], run: Callable[[random.Random], None]) -> None:
    """Run what each seed draws; a failure names its seed."""
    for seed in seeds:
        try:
            run(random.Random(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@dataclass(frozen=True)
class Combination:
    """A target, a draft for it, and the options of engines.

    Attributes:
        source: of the target, a folder or a module.
        module: the target as transformers runs it.
        draft: which may be opened after it was closed.
        options: of the engine that drafts.
        plain: of them, those of the engine that does not.
        refusals: a regular expression of what the engine may refuse.
        speaks: whether there is a tokenizer, for constraints and stop strings.
        draft_tensors: what updates of weights give each part of the draft.
    """

    source: Any
    module: Any
    draft: Draft | None
    options: dict[str, Any]
    plain: dict[str, Any]
    refusals: str = "batch_invariant is set, expected not with"
    speaks: bool = False
    draft_tensors: Sequence[Any] | None = None

    def open(self, draft: Draft | None, **options: Any) -> Engine:
        model = self.source if isinstance(self.source, Path) else deepcopy(self.source)
        sizes: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "implementation": "native"}
        return Engine(model, draft, **sizes | options)

    def check(self, rng: random.Random) -> None:
        """Compare the outputs of drawn requests with plain decoding."""
        config, options = self.module.config, self.options
        prompts = draw_prompts(rng, config.vocab_size, options["max_len"])
        params = [draw_params(rng, config.vocab_size, self.speaks) for _ in prompts]
        alone = [
            replace(params[i].of_sample(k), n=1, speculation="on")
            for i in range(len(params))
            for k in range(params[i].n)
        ]
        each = [prompt for prompt, asked in zip(prompts, params, strict=True) for _ in range(asked.n)]
        draft = self.draft
        try:
            engine = self.open(draft, **options)
        except ValueError as error:
            assert re.search(self.refusals, str(error)), f"refused with {error}"
            return
        try:
            with self.open(None, num_slots=3, max_len=options["max_len"], adaptive=False, **self.plain) as plain:
                want = plain.generate(each, alone)
            comparison = Comparison(self.module, ROUNDOFF)
            for prompt, output, sampling in zip(each, want, alone, strict=True):
                expect_likeliest(self.module, prompt, output, sampling)
            if rng.random() < 0.5:
                fewest = engine.config.pages.of_slot
                engine.close()
                engine = self.open(draft, **options | {"num_pages": rng.randint(fewest, fewest * 3 // 2)})
            drawn = draft is not None and draft.sampled
            for _ in range(rng.choice([1, 2])):
                outputs, partial = decode(rng, engine, each, alone if rng.random() < 0.3 else params, prompts, self)
                for index, (output, other) in enumerate(zip(outputs, want, strict=True)):
                    if output.tokens and not (alone[index].temperature > 0 and drawn):
                        compare(comparison, output, other, alone[index], index in partial)
                expect_nothing_lost(engine)
                between(rng, engine, self)
            assert len(comparison.near_ties) <= 3
        finally:
            engine.close()

    def update(self, engine: Engine) -> None:
        """Give the engine the weights that it has."""
        is_folder = isinstance(self.source, Path)
        tensors = load_file(self.source / "model.safetensors") if is_folder else dict(self.module.state_dict())
        engine.update_weights(tensors, self.draft_tensors)


def expect_likeliest(module: Any, prompt: list[int], output: RequestOutput, sampling: SamplingParams) -> None:
    """Expect that each token of a greedy text without edits is the module's best, up to roundoff."""
    if sampling.temperature or sampling.edits(len(prompt)) is not None or sampling.stop_token_ids is not None:
        return
    text = list(output.tokens)
    with torch.inference_mode():
        logits = module(torch.tensor([prompt + text]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    lost = logits.max(-1).values - logits[torch.arange(len(text)), text]
    assert float(lost.max()) < 1e-3, f"token {int(lost.argmax())} of plain decoding is not the module's best"


def draw_options(rng: random.Random) -> dict[str, Any]:
    slots = rng.randint(1, 5)
    options: dict[str, Any] = {
        "num_slots": slots,
        "page_size": rng.choice([1, 2, 3, 5, 16, 64]),
        "prefill_chunk": rng.choice([1, 3, 7, 16, 64, 512]),
        "max_len": rng.choice([40, 64, 101, 128]),
        "rounds_in_flight": rng.choice([None, 1, 2, 3]),
        "snapshot_rows": rng.choice([1, 4, 16, 4096]),
        "num_snapshots": rng.choice([None, 1, 2, 7]),
    }
    if rng.random() < 0.15:
        return options | {"batch_invariant": True}
    options |= {"adaptive": rng.choice([None, True, False]), "prefix_cache": rng.choice([None, True, False])}
    if rng.random() < 0.3:
        options["batch_sizes"] = sorted({*rng.sample(range(1, slots + 1), rng.randint(1, slots)), slots})
    return options


def draw_prompts(rng: random.Random, vocab: int, max_len: int) -> list[list[int]]:
    """Return prompts that share beginnings."""
    beginnings = [[rng.randrange(vocab) for _ in range(rng.choice([1, 5, 20, 50]))] for _ in range(3)]
    prompts = []
    for _ in range(rng.randint(3, 8)):
        prompt = rng.choice(beginnings)
        prompt = prompt[: rng.randint(1, len(prompt))] + [
            rng.randrange(vocab) for _ in range(rng.choice([0, 1, 3, 17]))
        ]
        prompts.append((prompt * (99 if rng.random() < 0.1 else 1))[: max_len - 1])
    return prompts


def draw_params(rng: random.Random, vocab: int, speaks: bool = False) -> SamplingParams:
    some: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "logit_bias": {rng.randrange(vocab): 3.0, rng.randrange(vocab): -float("inf")},
        "logprobs": rng.choice([True, 1, 20]),
        "prompt_logprobs": 3,
        "stop_token_ids": [rng.randrange(vocab) for _ in range(rng.choice([1, 16]))],
        "speculation": rng.choice(["off", 2, 3, 300]),
        "n": rng.randint(2, 4),
        "priority": rng.randint(-1, 2),
    }
    if speaks:
        some |= {"regex": rng.choice(["[a-z ]{3,40}", "(yes|no)[0-9]*"]), "stop": rng.choice(["e", ["the", "\n"]])}
    if rng.random() < 0.5:
        some |= {"top_k": rng.choice([1, 3, 50]), "top_p": rng.choice([0.5, 0.9]), "min_p": 0.05}
        drawn = {"temperature": rng.choice([0.3, 0.8, 1.5]), "seed": rng.randrange(1000)}
    else:
        drawn = {}
    chosen = {key: value for key, value in some.items() if rng.random() < 0.2}
    most = rng.choice([1, 2, 3, 9, 20, 100])
    least = rng.choice([0, 0, 0, min(4, most)])
    if "regex" in chosen:
        chosen["stop_token_ids"], least = [rng.randrange(vocab)], 0
    ends = {} if "stop_token_ids" in chosen else {"ignore_eos": True}
    return SamplingParams(most, min_new_tokens=least, **chosen, **ends, **drawn)


def decode(
    rng: random.Random,
    engine: Engine,
    each: list[list[int]],
    params: list[SamplingParams],
    prompts: list[list[int]],
    combination: Combination,
) -> tuple[list[RequestOutput], set[int]]:
    """Return an output for each sample, and which of them were cancelled."""
    if len(params) == len(prompts) and rng.random() < 0.5:
        return engine.generate(prompts, params), set()
    requests: list[Request] = engine.submit_many(prompts if len(params) == len(prompts) else each, params)
    at = rng.randrange(len(requests))
    if rng.random() < 0.5:
        requests[at].cancel()
        return [request.result(timeout=120) for request in requests], {at}
    next(iter(requests[at]), None)
    if rng.random() < 0.3:
        combination.update(engine)
        return [request.result(timeout=120) for request in requests], set()
    try:
        exported = engine.export_request(requests[at])
    except ValueError as error:
        assert "has ended" in str(error)
    else:
        requests[at] = engine.import_request(pickle.loads(pickle.dumps(exported)))
    return [request.result(timeout=120) for request in requests], set()


def compare(
    comparison: Comparison, output: RequestOutput, want: RequestOutput, sampling: SamplingParams, is_partial: bool
) -> None:
    text, other = list(output.tokens), list(want.tokens)
    comparison.check(output.prompt_tokens, text, other, sampling)
    if text != other[: len(text)]:
        return
    assert is_partial or (text, output.finish_reason) == (other, want.finish_reason)
    for ours, theirs in (output.logprobs, want.logprobs), (output.prompt_logprobs, want.prompt_logprobs):
        pairs = zip(ours or [], theirs or [], strict=not is_partial)
        scores = [(a.logprob, b.logprob) for a, b in pairs if a is not None and b is not None]
        assert all(abs(a - b) < PASSES for a, b in scores)


def between(rng: random.Random, engine: Engine, combination: Combination) -> None:
    """Sleep, update weights by the same, clear the cache, or nothing."""
    match rng.randrange(5):
        case 0:
            engine.sleep()
            engine.wake()
        case 1:
            combination.update(engine)
        case 2:
            engine.clear_cache()
        case 3 if isinstance(combination.source, Path) and combination.draft_tensors is not None:
            engine.sleep(2)
            engine.wake()
            combination.update(engine)
