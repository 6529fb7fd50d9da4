"""One rank decides, the other replays, in one process: both have the same state, bit by bit, whatever requests do."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec_kernels import _C
from specdec_kernels.engine import Draft, Eagle3, Engine, GenerationError, Ngram, SamplingParams, Standalone
from specdec_kernels.tiny import tiny_model
from support.exhaustive import thinned
from support.replayed_engines import replayed, shared_memory, state_of
from support.tiny_checkpoint import held_out

DRAFTS: dict[str, Callable[[], Draft | None]] = {
    "none": lambda: None,
    "ngram": lambda: Ngram(num_nodes=6),
    "tree": lambda: Eagle3(tiny_model("eagle3"), num_steps=4, topk=4, num_nodes=16),
    "drawn": lambda: Eagle3(tiny_model("eagle3"), num_steps=3, topk=1, sampled=True),
    "standalone": lambda: Standalone(tiny_model("target"), num_steps=2, topk=2, num_nodes=5),
}
KINDS: list[dict[str, Any]] = [
    {}, {"temperature": 0.8, "seed": 3}, {"presence_penalty": 0.5}, {"logit_bias": {5: 2.0}}, {"logprobs": 2},
    {"prompt_logprobs": 1}, {"min_new_tokens": 4}, {"priority": -1},
]  # fmt: skip


def expect_same_state(ours: Any, theirs: Any) -> None:
    for (name, mine), other in zip(state_of(ours).items(), state_of(theirs).values(), strict=True):
        assert torch.equal(mine, other), name


@pytest.mark.parametrize("name", thinned(DRAFTS, {"tree"}.__contains__))
def test_replaying_rank_has_the_state_of_rank_0_bit_by_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(name)
    prompts = [prompt[: rng.randint(1, 90)] for prompt in held_out("code")[:10]]
    prompts += prompts[:4]  # found in the prefix cache
    params = [SamplingParams(rng.randint(1, 30), ignore_eos=True, **KINDS[i % len(KINDS)]) for i in range(len(prompts))]
    sizes: dict[str, Any] = {"max_len": 160, "num_slots": 4, "page_size": 8, "num_pages": 40, "prefix_cache": True}
    with replayed(monkeypatch, DRAFTS[name], **sizes) as (engine, follower, ranks, close):
        requests = engine.submit_many(prompts, params)
        for request in requests[::5]:
            request.cancel()
        outputs = [request.result() for request in requests]
        engine.core.forget_texts()
        engine.clear_cache()
        again = engine.generate(prompts[:2], SamplingParams(8, ignore_eos=True))
        close()
        assert not ranks[0].channel.failure
        expect_same_state(engine.core.executor, follower)
    with Engine(tiny_model("target"), DRAFTS[name](), device="cpu", dtype=torch.float32, **sizes) as alone:
        want = alone.generate(prompts[:2], SamplingParams(8, ignore_eos=True))
    assert [output.tokens for output in again] == [output.tokens for output in want]
    assert len(outputs) == len(prompts)


def test_replaying_rank_constrains_without_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    with replayed(monkeypatch, DRAFTS["tree"], max_len=96, num_slots=2, grammars=True) as (engine, follower, _, close):
        (output,) = engine.generate("x", SamplingParams(30, regex="(ab|cd){2,6}"))
        assert output.text is not None and set(output.text) <= set("abcd")
        close()
        expect_same_state(engine.core.executor, follower)


def test_record_longer_than_the_ring_passes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    with replayed(monkeypatch, DRAFTS["none"], capacity=256, max_len=400, num_slots=1) as (engine, follower, _, close):
        engine.generate([list(range(3, 380))], SamplingParams(4, ignore_eos=True))
        close()
        expect_same_state(engine.core.executor, follower)


def test_ranks_that_differ_end_in_the_round_that_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"max_len": 96, "num_slots": 2, "adaptive": False}
    with replayed(monkeypatch, DRAFTS["tree"], **options) as (engine, follower, ranks, _):
        engine.generate([[1, 2, 3]], SamplingParams(4, ignore_eos=True))
        before = int(engine.core.executor.round.rings.num_published)
        with torch.inference_mode():
            follower.target.lm_head.weight.neg_()
        with pytest.raises((RuntimeError, GenerationError)) as raised:
            engine.generate([[1, 2, 3]], SamplingParams(4, ignore_eos=True))
        reason = ranks[1].channel.failure
        assert reason.startswith(f"round {before}: tokens[0] of request 1 (slot 0) is ") and reason in str(raised.value)
        assert " on rank 0 and " in reason and " on rank 1 (process " in reason
        with pytest.raises((RuntimeError, GenerationError), match="expected the same on all ranks"):
            engine.generate([[1, 2, 3]], SamplingParams(4, ignore_eos=True))


def test_exception_of_a_replaying_rank_ends_the_engine_with_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    with replayed(monkeypatch, DRAFTS["none"], max_len=96, num_slots=2) as (engine, follower, _, _):

        def fail(*_: Any) -> None:
            raise OSError("no room on this rank")

        monkeypatch.setattr(follower.passes, "run", fail)
        with pytest.raises((RuntimeError, GenerationError), match=r"(?s)rank 1: .*no room on this rank"):
            engine.generate([[1, 2, 3]], SamplingParams(4, ignore_eos=True))


def test_rank_that_makes_a_call_long_after_another_is_named() -> None:
    sizes = _C.ReplaySizes(num_ranks=2, capacity=4096, depth=2, words=8)
    memory = shared_memory(sizes)
    first, second = (_C.ReplayChannel(memory, sizes, rank) for rank in range(2))
    first.watch(most_delay=1.0)
    second.enter("prefill")
    first.write(b"record", "prefill")
    time.sleep(1.5)
    assert not first.failure  # it has not made the call either
    first.made()
    deadline = time.monotonic() + 20
    while not second.failure and time.monotonic() < deadline:
        time.sleep(0.05)
    assert second.failure == (
        f"rank 1 (process {os.getpid()}) has not finished call 0 (it makes prefill), which rank 0 finished 1 s ago"
    )


@pytest.mark.exhaustive
def test_rank_waits_for_rank_0_until_that_one_watches() -> None:
    sizes = _C.ReplaySizes(num_ranks=3, capacity=4096, depth=2, words=8)
    memory = shared_memory(sizes)
    first, second = (_C.ReplayChannel(memory, sizes, rank) for rank in range(2))
    second.watch()
    time.sleep(10)
    assert not first.failure and not second.failure


def test_ranks_sleep_and_wake_together_and_export_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = SamplingParams(6, ignore_eos=True)
    with replayed(monkeypatch, DRAFTS["none"], max_len=96, num_slots=2) as (engine, follower, _, close):
        before = engine.generate([[1, 2, 3]], greedy)[0].tokens
        engine.sleep()
        engine.wake()
        assert engine.generate([[1, 2, 3]], greedy)[0].tokens == before
        request = engine.submit([1, 2, 3], SamplingParams(80, ignore_eos=True))
        exported = engine.export_request(request)
        assert exported.values["weights"] == engine.weights_checksum()
        close()
        expect_same_state(engine.core.executor, follower)
