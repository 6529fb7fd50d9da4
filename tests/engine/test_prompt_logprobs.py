"""Log-probabilities of prompts: those of transformers' own logits, whatever shares a pass or a cache with a prompt."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels.engine import Engine, RequestOutput, SamplingParams
from specdec_kernels.engine.device import prompt_scoring
from specdec_kernels.engine.device.memory import largest_prefill
from specdec_kernels.models.layers.paged_batch import LastRows, PagedBatch
from specdec_kernels.tiny import tiny_model
from support.exhaustive import exhaustive, representative
from support.observed_rounds import wrap_method
from support.request_engines import DRAFTS, make_engine, prompts
from support.tiny_checkpoint import reference_model, target_with_features
from support.window_models import model_of, random_texts

NEW_TOKENS = 12
COUNTS: list[Any] = [3, True, None, 20, 0, False, 1, 5]  # of alternatives, one for each prompt


def wants() -> list[SamplingParams]:
    """Greedy and sampled, with the log-probabilities of some prompts, and with edits that do not concern them."""
    edits: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.5, "logit_bias": {5: 8.0}}] * 4
    return [
        SamplingParams(
            NEW_TOKENS, temperature=0.8 * (index % 2), seed=7, logprobs=index % 3, prompt_logprobs=count, **edit
        )
        for index, (count, edit) in enumerate(zip(COUNTS, edits, strict=True))
    ]


def expect_prompt_logprobs(output: RequestOutput, params: SamplingParams, logits: Tensor) -> None:
    """Expect those of a prompt whose logits are [1, T, V]."""
    if params.num_prompt_logprobs < 0:
        assert output.prompt_logprobs is None
        return
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(output.prompt_tokens)
    first, *others = output.prompt_logprobs
    assert first is None
    for token, row, one in zip(output.prompt_tokens[1:], logits[0].double().log_softmax(-1), others, strict=False):
        assert one is not None and len(one.top) == params.num_prompt_logprobs
        assert abs(one.logprob - row[token].item()) < 2e-3
        ids, values = [number for number, _ in one.top], torch.tensor([value for _, value in one.top]).double()
        assert len(set(ids)) == len(ids) and all(one.logprob == value for number, value in one.top if number == token)
        torch.testing.assert_close(values, row.topk(len(ids)).values, rtol=0, atol=2e-3)
        torch.testing.assert_close(values, row[ids], rtol=0, atol=2e-3)


@torch.inference_mode()
def expect_those_of_transformers(outputs: list[RequestOutput], params: list[SamplingParams], model: Any = None) -> None:
    model = model or reference_model()
    for output, one in zip(outputs, params, strict=True):
        expect_prompt_logprobs(output, one, model(torch.tensor([output.prompt_tokens])).logits)


@pytest.mark.parametrize("name", representative(DRAFTS))
@pytest.mark.parametrize("prefill_chunk", [7, 4096])
def test_prompts_are_scored_in_a_batch(name: str, prefill_chunk: int, device: torch.device) -> None:
    """Next to prompts that are not, in chunks and whole; the texts stay the same."""
    with make_engine(name, device, prefill_chunk=prefill_chunk, num_slots=3, adaptive=False) as engine:
        outputs = engine.generate(prompts(), wants())
        expect_those_of_transformers(outputs, wants())
        plain = engine.generate(prompts(), [replace(one, prompt_logprobs=None) for one in wants()])
    num_differ = sum(output.tokens != other.tokens for output, other in zip(outputs, plain, strict=True))
    assert num_differ <= (device.type == "cuda")  # a near-tie


def test_long_prompts_are_scored_in_blocks(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The logits of a block fit a bound; a block of one row is the least."""
    sizes: list[int] = []
    with make_engine("none", device, max_len=512) as engine:
        restore = wrap_method(
            engine.target, "logits", lambda logits, hidden: sizes.append(len(hidden)) or logits(hidden)
        )
        prompt, params = (prompts()[3] * 7)[:400], SamplingParams(1, prompt_logprobs=2)
        want = engine.generate([prompt], params)
        for rows, bound in ((33, 33 * 2048), (1, 5)):
            monkeypatch.setattr(prompt_scoring, "MOST_LOGITS", bound)
            sizes.clear()
            got = engine.generate([prompt], params)
            assert max(sizes) <= rows and sum(sizes) >= 399
            for one, other in zip(got[0].prompt_logprobs[1:], want[0].prompt_logprobs[1:], strict=True):
                assert abs(one.logprob - other.logprob) < 1e-4
        restore()
    expect_those_of_transformers(want, [params])


@pytest.mark.parametrize("name", representative(DRAFTS))
def test_cached_rows_of_a_prompt_are_computed_again(name: str, device: torch.device) -> None:
    prompt, params = prompts()[3], SamplingParams(NEW_TOKENS, prompt_logprobs=1)
    with make_engine(name, device, prefix_cache=True, adaptive=False) as engine:
        (first,) = engine.generate([prompt], SamplingParams(NEW_TOKENS))
        (scored,) = engine.generate([prompt], params)
        (later,) = engine.generate([prompt], SamplingParams(NEW_TOKENS))
    assert (first.cached_tokens, scored.cached_tokens) == (0, 0) and later.cached_tokens > 0
    assert first.tokens == scored.tokens == later.tokens
    expect_those_of_transformers([scored], [params])


def test_scored_prompts_fill_the_cache(device: torch.device) -> None:
    prompt = prompts()[3]
    with make_engine("none", device, prefix_cache=True) as engine:
        (scored,) = engine.generate([prompt], SamplingParams(NEW_TOKENS, prompt_logprobs=1))
        (later,) = engine.generate([prompt], SamplingParams(NEW_TOKENS))
    assert later.cached_tokens > 0 and later.tokens == scored.tokens


