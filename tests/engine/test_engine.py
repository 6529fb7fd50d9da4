"""The engine's text is transformers' own, whatever drafts, however requests are batched and pages laid out."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec_kernels import FinishReason
from specdec_kernels.engine import Draft, Eagle3, Engine, NewTokens, Ngram, SamplingParams, Standalone, Union
from specdec_kernels.engine.device.memory import pages_that_fit
from specdec_kernels.engine.drafts.composition import pools_of
from specdec_kernels.tiny import tiny_model
from support.devices import HAS_CUDA
from support.exhaustive import covering, exhaustive, representative
from support.tiny_checkpoint import Comparison, accept_length, held_out, reference_model, reference_texts, tokenizer

NUM_PROMPTS = 100  # of an exhaustive run
FEW = 10
NEW_TOKENS = 48
TARGET = tiny_model("target")

DRAFTS: dict[str, Callable[[], Draft | None]] = {
    "none": lambda: None,
    "ngram": lambda: Ngram(),
    "eagle3-chain": lambda: Eagle3(tiny_model("eagle3"), num_steps=5, topk=1),
    "eagle3-tree": lambda: Eagle3(tiny_model("eagle3"), num_steps=5, topk=8, num_nodes=32),
    "eagle3+ngram": lambda: Union(
        Eagle3(tiny_model("eagle3"), num_steps=4, topk=4, num_nodes=24), Ngram(num_nodes=24), num_nodes=24
    ),
    # The target as its own draft: every draft is right, so every round is as long as it can be.
    "standalone": lambda: Standalone(TARGET, num_steps=3, topk=2, num_nodes=8),
}
# Slots, page size, pages as a share of what all slots at full length would need (pages are reused in all of them),
# rounds in flight and batch sizes.
LAYOUTS: dict[str, tuple[int, int, float, int, list[int] | None]] = {
    "single": (1, 16, 1.0, 2, None),
    "batched": (8, 16, 1.0, 1, None),
    "page1": (4, 1, 0.5, 3, None),
    "page3": (8, 3, 0.4, 2, [3, 8]),
}
MAX_LEN = 512


def prompts(count: int = FEW) -> list[list[int]]:
    chosen = held_out("code")[:count]
    assert len(chosen) == count
    return chosen


@functools.cache
def reference(count: int = FEW) -> list[list[int]]:
    return reference_texts(prompts(count), NEW_TOKENS)


def make_engine(draft: Draft | None, layout: str, device: torch.device) -> Engine:
    num_slots, page_size, share, rounds_in_flight, batch_sizes = LAYOUTS[layout]
    pages_per_slot = -(-(MAX_LEN + 80) // page_size)
    return Engine(
        TARGET,
        draft=draft,
        adaptive=None if device.type == "cuda" and not isinstance(draft, Standalone) else False,
        max_len=MAX_LEN,
        num_slots=num_slots,
        page_size=page_size,
        num_pages=max(pages_per_slot, int(share * num_slots * pages_per_slot)),
        prefill_chunk=100,
        rounds_in_flight=rounds_in_flight,
        batch_sizes=batch_sizes,
        dtype=torch.float32,
        device=device,
    )


@pytest.mark.parametrize(("name", "layout"), covering(DRAFTS, LAYOUTS))
def test_greedy_text_is_that_of_transformers(
    name: str, layout: str, device: torch.device, request: pytest.FixtureRequest
) -> None:
    engine = make_engine(DRAFTS[name](), layout, device)
    count = NUM_PROMPTS if request.node.get_closest_marker("exhaustive") else FEW
    outputs = engine.generate(prompts(count), SamplingParams(max_new_tokens=NEW_TOKENS))

    comparison = Comparison(reference_model())
    for prompt, output, want in zip(prompts(count), outputs, reference(count), strict=True):
        comparison.check(prompt, output.tokens, want)
    assert len(comparison.near_ties) <= 2, comparison.near_ties
    stats = [output.stats for output in outputs]
    assert all(s.accept_length >= 1 for s in stats if s.rounds)
    assert [s.accepted + s.rounds for s in stats] == [len(o.tokens) - 1 for o in outputs], "but for first tokens"
    if name == "none":
        assert all(s.drafted == 0 and s.accept_length == 1 for s in stats if s.rounds)
    if name == "standalone":
        assert sum(s.accepted for s in stats) / sum(s.rounds for s in stats) > 2.7  # of 3: budgets cut last rounds

    pool = engine.state.pool
    assert int(pool.num_free[0]) == len(pool.free_stack), "pages were lost"
    assert not pool.page_refs.any()


@pytest.mark.parametrize(
    ("name", "kind", "count", "new_tokens", "at_least"),
    [
        *exhaustive(("eagle3-chain", "code", 24, 96, 2.6)),
        ("eagle3-tree", "code", 16, 64, 3.2),
        ("ngram", "repeat", 24, 96, 4.0),
    ],
)
def test_accept_length_on_held_out_prompts(name: str, kind: str, count: int, new_tokens: int, at_least: float) -> None:
    engine = make_engine(DRAFTS[name](), "batched", torch.device("cpu"))
    outputs = engine.generate(held_out(kind)[:count], SamplingParams(max_new_tokens=new_tokens))
    print(f"{name} on {kind}: accept length {accept_length(outputs):.2f}")
    assert accept_length(outputs) >= at_least


@pytest.mark.parametrize("kind", [*exhaustive("code"), "repeat"])
def test_union_accepts_more_than_either_draft(kind: str) -> None:
    lengths = {}
    head = tiny_model("eagle3")
    drafts = {
        "ngram": Ngram(num_nodes=32),
        "eagle3": Eagle3(head),
        "both": Union(Eagle3(head), Ngram(num_nodes=32)),
    }
    for name, draft in drafts.items():
        engine = make_engine(draft, "batched", torch.device("cpu"))
        outputs = engine.generate(held_out(kind)[:5], SamplingParams(max_new_tokens=48, ignore_eos=True))
        lengths[name] = accept_length(outputs)
    assert lengths["both"] >= max(lengths.values()), lengths


def test_stop_tokens_budget_and_context_end_a_request(device: torch.device) -> None:
    engine = make_engine(DRAFTS["eagle3-tree"](), "batched", device)
    prompt, text = prompts()[0], reference()[0]
    stop = text[11]
    params = [
        SamplingParams(max_new_tokens=NEW_TOKENS, stop_token_ids=[stop]),
        SamplingParams(max_new_tokens=1),
        SamplingParams(max_new_tokens=7, ignore_eos=True),
        SamplingParams(max_new_tokens=10_000, ignore_eos=True),
    ]
    stopped, one, seven, endless = engine.generate([prompt] * 4, params)
    assert stopped.tokens == text[: text.index(stop) + 1] and stopped.finish_reason == FinishReason.STOP
    assert one.tokens == text[:1] and one.finish_reason == FinishReason.LENGTH
    assert seven.tokens == text[:7]
    assert len(prompt) + len(endless.tokens) == MAX_LEN and endless.finish_reason == FinishReason.CONTEXT


def test_streaming_gives_the_same_tokens_in_order(device: torch.device) -> None:
    engine = make_engine(DRAFTS["eagle3-tree"](), "batched", device)
    streamed: dict[int, list[int]] = {}
    events: list[NewTokens] = []

    def on_tokens(new: NewTokens) -> None:
        events.append(new)
        streamed.setdefault(new.index, []).extend(new.tokens)

    outputs = engine.generate(prompts(), SamplingParams(max_new_tokens=20), on_tokens=on_tokens)
    assert [streamed[o.index] for o in outputs] == [o.tokens for o in outputs]
    assert [o.index for o in outputs] == list(range(FEW))
    for output in outputs:
        mine = [e for e in events if e.index == output.index]
        assert all(e.finish_reason == FinishReason.RUNNING for e in mine[:-1])
        assert mine[-1].finish_reason == output.finish_reason != FinishReason.RUNNING


def test_a_request_ends_where_on_tokens_says() -> None:
    engine, seen = make_engine(DRAFTS["ngram"](), "batched", torch.device("cpu")), [0] * 4

    def enough(new: NewTokens) -> bool:
        seen[new.index] += len(new.tokens)
        return new.index % 2 == 0 and seen[new.index] >= 5

    outputs = engine.generate(
        prompts()[:4], SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True), on_tokens=enough
    )
    for output, count in zip(outputs, seen, strict=True):
        cancelled = output.index % 2 == 0
        assert output.finish_reason == (FinishReason.CANCELLED if cancelled else FinishReason.LENGTH)
        assert len(output.tokens) == count and 5 <= count <= (40 if cancelled else NEW_TOKENS)
        assert output.tokens == reference()[output.index][:count]
    assert engine.generate(prompts()[:1], SamplingParams(max_new_tokens=4))[0].tokens == reference()[0][:4]


@pytest.mark.parametrize("name", representative(DRAFTS))
def test_engine_one_token_prompts(name: str, device: torch.device) -> None:
    engine = make_engine(DRAFTS[name](), "batched", device)
    starts = [[prompt[0]] for prompt in prompts()[:6]]
    want = reference_texts(starts, 16)
    comparison = Comparison(reference_model())
    for prompt, output, text in zip(starts, engine.generate(starts, SamplingParams(16)), want, strict=True):
        comparison.check(prompt, output.tokens, text)


def test_engine_stats_add_up(device: torch.device) -> None:
    engine = make_engine(DRAFTS["eagle3-chain"](), "batched", device)
    engine.generate(prompts()[:3], SamplingParams(8))
    before = engine.stats()
    outputs = engine.generate(prompts()[:3], SamplingParams(8, ignore_eos=True))
    stats = engine.stats() - before
    assert stats.rows >= sum(o.stats.rounds for o in outputs) and stats.rows / 3 <= stats.rounds <= stats.rows
    assert stats.host_us > 0 and stats.device_ms > 0 and stats.retractions == 0
    assert stats.idle is None or 0 <= stats.idle < 1
    assert sum(stats.rounds_by_nodes.values()) == stats.rounds


def test_text_prompts_and_text_results(device: torch.device) -> None:
    engine = make_engine(DRAFTS["eagle3-chain"](), "single", device)
    (output,) = engine.generate("def main():\n", SamplingParams(max_new_tokens=12))
    assert output.text == tokenizer().decode(output.tokens, skip_special_tokens=True)
    assert output.prompt_tokens == tokenizer()("def main():\n")["input_ids"]


def test_engine_survives_failing_callback(device: torch.device) -> None:
    engine = make_engine(DRAFTS["eagle3-tree"](), "batched", device)

    def fail(_new: NewTokens) -> None:
        raise KeyError("callback")

    with pytest.raises(KeyError, match="callback"):
        engine.generate(prompts()[:12], SamplingParams(max_new_tokens=20), on_tokens=fail)
    outputs = engine.generate(prompts()[:12], SamplingParams(max_new_tokens=20))
    comparison = Comparison(reference_model())
    for prompt, output, want in zip(prompts()[:12], outputs, reference(), strict=False):
        comparison.check(prompt, output.tokens, want)
    assert int(engine.state.pool.num_free[0]) == len(engine.state.pool.free_stack)


@pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")
@pytest.mark.parametrize("name", representative(DRAFTS))
def test_pools_of_a_share_of_the_memory(name: str) -> None:
    """Rounds that were captured with the trial's small pools are captured again with the large ones."""
    sizes = {"max_len": MAX_LEN, "num_slots": 8, "dtype": torch.float32, "device": "cuda"}
    engine = Engine(TARGET, draft=DRAFTS[name](), mem_fraction=0.5, **sizes)  # type: ignore[arg-type]
    pool = engine.state.pool
    assert len(pool.free_stack) == 8 * pool.page_table.shape[1] == engine.target.pools.num_pages
    comparison = Comparison(reference_model())
    outputs = engine.generate(prompts()[:20], SamplingParams(max_new_tokens=NEW_TOKENS))
    for prompt, output, want in zip(prompts(), outputs, reference(), strict=False):
        comparison.check(prompt, output.tokens, want)
    with pytest.raises(ValueError, match=r"Engine: mem_fraction is 1e-05, which leaves room for 0 pages, expected at"):
        Engine(TARGET, draft=DRAFTS[name](), mem_fraction=1e-5, **sizes)  # type: ignore[arg-type]


@pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")
@pytest.mark.parametrize("name", ["none", "eagle3-tree", "standalone"])
def test_a_trial_takes_all_memory_beside_the_pools(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of all sizes and the largest prefill: nothing comes on top when the engine runs."""
    noted: list[int] = []

    def beside_pools(executor: Any) -> int:
        pools = sum(pools.num_bytes for pools in (executor.target.pools, *pools_of(executor.draft)))
        return torch.cuda.memory_reserved() - pools

    def pages(executor: Any, *arguments: Any) -> int:
        fitting = pages_that_fit(executor, *arguments)
        noted.append(beside_pools(executor))
        return fitting

    monkeypatch.setattr("specdec_kernels.engine.startup.pages_that_fit", pages)
    gc.collect()
    torch.cuda.empty_cache()  # blocks that earlier tests left would be reused in part
    engine = Engine(
        TARGET,
        draft=DRAFTS[name](),
        adaptive=True,
        mem_fraction=0.3,
        max_len=MAX_LEN,
        num_slots=24,
        prefill_chunk=2000,
        device="cuda",
    )
    assert engine.graphs and len(engine.graphs.by_size) >= 8
    longest = [(prompt * MAX_LEN)[: MAX_LEN - 30] for prompt in prompts()[:24]]
    engine.generate(longest, SamplingParams(max_new_tokens=20, ignore_eos=True))
    assert beside_pools(engine.core.executor) <= noted[0] + 2**25  # the allocator rounds pools of other sizes otherwise


@pytest.mark.soak
@pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")
@pytest.mark.parametrize("name", ["eagle3-tree", "standalone"])
def test_five_hundred_prompts_are_those_of_plain_decoding(name: str) -> None:
    """With all at once: graphs, rounds in flight, trees, and a pool from which requests are retracted."""
    texts = [prompt[:length] for prompt in held_out("code") for length in (len(prompt), len(prompt) // 2)]
    assert len(texts) >= 500
    params = SamplingParams(max_new_tokens=NEW_TOKENS)
    sizes = {"max_len": MAX_LEN, "num_slots": 32, "dtype": torch.float32, "device": "cuda"}
    want = Engine(TARGET, **sizes).generate(texts, params)  # type: ignore[arg-type]
    engine = Engine(TARGET, draft=DRAFTS[name](), num_pages=120, **sizes)  # type: ignore[arg-type]
    comparison = Comparison(reference_model())
    for prompt, output, plain in zip(texts, engine.generate(texts, params), want, strict=True):
        comparison.check(prompt, output.tokens, plain.tokens)
    stats = engine.stats()
    print(f"{name}: {stats}, {len(comparison.near_ties)} near-ties")
    assert engine.graphs is not None and stats.retractions > 0 and len(comparison.near_ties) <= 5


@pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")
@pytest.mark.parametrize("name", representative(DRAFTS))
def test_engine_without_graphs_keeps_texts(name: str) -> None:
    captured = make_engine(DRAFTS[name](), "page3", torch.device("cuda"))
    assert captured.graphs is not None
    called = Engine(TARGET, draft=DRAFTS[name](), max_len=MAX_LEN, dtype=torch.float32, device="cuda", cuda_graph=False)
    assert called.graphs is None
    comparison = Comparison(reference_model())
    for engine in (captured, called):
        for prompt, output, want in zip(
            prompts()[:20], engine.generate(prompts()[:20], SamplingParams(NEW_TOKENS)), reference(), strict=False
        ):
            comparison.check(prompt, output.tokens, want)
        assert engine.stats().rounds > 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "generate: prompts[1] is empty, expected at least 1 token"),
        ([1] * MAX_LEN, f"generate: prompts[1] has {MAX_LEN} tokens, expected at most {MAX_LEN - 1} (max_len - 1)"),
    ],
)
def test_engine_bad_prompt_starts_nothing(prompt: list[int], message: str) -> None:
    engine = make_engine(DRAFTS["none"](), "batched", torch.device("cpu"))
    with pytest.raises(ValueError) as error:
        engine.generate([prompts()[0], prompt])
    assert str(error.value) == message
    assert engine.generate([prompts()[0]], SamplingParams(2))[0].tokens == reference()[0][:2]


def test_sampling_params_error_messages() -> None:
    with pytest.raises(ValueError, match="Eagle3: topk is 65, expected 1 to 64"):
        Eagle3("x", topk=65)
    with pytest.raises(ValueError, match="SamplingParams: max_new_tokens is 0, expected at least 1"):
        SamplingParams(max_new_tokens=0)
    with pytest.raises(ValueError, match="SamplingParams: ngram_group is -1, expected 0 to 2147483647"):
        SamplingParams(ngram_group=-1)
