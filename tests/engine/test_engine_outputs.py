"""What a request may ask for besides its text: log-probabilities, a least length, strings to stop at."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from specdec_kernels import FinishReason
from specdec_kernels.engine import (
    Engine,
    NewTokens,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from support.exhaustive import exhaustive, representative
from support.packaged_drafts import DRAFTS, TARGET
from support.tiny_checkpoint import held_out, reference_model, tokenizer

NEW_TOKENS = 24
every_draft = pytest.mark.parametrize("name", representative(DRAFTS))


def make_engine(name: str, device: torch.device | str = "cpu", **options: Any) -> Engine:
    given = {"max_len": 128, "num_slots": 4, "dtype": torch.float32, "device": device, "prefill_chunk": 50} | options
    return Engine(TARGET, draft=DRAFTS[name](), **given)


@functools.cache
def prompts() -> list[list[int]]:
    return [prompt[:length] for prompt, length in zip(held_out("code"), (40, 1, 25, 60, 33, 2, 50, 17), strict=False)]


def wants(max_new_tokens: int = NEW_TOKENS, **more: Any) -> list[SamplingParams]:
    """Greedy and sampled, with alternatives, without, and no log-probabilities at all."""
    kinds = [(None, 0.0), (3, 0.0), (True, 0.8), (20, 1.0), (False, 0.9), (1, 0.7), (0, 0.0), (5, 0.0)]
    return [
        SamplingParams(max_new_tokens, temperature=t, seed=7, logprobs=logprobs, **more) for logprobs, t in kinds
    ]  # fmt: skip


def expect_logprobs(output: RequestOutput, sampling: SamplingParams, rule_out: list[int] | None = None) -> None:
    """Those that transformers' own logits give, from which `rule_out` is taken at the first places."""
    if sampling.num_logprobs < 0:
        assert output.logprobs is None
        return
    assert output.logprobs is not None and len(output.logprobs) == len(output.tokens) > 0
    text = output.prompt_tokens + output.tokens
    with torch.inference_mode():
        logits = reference_model()(torch.tensor([text])).logits[0, len(output.prompt_tokens) - 1 : -1]
    logits = logits.clone().double()
    logits[: sampling.min_new_tokens, rule_out or []] = -torch.inf
    want = logits.log_softmax(-1)
    own = torch.tensor([token.logprob for token in output.logprobs], dtype=torch.float64)
    torch.testing.assert_close(own, want.gather(1, torch.tensor(output.tokens)[:, None])[:, 0], rtol=0, atol=2e-3)
    for row, token in zip(want, output.logprobs, strict=True):
        assert len(token.top) == sampling.num_logprobs
        values = torch.tensor([logprob for _, logprob in token.top], dtype=torch.float64)
        ids = [number for number, _ in token.top]
        assert len(set(ids)) == len(ids)
        torch.testing.assert_close(values, row.topk(len(ids)).values, rtol=0, atol=2e-3)
        torch.testing.assert_close(values, row[ids], rtol=0, atol=2e-3)


@every_draft
def test_logprobs(name: str, device: torch.device) -> None:
    """In a batch of requests with and without, and with more requests than slots."""
    engine = make_engine(name, device)
    outputs = engine.generate(prompts(), wants())
    for output, sampling in zip(outputs, wants(), strict=True):
        expect_logprobs(output, sampling)
    without = engine.generate(
        prompts(), [SamplingParams(NEW_TOKENS, temperature=w.temperature, seed=7) for w in wants()]
    )
    assert sum(a.tokens != b.tokens for a, b in zip(outputs, without, strict=True)) <= 1  # a near-tie


@pytest.mark.parametrize("name", [*exhaustive("none", "ngram"), "eagle3-tree"])
def test_logprobs_survive_retraction(name: str, device: torch.device) -> None:
    engine = make_engine(name, device, page_size=4, num_pages=55)
    params = wants(60, ignore_eos=True)
    for output, sampling in zip(engine.generate(prompts(), params), params, strict=True):
        expect_logprobs(output, sampling)
    assert engine.stats().retractions > 0


def test_logprobs_of_a_stream(device: torch.device) -> None:
    engine = make_engine("eagle3-tree", device)
    streamed: dict[int, list[TokenLogprob]] = {}

    def on_tokens(new: NewTokens) -> None:
        if new.logprobs is None:
            assert wants()[new.index].num_logprobs < 0
        else:
            assert len(new.logprobs) == len(new.tokens)
            streamed.setdefault(new.index, []).extend(new.logprobs)

    for output in engine.generate(prompts(), wants(), on_tokens=on_tokens):
        assert streamed.get(output.index) == output.logprobs


# --- a least length


@every_draft
def test_no_stop_token_before_the_minimum(name: str, device: torch.device) -> None:
    """With the commonest tokens as stops, so that they would nearly always come first."""
    engine = make_engine(name, device)
    texts = [o.tokens for o in engine.generate(prompts(), SamplingParams(NEW_TOKENS, ignore_eos=True))]
    tokens = [token for text in texts for token in text]
    stops = sorted(set(tokens), key=tokens.count)[-16:]
    minimum = 9
    params = wants(min_new_tokens=minimum, stop_token_ids=stops)
    ended = 0
    for output, sampling in zip(engine.generate(prompts(), params), params, strict=True):
        assert not set(output.tokens[:minimum]) & set(stops) and len(output.tokens) > minimum
        assert not set(output.tokens[:-1]) & set(stops)
        ended += output.finish_reason == FinishReason.STOP
        expect_logprobs(output, sampling, stops)
    assert ended > 4
    lengths = [len(o.tokens) for o in engine.generate(prompts(), SamplingParams(NEW_TOKENS, stop_token_ids=stops))]
    assert min(lengths) < minimum