def test_every_sample_has_the_scores_of_the_prompt(device: torch.device) -> None:
    params = SamplingParams(4, n=3, temperature=1.0, seed=3, prompt_logprobs=2)
    with make_engine("none", device, prefix_cache=True) as engine:
        outputs = engine.generate([prompts()[0]], params)
    expect_those_of_transformers(outputs, [params] * 3)


@pytest.mark.parametrize("name", [*exhaustive("none"), "union"])
def test_scores_survive_retraction(name: str, device: torch.device) -> None:
    params = [replace(one, max_new_tokens=60, ignore_eos=True) for one in wants()]
    with make_engine(name, device, page_size=4, num_pages=55) as engine:
        outputs = engine.generate(prompts(), params)
        assert engine.stats().retractions > 0
    expect_those_of_transformers(outputs, params)


@pytest.mark.parametrize("prefill_chunk", [24, 4096])
def test_scores_of_an_invariant_engine_do_not_depend_on_the_batch(prefill_chunk: int, device: torch.device) -> None:
    params = SamplingParams(8, prompt_logprobs=3)
    with make_engine("chain", device, prefill_chunk=prefill_chunk, batch_invariant=True) as engine:
        together = engine.generate(prompts(), params)
        alone = [engine.generate([prompt], params)[0] for prompt in reversed(prompts())]
    assert [output.prompt_logprobs for output in together] == [output.prompt_logprobs for output in reversed(alone)]


def test_single_token_has_no_score() -> None:
    with make_engine("none") as engine:
        (output,) = engine.generate([[5]], SamplingParams(2, prompt_logprobs=1))
    assert output.prompt_logprobs == [None]


def test_scores_are_there_with_the_first_token(device: torch.device) -> None:
    with make_engine("chain", device) as engine:
        request = engine.submit(prompts()[0], SamplingParams(NEW_TOKENS, prompt_logprobs=1))
        next(iter(request))
        scored = request.read_prompt_logprobs()
        assert scored is not None and request.result().prompt_logprobs is scored


def test_transformers_modules_score_prompts() -> None:
    with make_engine("none", implementation="transformers") as engine:
        expect_those_of_transformers(engine.generate(prompts(), wants()), wants())


@pytest.mark.parametrize("name", ["all", "mixed", "sinks"])
def test_models_with_windows_score_prompts(name: str, device: torch.device) -> None:
    """Rows before the window of a long prompt are gone when its last tokens are scored."""
    model = model_of(name)
    params = [SamplingParams(4, prompt_logprobs=2)] * 2
    with Engine(model, max_len=128, dtype=torch.float32, device=device, page_size=8, prefill_chunk=20) as engine:
        outputs = engine.generate(random_texts(90, 30), params)
    expect_those_of_transformers(outputs, params, model.to("cpu"))


def test_scores_move_with_a_request() -> None:
    params = SamplingParams(NEW_TOKENS, prompt_logprobs=2)
    with make_engine("chain") as engine, make_engine("chain") as other:
        exported = engine.export_request(engine.submit(prompts()[0], params))
        output = other.import_request(pickle.loads(pickle.dumps(exported))).result()
        expect_those_of_transformers([output], [params])
        values = exported.values | {"prompt_logprobs": [None, 3]}
        with pytest.raises(ValueError) as error:
            other.import_request(replace(exported, values=values))
    message = "import_request: request has other prompt_logprobs than null and one for each token after it"
    assert str(error.value) == message


@pytest.mark.parametrize("layers", [(1, 3), (3,), (4,), (0, 3, 4)], ids=str)
def test_features_and_last_rows_are_the_same_with_all_rows(layers: tuple[int, ...]) -> None:
    """Bit for bit, also where a feature is the residual stream that enters the last layer."""
    lm = target_with_features(layers)
    assert len(lm.decoder.layers) == 4
    zero, one = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    pages = torch.arange(8, dtype=torch.int32)[None]
    tokens, positions = torch.arange(5, 25, dtype=torch.int32)[None], torch.arange(20, dtype=torch.int32)[None]
    batch = PagedBatch(slots=zero, page_table=pages, prefix_lens=zero, tail_len=20)
    last = LastRows(zero + 19, positions[:, -1:], batch._replace(prefix_lens=zero + 19, tail_len=1, num_valid=one))
    with torch.inference_mode():
        want = lm.prefill(tokens, positions, batch, last)
        got = lm.prefill(tokens, positions, batch, last, all_rows=True)
        hidden = lm.forward(tokens, positions, batch).hidden[0]
    assert want.all_hidden is None and got.all_hidden is not None
    torch.testing.assert_close(got.hidden, want.hidden, rtol=0, atol=0)
    torch.testing.assert_close(got.features, want.features, rtol=0, atol=0)
    torch.testing.assert_close(got.all_hidden, hidden, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [-1, 21])
def test_other_counts_are_refused(value: int) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(prompt_logprobs=value)
    assert str(error.value) == f"SamplingParams: prompt_logprobs is {value}, expected True, or 0 to 20"


def test_memory_of_a_gpu_is_measured_with_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest pass that sizes the pools scores all its tokens."""
    scored: list[int] = []
    score = prompt_scoring.score_rows

    def count(target: Any, hidden: Tensor, rows: prompt_scoring.ScoredRows) -> Tensor:
        scored.append(len(rows.rows))
        return score(target, hidden, rows)

    with Engine(tiny_model("target"), max_len=128, dtype=torch.float32, num_slots=2, prefill_chunk=50) as engine:
        monkeypatch.setattr("specdec_kernels.engine.device.prefill_graphs.score_rows", count)
        largest_prefill(engine.core.executor, 50)
    assert scored and scored[0] >= 50
