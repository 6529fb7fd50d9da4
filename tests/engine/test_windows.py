"""Pages below sliding windows are given back.

Which page tables there are, equal texts in pools that are too small for all pages, and no page lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

from specdec_kernels import FinishReason
from specdec_kernels.engine import Draft, Eagle3, Engine, NewTokens, Ngram, SamplingParams, Standalone, Union
from specdec_kernels.engine.config import PagePlan
from specdec_kernels.models.backends import native
from specdec_kernels.models.families import Mistral
from specdec_kernels.synthetic.acceptance import EvenAcceptance
from specdec_kernels.synthetic.models import SyntheticText, synthetic_eagle3
from support.exhaustive import covering, exhaustive, thinned
from support.tiny_checkpoint import Comparison, greedy_by_transformers
from support.tiny_random_models import NATIVE, VOCAB, tiny_model
from support.window_models import MODELS, SIZES, WINDOW, model_of, random_texts


def small() -> Any:
    return tiny_model("mistral", seed=1, num_hidden_layers=1, **SIZES | NATIVE)


DRAFTS: dict[str, Callable[[], Draft | None]] = {
    "none": lambda: None,
    "ngram": lambda: Ngram(num_nodes=7),
    "standalone": lambda: Standalone(small(), num_steps=3, topk=3, num_nodes=8),
    "union": lambda: Union(Ngram(num_nodes=4), Standalone(small(), num_steps=2, topk=2, num_nodes=5), num_nodes=8),
}


def engine_of(model: Any, draft: Draft | None, device: torch.device, **options: Any) -> Engine:
    given = {"max_len": 400, "num_slots": 2, "page_size": 4, "prefill_chunk": 20, "adaptive": False}
    return Engine(model, draft=draft, dtype=torch.float32, device=device, **given | options)


def all_pools(engine: Engine) -> list[Any]:
    return [engine.state.pool, *engine.state.window_pools.values()]


def assert_all_free(engine: Engine) -> None:
    engine.generate([[5]], SamplingParams(1))  # whose record gives back what the requests before it had
    held = [int((pool.page_refs > 0).sum()) for pool in all_pools(engine)]
    # At most the last request's own slot is held still, until another record is sent.
    of_slots = [(pool.page_counts - pool.page_starts).sum().item() for pool in all_pools(engine)]
    assert held == of_slots and all(count <= 5 for count in held)
    for pool in all_pools(engine):
        assert int(pool.num_free) == len(pool.free_stack) - int((pool.page_refs > 0).sum())


# --- which tables there are


@pytest.mark.parametrize(
    ("windows", "want"),
    [
        ({None}, (None, 100, ())),
        ({64}, (64, 14, ())),  # 64 + 40 rows are 13 pages of 8, and one more where the first is used in part
        ({64, None}, (None, 100, ((64, 42),))),
        ({64, 100, 300}, (300, 44, ((64, 42), (100, 57)))),
        ({64, 752}, (None, 100, ((64, 42),))),  # a slot with a window so wide has pages for all of a text
        ({64, 744}, (744, 99, ((64, 42),))),
    ],
)
def test_window_plan_pages(windows: set[int | None], want: tuple[int | None, int, tuple[tuple[int, int], ...]]) -> None:
    assert PagePlan.of(windows, 40, 100, 8, 3) == want


def plan_of(model: Any, draft: Draft | None = None, **options: Any) -> PagePlan:
    with engine_of(model, draft, torch.device("cpu"), **options) as engine:
        pools = engine.target.pools
        assert engine.config.num_pages == len(engine.state.pool.free_stack) == pools.num_pages
        assert list(engine.state.window_pools) == list(pools.window_pages)
        for group in pools.groups:
            table = engine.state.pool if group.window is None else engine.state.window_pools[group.window]
            assert group.pools[0].shape[1] == len(table.free_stack)
        return engine.config.pages


def test_engine_window_page_tables() -> None:
    # 16 + 20 rows are 9 pages of 4, and one more.
    assert plan_of(model_of("all")) == (16, 10, ())
    assert plan_of(model_of("all"), Ngram(num_nodes=30)) == (16, 13, ()), "a tree has more rows than a chunk"
    assert plan_of(model_of("all"), DRAFTS["standalone"]()) == (None, 103, ((16, 20),)), "the draft's layers see all"
    assert plan_of(model_of("mixed")) == (None, 101, ((16, 20),))
    assert plan_of(model_of("all"), prefill_chunk=2048) == (None, 101, ()), "a chunk has pages for all rows of a text"
    # What transformers' modules see is known when they run.
    for name in MODELS:
        assert plan_of(model_of(name), implementation="transformers") == (None, 101, ((16, 20),))
    plain = tiny_model("llama", **NATIVE)
    assert plan_of(plain) == plan_of(plain, implementation="transformers") == (None, 101, ())


def test_window_pool_is_no_larger_than_full_pool() -> None:
    with engine_of(model_of("mixed"), None, torch.device("cpu"), num_slots=30, num_pages=103) as engine:
        assert engine.config.pages.windows == ((16, 300),)
        assert [len(pool.free_stack) for pool in all_pools(engine)] == [103, 103]
        pools = engine.target.pools
        for pages in (7, 103, 299, 301, 400):
            assert pools.bytes_with(pages) == pools.with_pages(pages).num_bytes
        assert pools.bytes_with(400) - pools.bytes_with(300) == 100 * pools.bytes_with(1) // 4, "one of four layers"


@pytest.mark.parametrize("name", MODELS)
def test_prefix_cache_keeps_pages_outside_window(name: str) -> None:
    """Where it is asked for by name; "wherever it costs nothing" is not there, but with a window no text goes beyond."""
    cpu = torch.device("cpu")
    for asked, max_len, kept in ((True, 400, True), (None, 400, False), (False, 400, False), (None, 16, True)):
        with engine_of(model_of(name), None, cpu, prefix_cache=asked, max_len=max_len) as engine:
            pages = engine.config.pages
            assert (engine.config.prefix_cache, pages.gives_back) == (kept, max_len == 400 and not kept)


def test_window_with_too_few_pages_is_refused() -> None:
    with pytest.raises(ValueError) as error:
        engine_of(model_of("all"), None, torch.device("cpu"), num_pages=9)
    assert str(error.value) == (
        "Engine: num_pages is 9, expected at least 10 (a window of 16 rows of one request and 20 rows more must fit)"
    )


def test_wrong_window_of_family_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    family = Mistral.attention

    def attention(self: Any, *arguments: Any) -> Any:
        made = family(self, *arguments)
        made.window = None
        return made

    monkeypatch.setattr(Mistral, "attention", attention)
    monkeypatch.setattr(native, "check_against_module", lambda *_: None)  # finds it, too
    with pytest.raises(ValueError) as error:
        engine_of(model_of("all"), None, torch.device("cpu"))
    assert str(error.value) == "model: layer 0 has window=None, expected at most 16 (by the family's `window`)"


# --- texts


def expect_texts_of_transformers(name: str, draft: str, implementation: str, device: torch.device) -> None:
    """Prompts and outputs many windows long, in pools that windows alone fit into."""
    model = model_of(name)
    prompts = random_texts(150, 3, 30)
    prompts[2] *= 3  # there is something to find
    with engine_of(deepcopy(model), DRAFTS[draft](), device, implementation=implementation) as engine:
        outputs = engine.generate(prompts, SamplingParams(70))
        assert_all_free(engine)
    comparison = Comparison(model)
    for prompt, output in zip(prompts, outputs, strict=True):
        want = greedy_by_transformers(model, [prompt], 70)[0]
        comparison.check(prompt, output.tokens, want)
        assert len(output.tokens) == 70
    assert len(comparison.near_ties) <= 1


@pytest.mark.parametrize(("name", "draft"), covering(MODELS, DRAFTS))
def test_native_text_beyond_window_equals_reference(name: str, draft: str, device: torch.device) -> None:
    expect_texts_of_transformers(name, draft, "native", device)


@pytest.mark.parametrize("name", thinned(MODELS, ("mixed", "sinks").__contains__))
def test_transformers_text_beyond_window_equals_reference(name: str, device: torch.device) -> None:
    expect_texts_of_transformers(name, "union", "transformers", device)


@pytest.mark.usefixtures("measured_costs")
@pytest.mark.parametrize("adaptive", [False, True])
def test_head_attends_beyond_window(adaptive: bool, device: torch.device) -> None:
    """Its pages stay, also where it rests and catches up; those of the target's layers come back."""
    model, plain = model_of("all"), model_of("all")  # the head takes along what it shares with its target
    head = synthetic_eagle3(model, SyntheticText.of(VOCAB, VOCAB), EvenAcceptance())
    prompts = random_texts(150, 3, 90)
    draft = Eagle3(head, num_steps=3, topk=3, num_nodes=9)
    with engine_of(deepcopy(model), draft, device, adaptive=adaptive) as engine:
        assert engine.config.pages == (None, -(-(400 + engine.config.reserve) // 4), ((16, 20),))
        outputs = engine.generate(prompts, SamplingParams(70))
        assert_all_free(engine)
    plain.load_state_dict({name: weight.cpu() for name, weight in model.state_dict().items()})
    comparison = Comparison(plain)
    for prompt, output in zip(prompts, outputs, strict=True):
        comparison.check(prompt, output.tokens, greedy_by_transformers(plain, [prompt], 70)[0])
        assert len(output.tokens) == 70
    assert len(comparison.near_ties) <= 1


def test_two_windows_text_equals_reference(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a table of its own, as one table of all pages has it."""
    monkeypatch.setattr(Mistral, "window", lambda self, index: (WINDOW, 40)[index % 2])
    monkeypatch.setattr(native, "check_against_module", lambda *_: None)  # no module has two windows
    prompts, texts = random_texts(200, 1, 60), []
    for chunk, plan in ((20, (40, 16, ((16, 20),))), (1000, (None, 103, ()))):
        with engine_of(model_of("all"), Ngram(num_nodes=8), device, prefill_chunk=chunk) as engine:
            assert engine.config.pages == plan
            texts.append([output.tokens for output in engine.generate(prompts, SamplingParams(90))])
            assert_all_free(engine)
    assert texts[0] == texts[1]


def test_window_fp8_kv_text_ignores_chunk_size(device: torch.device) -> None:
    texts = []
    for chunk in (20, 1000):
        with engine_of(model_of("mixed"), None, device, prefill_chunk=chunk, kv_dtype="fp8_e4m3") as engine:
            texts.append(engine.generate(random_texts_once(), SamplingParams(60))[0].tokens)
    assert texts[0] == texts[1]


def random_texts_once() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(5, VOCAB, (150,), generator=generator).tolist()]


def test_window_pages_in_use_stay_constant(device: torch.device) -> None:
    """Over many windows: those of a prompt, and those of a text."""
    options: dict[str, Any] = {"num_slots": 1, "max_len": 4000, "page_size": 16, "prefill_chunk": 100}
    held = []
    with engine_of(model_of("all"), Ngram(num_nodes=8), device, **options, num_pages=9) as engine:
        state, make_room = engine.state, engine.state.make_room

        def watched(slots: torch.Tensor, reserve: int) -> None:
            make_room(slots, reserve)
            held.append(9 - int(state.pool.num_free))

        if not engine.config.captures:
            state.make_room = watched
        outputs = engine.generate(random_texts(1200), SamplingParams(600))
        assert (len(outputs[0].tokens), outputs[0].finish_reason) == (600, FinishReason.LENGTH)
        assert engine.state.pool.page_table.shape[1] == -(-(4000 + engine.config.reserve) // 16)
        assert_all_free(engine)
    assert set(held) <= {1, 2, 3, 4}, "16 rows and a tree's 9 are in 4 pages of 16 at most"


# --- many requests


@pytest.mark.parametrize(("name", "draft"), [*exhaustive(("all", "ngram"), ("mixed", "ngram")), ("all", "standalone")])
def test_window_soak_leaks_no_page(name: str, draft: str, device: torch.device) -> None:
    """Cancels and retractions, in a pool that does not hold all of them; each text is that of the request alone.

    The default run has two page tables: one of the target's windows, and one of the draft, which sees all.
    """
    rng = random.Random(name + draft)
    model = model_of(name)
    kinds = random_texts(*(rng.choice([1, 2, rng.randint(1, 350)]) for _ in range(8)))
    with engine_of(model, None, device, prefill_chunk=1000) as engine:
        alone = [engine.generate([prompt], SamplingParams(200))[0].tokens for prompt in kinds]
    tables = {"all": 30} if draft == "ngram" else {}
    options: dict[str, Any] = {"num_slots": 6, "num_pages": tables.get(name, 150), "rounds_in_flight": 2}
    with engine_of(model, DRAFTS[draft](), device, **options) as engine:
        chosen = [rng.randrange(len(kinds)) for _ in range(24)]
        params = [SamplingParams(rng.choice([1, rng.randint(1, 60), 200])) for _ in chosen]
        first = engine.submit([5], SamplingParams(1)).id

        def on_tokens(new: NewTokens) -> None:
            if rng.random() < 0.01:
                engine.core.scheduler.cancel(first + 1 + rng.randrange(len(chosen)))

        outputs = engine.generate([kinds[i] for i in chosen], params, on_tokens=on_tokens)
        stats = engine.stats()
        assert_all_free(engine)
    assert stats.retractions > 0
    comparison = Comparison(model)
    for output, kind, sampling in zip(outputs, chosen, params, strict=True):
        if output.finish_reason == FinishReason.CANCELLED:
            if output.tokens:
                comparison.check(kinds[kind], output.tokens, alone[kind])
            continue
        comparison.check(kinds[kind], output.tokens, alone[kind])
        assert len(output.tokens) == min(sampling.max_new_tokens, len(alone[kind]))
    assert len(comparison.near_ties) <= 3


def test_missing_window_page_ends_request(device: torch.device) -> None:
    """Taken by somebody whom the scheduler does not know, they are missed by the rows that are to be written."""
    with engine_of(model_of("all"), None, device, num_slots=1) as engine:
        engine.state.pool.num_free.sub_(4)
        with pytest.raises(RuntimeError, match="BAD_PAGE"):
            engine.generate(random_texts(200), SamplingParams(5))
        engine.state.pool.num_free.add_(4)
        assert len(engine.generate(random_texts(200), SamplingParams(5))[0].tokens) == 5
        assert_all_free(engine)