@pytest.mark.parametrize("name", ["eagle3-tree", *exhaustive("ngram")])
def test_min_new_tokens_survives_retraction(name: str) -> None:
    params = [SamplingParams(60, stop_token_ids=list(range(16)), min_new_tokens=40)] * len(prompts())
    want = make_engine(name).generate(prompts(), params)
    tight = make_engine(name, page_size=4, num_pages=55)
    got = tight.generate(prompts(), params)
    assert tight.stats().retractions > 0
    assert [o.tokens for o in got] == [o.tokens for o in want]


# --- strings to stop at


def cut(text: str, strings: list[str]) -> str:
    return text[: min((place for s in strings if (place := text.find(s)) >= 0), default=len(text))]


@every_draft
def test_stop_strings(name: str, device: torch.device) -> None:
    """Within tokens, across them, and none; streaming or not."""
    engine = make_engine(name, device)
    plain = engine.generate(prompts(), SamplingParams(NEW_TOKENS, ignore_eos=True))
    strings = ["self", ")\n", ".", "=", "no such string"]
    events: list[NewTokens] = []
    params = SamplingParams(NEW_TOKENS, ignore_eos=True, stop=strings, logprobs=True)
    outputs = engine.generate(prompts(), params, on_tokens=events.append)
    for output, whole in zip(outputs, plain, strict=True):
        assert whole.text is not None and output.text == cut(whole.text, strings)
        assert output.logprobs is not None and len(output.logprobs) == len(output.tokens)
        assert output.tokens == whole.tokens[: len(output.tokens)]
        mine = [event for event in events if event.index == output.index]
        assert [token for event in mine for token in event.tokens] == output.tokens
        assert mine[-1].finish_reason == output.finish_reason
        assert output.stats.accepted + output.stats.rounds == len(output.tokens) - 1
        if output.text != whole.text:
            assert output.finish_reason == FinishReason.STOP
            # Complete with the last of the tokens kept, and not before.
            assert cut(tokenizer().decode(output.tokens, skip_special_tokens=True), strings) == output.text
            short = tokenizer().decode(output.tokens[:-1], skip_special_tokens=True)
            assert cut(short, strings) == short
    assert sum(output.finish_reason == FinishReason.STOP for output in outputs) >= 4
    assert engine.core.scheduler.num_running == 0
    silent = engine.generate(prompts(), params)
    assert [o.tokens for o in silent] == [o.tokens for o in outputs]
    pool = engine.state.pool
    assert int(pool.num_free[0]) == len(pool.free_stack)


def test_stop_string_with_min_new_tokens() -> None:
    engine = make_engine("eagle3-tree")
    (plain,) = engine.generate(prompts()[0], SamplingParams(60, ignore_eos=True))
    assert plain.text is not None
    stop, minimum = "self", 12
    early = tokenizer().decode(plain.tokens[:minimum])
    assert stop in early and stop in plain.text[len(early) :]
    (output,) = engine.generate(prompts()[0], SamplingParams(60, ignore_eos=True, stop=stop, min_new_tokens=minimum))
    assert output.text == plain.text[: plain.text.find(stop, len(early) - len(stop) + 1)]
    assert output.finish_reason == FinishReason.STOP and len(output.tokens) > minimum


def test_stream_joins_characters_of_several_tokens() -> None:
    from specdec_kernels.engine.text.detokenizer import Detokenizer
    from specdec_kernels.engine.text.stop_strings import StopStrings

    detokenizer = Detokenizer(tokenizer())
    tokens = tokenizer()("x = 'äöü€😀' # done")["input_ids"]
    for stop, text in (("€", "x = 'äöü"), ("😀'", "x = 'äöü€"), ("ü€😀' #", "x = 'äö")):
        for size in (1, 2, 5, 100):
            strings, kept = StopStrings(detokenizer.decoder([]), ["nothing", stop], 0), 0
            for begin in range(0, len(tokens), size):
                found = strings.find(tokens[begin : begin + size])
                if found is not None:
                    kept = begin + found
                    break
            assert strings.text == text and stop in tokenizer().decode(tokens[:kept])
            assert stop not in tokenizer().decode(tokens[: kept - 1])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"min_new_tokens": -1}, "min_new_tokens is -1, expected 0 to max_new_tokens"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens is 9, expected 0 to max_new_tokens"),
        ({"stop": ""}, "stop is , expected strings that are not empty"),
        ({"stop": ["a", ""]}, "stop is ['a', ''], expected strings that are not empty"),
        ({"logprobs": -1}, "logprobs is -1, expected True, or 0 to 20"),
        ({"logprobs": 21}, "logprobs is 21, expected True, or 0 to 20"),
    ],
    ids=str,
)
def test_output_params_refuse_bad_values(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**bad)
    assert str(error.value) == f"SamplingParams: {message}"
