"""The first token comes from the pass over the prompt: one pass, one first round, and the text that it always was."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_kernels import _C, FinishReason, Status
from specdec_kernels.engine import (
    Draft,
    Eagle3,
    Engine,
    Needs,
    Ngram,
    RequestOutput,
    SamplingParams,
    Standalone,
    Union,
)
from specdec_kernels.engine.device.prefill import Shape
from specdec_kernels.tiny import tiny_model
from support.exhaustive import covering, representative
from support.manual_rounds import begin, run
from support.manual_rounds import make_engine as make_engine_of
from support.manual_rounds import prompts as round_prompts
from support.observed_rounds import launches_of, prefills_of, wrap_method
from support.tiny_checkpoint import Comparison, greedy_by_transformers, held_out, reference_model, reference_texts
from support.window_models import WINDOW, model_of, random_texts

TARGET, HEAD = tiny_model("target"), tiny_model("eagle3")
PAGE = 4
DRAFTS: dict[str, Callable[[], Draft | None]] = {
    "none": lambda: None,
    "ngram": lambda: Ngram(num_nodes=8),
    "eagle3-chain": lambda: Eagle3(HEAD, num_steps=3, topk=1),
    "eagle3-tree": lambda: Eagle3(HEAD, num_steps=3, topk=4, num_nodes=16),
    "eagle3-drawn": lambda: Eagle3(HEAD, num_steps=3, topk=1, sampled=True),
    "standalone": lambda: Standalone(TARGET, num_steps=3, topk=2, num_nodes=8),
    "union": lambda: Union(Eagle3(HEAD, num_steps=3, topk=2), Ngram(num_nodes=8), num_nodes=12),
}
every_draft = pytest.mark.parametrize("name", representative(DRAFTS))


def make_engine(name: str, device: torch.device | str = "cpu", **options: Any) -> Engine:
    """Whose rounds are called one by one."""
    defaults: dict[str, Any] = {"max_len": 256, "num_slots": 4, "page_size": PAGE, "adaptive": False}
    return Engine(
        TARGET, draft=DRAFTS[name](), dtype=torch.float32, device=device, cuda_graph=False, **(defaults | options)
    )


class Calls:
    """What an engine's executor and target are asked for from here on."""

    def __init__(self, engine: Engine) -> None:
        self._launched, self._passes = launches_of(engine), prefills_of(engine)
        self.forwards = 0  # of the target

        def count(forward: Callable[..., Any], *arguments: Any) -> Any:
            self.forwards += 1
            return forward(*arguments)

        wrap_method(engine.target, "forward", count)

    @property
    def rounds(self) -> list[tuple[int, int]]:
        """Return batch and rows of each round."""
        return [(batch, rows) for batch, rows, _ in self._launched if batch]

    @property
    def prefilled(self) -> list[list[tuple[int, int, int]]]:
        """Return slot, first row and number of rows of each chunk, by pass."""
        return [[(chunk.slot, chunk.start, len(chunk.tokens) - 1) for chunk in chunks] for chunks in self._passes]


def expect_texts(prompts: list[list[int]], outputs: list[RequestOutput], count: int) -> None:
    comparison = Comparison(reference_model())
    for prompt, output, want in zip(prompts, outputs, reference_texts(prompts, count), strict=True):
        comparison.check(prompt, output.tokens, want[: len(output.tokens)])


def some_prompts() -> list[list[int]]:
    return [*(prompt[:length] for prompt, length in zip(held_out("code"), (23, 40, 2), strict=False)), [7]]


@every_draft
def test_first_token_costs_one_pass(name: str, device: torch.device) -> None:
    """Requests that arrive together take one prefill and one first round, which drafts nothing and is not counted.

    The request may end with that token.
    """
    engine = make_engine(name, device)
    calls = Calls(engine)
    outputs = engine.generate(some_prompts(), SamplingParams(1, ignore_eos=True))
    assert calls.prefilled == [[(slot, 0, len(prompt)) for slot, prompt in enumerate(some_prompts())]]
    assert calls.rounds == [(4, _C.FIRST_ROUND)] and calls.forwards == 0
    expect_texts(some_prompts(), outputs, 1)
    for output in outputs:
        assert len(output.tokens) == 1 and output.finish_reason == FinishReason.LENGTH
        assert (output.stats.rounds, output.stats.drafted, output.stats.accepted) == (0, 0, 0)
        assert output.stats.accept_length == 0
    stats = engine.stats()
    assert stats.rounds == stats.rows == sum(stats.rounds_by_nodes.values()) == 0 and not engine.state.status.any()


@every_draft
def test_accept_length_is_of_the_other_rounds(name: str) -> None:
    engine = make_engine(name)
    calls = Calls(engine)
    outputs = engine.generate(some_prompts(), SamplingParams(24, ignore_eos=True))
    expect_texts(some_prompts(), outputs, 24)
    others = [rows for _, rows in calls.rounds if rows != _C.FIRST_ROUND]
    assert len(calls.rounds) == len(others) + 1 and engine.stats().rounds == len(others)
    assert max(output.stats.rounds for output in outputs) == len(others)
    for output in outputs:
        assert output.stats.rounds + output.stats.accepted == 23
        assert name == "none" or output.stats.drafted > 0
    if name == "none":
        assert all(output.stats.accept_length == 1 for output in outputs)


def test_trace_separates_first_rounds(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    engine = make_engine("eagle3-chain", trace=file)
    engine.generate(some_prompts(), SamplingParams(8, ignore_eos=True))
    names = Counter(event["name"] for event in json.loads(file.read_text())["traceEvents"])
    assert names["first round"] == 1 and names["round"] == engine.stats().rounds > 1


@pytest.mark.parametrize(("name", "chunk"), covering(DRAFTS, [1, 5, 22, 23]))
def test_chunks_that_end_anywhere(name: str, chunk: int, device: torch.device) -> None:
    """With the root's row alone in the last one, too."""
    engine = make_engine(name, device, prefill_chunk=chunk)
    calls = Calls(engine)
    outputs = engine.generate(some_prompts()[:1], SamplingParams(12, ignore_eos=True))
    rows = [(start, count) for ((_, start, count),) in calls.prefilled]
    assert rows == [(start, min(chunk, 23 - start)) for start in range(0, 23, chunk)]
    expect_texts(some_prompts()[:1], outputs, 12)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_what_follows_the_last_layer_is_that_of_a_forward_pass(implementation: str, device: torch.device) -> None:
    """The states of each chunk's last row, and its features, of any layers."""
    for layers in ((1, 2, 3), (4,), (3, 0)):
        engine = Engine(
            TARGET,
            draft=Reader(layers),
            max_len=64,
            num_slots=3,
            page_size=PAGE,
            implementation=implementation,
            dtype=torch.float32,
            device=device,
        )
        texts, state = (
            [prompt[:length] for prompt, length in zip(held_out("code"), (19, 1, 8), strict=False)],
            engine.state,
        )
        with torch.inference_mode():
            for slot, text in enumerate(texts):
                engine.core.executor.begin(slot, _C.AdmittedRequest(id=slot, tokens=text))
            engine.core.executor.prefill(
                [_C.PrefillChunk(slot=slot, start=0, tokens=[*text, text[-1]]) for slot, text in enumerate(texts)]
            )
            for slot, text in enumerate(texts):
                want = reference_model()(torch.tensor([text]), output_hidden_states=True)
                logits = engine.target.logits(state.last_hidden[slot])
                torch.testing.assert_close(logits.cpu(), want.logits[0, -1], rtol=1e-3, atol=1e-3)
                states = [want.hidden_states[layer][0, -1] for layer in layers if layer < 4]
                features = state.last_features[slot].cpu()[: len(states) * len(want.hidden_states[0][0, 0])]
                if 4 not in layers:  # transformers' last one has passed the final norm
                    torch.testing.assert_close(features, torch.cat(states), rtol=1e-3, atol=1e-3)


class Reader(Draft):
    """Plain decoding that asks for states."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers

    def needs(self, target: Any) -> Needs:
        return Needs(num_nodes=1, accept_width=1, feature_layers=self.layers)


@pytest.mark.parametrize("name", ["none", "eagle3-tree", "standalone"])
def test_a_pass_without_rows_changes_nothing(name: str, device: torch.device) -> None:
    """As one that is run before it is captured: no slot has pages."""
    engine = make_engine(name, device)
    for shape in (Shape(1, 64, 1), Shape(5, 64, 4)):
        engine.core.executor.passes.launch(torch.zeros(sum(shape.sizes), dtype=torch.int32, device=device), shape)
    assert not engine.state.status.any() and not engine.state.seq_lens.any()
    expect_texts(some_prompts(), engine.generate(some_prompts(), SamplingParams(6, ignore_eos=True)), 6)


def test_a_cached_prompt_prefills_a_row(device: torch.device) -> None:
    """What is left of a prompt of whole pages and a token more is the root's row."""
    prompt = held_out("code")[0][: 5 * PAGE + 1]
    engine = make_engine("eagle3-tree", device, prefix_cache=True)
    (want,) = engine.generate(prompt, SamplingParams(12, ignore_eos=True))
    calls = Calls(engine)
    (again,) = engine.generate(prompt, SamplingParams(12, ignore_eos=True))
    assert [chunk[1:] for (chunk,) in calls.prefilled] == [(5 * PAGE, 1)] and again.cached_tokens == 5 * PAGE
    assert again.tokens == want.tokens and again.stats == want.stats
    expect_texts([prompt], [again], 12)


@pytest.mark.parametrize("name", ["none", "ngram"])
def test_first_token_with_window(name: str, device: torch.device) -> None:
    """The root sees the rows of its window when most pages of the prompt are gone."""
    model, prompts = model_of("all"), random_texts(3 * WINDOW, WINDOW + 1, 100, 1)
    engine = Engine(
        model,
        draft=DRAFTS[name](),
        max_len=400,
        num_slots=2,
        page_size=PAGE,
        prefill_chunk=20,
        adaptive=False,
        dtype=torch.float32,
        device=device,
    )
    assert engine.state.window == WINDOW
    outputs = engine.generate(prompts, SamplingParams(9, ignore_eos=True))
    reference = model_of("all").float()  # the engine's own is on its device
    comparison = Comparison(reference)
    for prompt, output, want in zip(prompts, outputs, greedy_by_transformers(reference, prompts, 9), strict=True):
        comparison.check(prompt, output.tokens, want)


def test_first_token_under_grammar(device: torch.device) -> None:
    pytest.importorskip("xgrammar")
    pytest.importorskip("llguidance")
    engine = make_engine("eagle3-tree", device, grammars=True)
    calls = Calls(engine)
    prompts = some_prompts()
    params = [SamplingParams(40, regex=r"(yes|no), [0-9]%"), *[SamplingParams(40)] * 3]
    outputs = engine.generate(prompts, params)
    text = outputs[0].text
    assert text is not None and text[:2] in ("ye", "no") and text[-1] == "%"
    assert calls.rounds[0] == (4, _C.FIRST_ROUND)
    expect_texts(prompts[1:], outputs[1:], 40)
    (one,) = engine.generate(prompts[0], SamplingParams(1, regex="[0-9]"))
    assert one.text is not None and one.text.isdigit() and one.stats.rounds == 0


def test_migrated_request_needs_no_first_round() -> None:
    prompt = held_out("code")[0][:30]
    (want,) = make_engine("eagle3-tree").generate(prompt, SamplingParams(40, ignore_eos=True))
    here, there = make_engine("eagle3-tree"), make_engine("eagle3-tree")
    request = here.submit(prompt, SamplingParams(40, ignore_eos=True))
    next(iter(request))
    exported = here.export_request(request)
    calls = Calls(there)
    output = there.import_request(exported).result()
    assert output.tokens == want.tokens and output.stats == want.stats
    assert not calls.prefilled and {rows for _, rows in calls.rounds} == {16}


@pytest.mark.parametrize("name", ["none", "ngram", "eagle3-tree", "eagle3+ngram", "standalone"])
def test_stalled_first_round_continues_without_drafts(name: str, device: torch.device) -> None:
    """Nothing of the slot has changed, and the text is the same."""
    texts: list[list[int]] = []
    for stalls in (False, True):
        engine = make_engine_of(name, device)
        executor, state, text = engine.core.executor, engine.state, round_prompts()[0]
        if not stalls:
            tokens = begin(engine, 0, text)
        else:
            executor.begin(0, _C.AdmittedRequest(id=0, tokens=text))
            executor.prefill([_C.PrefillChunk(slot=0, start=0, tokens=[*text, text[-1]])])
            state.seq_lens[0], state.root_tokens[0], state.remaining[0] = len(text) - 1, text[-1], 100
            executor.activate([0])
            state.status[0] = int(Status.STALLED)
            assert run(engine, [0], _C.FIRST_ROUND)[0] == [] and int(state.seq_lens[0]) == len(text) - 1
            tokens = run(engine, [0])[0]
            assert not state.status.any() and (len(tokens) == 1 or name in ("ngram", "eagle3+ngram"))
        for _ in range(6):
            tokens += run(engine, [0])[0]
        texts.append(tokens)
    both = min(map(len, texts))
    assert both >= 6 and texts[0][:both] == texts[1][:both]


@pytest.mark.parametrize("name", ["none", "eagle3-tree", "standalone"])
def test_first_token_supports_all_params(name: str, device: torch.device) -> None:
    """Seeds, penalties, biases, log-probabilities, a minimum and stop tokens: as in rounds of plain decoding."""
    prompt = held_out("code")[1][:30]
    engine = make_engine(name, device)
    (free,) = engine.generate(prompt, SamplingParams(1, logprobs=2))
    assert free.logprobs is not None and free.logprobs[0].top[0] == (free.tokens[0], free.logprobs[0].logprob)
    (first,) = free.tokens
    (stopped,) = engine.generate(prompt, SamplingParams(9, stop_token_ids=[first]))
    assert stopped.tokens == [first] and stopped.finish_reason == FinishReason.STOP
    (later,) = engine.generate(prompt, SamplingParams(9, stop_token_ids=[first], min_new_tokens=1))
    assert later.tokens[0] != first
    (other,) = engine.generate(prompt, SamplingParams(1, logit_bias={first: -float("inf")}))
    assert other.tokens == [free.logprobs[0].top[1][0]]
    drawn = [SamplingParams(1, temperature=1.5, seed=seed) for seed in range(8)]
    want = make_engine("none", device).generate([prompt] * 8, drawn)
    got = engine.generate([prompt] * 8, drawn)
    assert len({tuple(output.tokens) for output in want}) > 2
    assert sum(a.tokens != b.tokens for a, b in zip(got, want, strict=True)) <= 1
