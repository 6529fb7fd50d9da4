"""Engines over targets with recurrent layers: texts are those of transformers, whatever drafts and however slots go."""

from __future__ import annotations

import functools
import random
import re
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from specdec_kernels import _C
from specdec_kernels.engine import Draft, Eagle3, Engine, Ngram, RequestOutput, SamplingParams, Standalone, Union
from specdec_kernels.engine.device.prefill import Shape, pack
from specdec_kernels.engine.host_tensors import to_device
from specdec_kernels.tiny import tiny_model
from support.exhaustive import exhaustive, thinned
from support.hybrid_cases import HYBRIDS, SIZES, VOCAB, greedy_alone, hybrid_module
from support.observed_rounds import wrap_method
from support.random_checkpoints import save_random_model
from support.tiny_checkpoint import Comparison

COUNT = 14
WIDE = {"vocab_size": 2048, "hidden_size": 256}  # of the packaged head
OPTIONS: dict[str, Any] = {
    "implementation": "native", "adaptive": False, "max_len": 128, "num_slots": 3, "page_size": 16,
    "dtype": torch.float32, "prefill_chunk": 24,
}  # fmt: skip
GREEDY = SamplingParams(COUNT, ignore_eos=True)


def random_prompts(vocab: int = VOCAB) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in (1, 7, 40, 19, 64)]


@functools.cache
def module_of(case: str, wide: bool = False) -> Any:
    return hybrid_module(case, **(WIDE if wide else {}))


@functools.cache
def texts_of(case: str, wide: bool = False) -> list[list[int]]:
    """Return the greedy texts of transformers."""
    prompts = random_prompts(WIDE["vocab_size"] if wide else VOCAB)
    return [greedy_alone(module_of(case, wide), prompt, COUNT) for prompt in prompts]


def make_engine(module: Any, draft: Draft | None, device: torch.device | str, **changes: Any) -> Engine:
    return Engine(deepcopy(module), draft=draft, device=device, **(OPTIONS | changes))


def predicted(case: str, params: SamplingParams = GREEDY) -> list[SamplingParams]:
    """Return parameters with a prediction that is right but for one token, so that long paths are accepted."""
    return [replace(params, prediction=[*text[:5], 3, *text[5:]]) for text in texts_of(case)]


def check_texts(case: str, outputs: list[RequestOutput], wide: bool = False) -> None:
    comparison = Comparison(module_of(case, wide))
    prompts = random_prompts(WIDE["vocab_size"] if wide else VOCAB)
    for prompt, output, text in zip(prompts, outputs, texts_of(case, wide), strict=True):
        comparison.check(prompt, list(output.tokens), text)
    assert len(comparison.near_ties) <= 1


@pytest.mark.parametrize("draft", [None, Ngram(num_nodes=9)], ids=["none", "ngram"])
@pytest.mark.parametrize("case", thinned(HYBRIDS, ("qwen3_next", "falcon_h1").__contains__))
def test_greedy_text_is_that_of_transformers(case: str, draft: Draft | None, device: torch.device) -> None:
    """Five prompts in three slots, prefilled in chunks that several of them share."""
    params = GREEDY if draft is None else predicted(case)
    pages = [1, 64] if draft is not None else [4]
    for page_size in pages:
        with make_engine(module_of(case), deepcopy(draft), device, page_size=page_size) as engine:
            outputs = engine.generate(random_prompts(), params)
        check_texts(case, outputs)
        if draft is not None:
            assert all(output.stats.accept_length > 2 for output in outputs)


@pytest.fixture(scope="module")
def dense_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("draft") / "llama", "llama", vocab_size=VOCAB)


@pytest.mark.parametrize("case", ["qwen3_5", *exhaustive("qwen3_next", "nemotron_h", "bamba recurrent last", "zamba2")])
def test_eagle3_trees_read_the_states_that_enter_layers(case: str, device: torch.device) -> None:
    changes = {"mamba_n_heads": 32} if "bamba" in case else {}
    module = hybrid_module(case, **(WIDE | changes))
    prompts = random_prompts(WIDE["vocab_size"])
    draft = Eagle3(tiny_model("eagle3"), num_steps=3, topk=3, num_nodes=10)
    with make_engine(module, draft, device) as engine:
        outputs = engine.generate(prompts, GREEDY)
    comparison = Comparison(module)
    for prompt, output in zip(prompts, outputs, strict=True):
        comparison.check(prompt, list(output.tokens), greedy_alone(module, prompt, COUNT))
    assert len(comparison.near_ties) <= 1


def test_standalone_draft_and_union_leave_the_text_as_it_is(dense_draft: Path, device: torch.device) -> None:
    case = "qwen3_next"
    standalone = Standalone(dense_draft, num_steps=3, topk=2, num_nodes=8)
    union = Union(Ngram(num_nodes=6), replace(standalone), num_nodes=9)
    for draft, params in ((standalone, GREEDY), (union, predicted(case))):
        with make_engine(module_of(case), draft, device) as engine:
            check_texts(case, engine.generate(random_prompts(), params))


@pytest.mark.parametrize("case", ["qwen3_5", *exhaustive("granitemoehybrid", "lfm2_moe")])
def test_drawn_text_is_that_of_plain_decoding(case: str, device: torch.device) -> None:
    params = [
        replace(GREEDY, temperature=0.8, seed=seed, top_p=0.9, speculation="off" if seed == 2 else "on")
        for seed in range(5)
    ]
    with make_engine(module_of(case), None, device) as engine:
        want = engine.generate(random_prompts(), params)
    guesses = [replace(each, prediction=list(output.tokens)) for each, output in zip(params, want, strict=True)]
    with make_engine(module_of(case), Ngram(num_nodes=8), device) as engine:
        got = engine.generate(random_prompts(), guesses)
    expect_same(case, got, want, params)
    lengths = [output.stats.accept_length for output in got]
    assert lengths[2] == 1 and min(lengths[:2] + lengths[3:]) > 2


def expect_same(
    case: str, ours: list[RequestOutput], theirs: list[RequestOutput], params: list[SamplingParams]
) -> None:
    """Expect the same texts, up to one near-tie."""
    comparison = Comparison(module_of(case))
    for output, other, sampling in zip(ours, theirs, params, strict=True):
        comparison.check(output.prompt_tokens, list(output.tokens), list(other.tokens), sampling)
    assert len(comparison.near_ties) <= 1


def test_retracted_requests_are_prefilled_from_zeros(device: torch.device) -> None:
    module, count = module_of("qwen3_next"), 30
    prompts = [prompt[:30] for prompt in random_prompts() if len(prompt) > 30] * 2
    comparison = Comparison(module)
    with make_engine(module, Ngram(num_nodes=6), device, page_size=4, num_pages=36) as engine:
        outputs = engine.generate(prompts, replace(GREEDY, max_new_tokens=count))
        assert engine.stats().retractions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        comparison.check(prompt, list(output.tokens), greedy_alone(module, prompt, count))
    assert len(comparison.near_ties) <= 1


@pytest.mark.parametrize("pattern", ["(ab|c[0-9]{3} )+"])
def test_constrained_text_is_that_of_plain_decoding(pattern: str, device: torch.device) -> None:
    module, prompts = hybrid_module("qwen3_5", **WIDE), random_prompts(WIDE["vocab_size"])
    params, texts = SamplingParams(COUNT, regex=pattern, stop_token_ids=[0], temperature=0.7, seed=5), []
    for draft in (None, Ngram(num_nodes=8)):
        with make_engine(module, draft, device, tokenizer=tiny_model("target"), grammars=True) as engine:
            texts.append([output.text for output in engine.generate(prompts, params)])
    assert texts[0] == texts[1]
    assert all(text and re.match("(ab|c)", text) for text in texts[0])


@pytest.mark.parametrize("shape", [(12, 16, 3), (7, 64, 4), (110, 1, 4)])
def test_prefill_padding_leaves_states_as_they_are(shape: tuple[int, int, int], device: torch.device) -> None:
    """A pass with more pieces and chunks than it needs, as a captured one, gives the states of one that fits."""
    kept = []
    for padded in (False, True):
        with make_engine(module_of("qwen3_next"), None, device, cuda_graph=False, num_slots=5) as engine:
            executor, prompts = engine.core.executor, random_prompts()
            for slot in (0, 2, 3):
                executor.begin(slot, _C.AdmittedRequest(id=slot, tokens=prompts[slot + 1]))
            executor.prefill([_C.PrefillChunk(slot=2, start=0, tokens=prompts[3][:8])])
            texts = (0, 0, prompts[1]), (2, 7, prompts[3]), (3, 0, prompts[4])
            chunks = [_C.PrefillChunk(slot=slot, start=start, tokens=text[start:]) for slot, start, text in texts]
            if padded:
                executor.passes.launch(to_device(pack(chunks, Shape(*shape)), engine.device), Shape(*shape))
            else:
                executor.prefill(chunks)
            states = engine.target.states
            assert states is not None
            kept.append({name: tensor[[0, 2, 3]].clone() for name, tensor in states.kept.items()})
    for name, tensor in kept[0].items():
        torch.testing.assert_close(kept[1][name], tensor, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("measured_costs")
def test_adaptive_rounds_of_all_sizes_keep_the_text(device: torch.device) -> None:
    case = "lfm2"
    with make_engine(module_of(case), Ngram(num_nodes=9), device, adaptive=True) as engine:
        check_texts(case, engine.generate(random_prompts(), predicted(case)))


def test_samples_and_scores_are_those_of_plain_requests(device: torch.device) -> None:
    """Samples of one prompt, and log-probabilities of a prompt and of its text."""
    case, prompt = "qwen3_5", random_prompts()[3]
    module = module_of(case)
    drawn = replace(GREEDY, temperature=0.9, seed=4, n=3)
    with make_engine(module, Ngram(num_nodes=8), device) as engine:
        samples = engine.generate([prompt], drawn)
        scored = engine.generate([prompt], replace(GREEDY, logprobs=3, prompt_logprobs=2))[0]
    with make_engine(module, None, device) as engine:
        plain = engine.generate([prompt], drawn)
    assert len(samples) == 3 and len({tuple(output.tokens) for output in samples}) > 1
    expect_same(case, samples, plain, [replace(drawn, n=1, seed=output.seed) for output in samples])
    text = [*prompt, *scored.tokens]
    with torch.inference_mode():
        logprobs = module(torch.tensor([text]), use_cache=False).logits[0].log_softmax(-1)
    assert scored.prompt_logprobs is not None and scored.logprobs is not None
    ours = [each.logprob for each in [*scored.prompt_logprobs[1:], *scored.logprobs] if each is not None]
    theirs = [float(logprobs[at, token]) for at, token in enumerate(text[1:])]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=1e-3)


def test_batch_invariant_text_does_not_depend_on_others(dense_draft: Path, device: torch.device) -> None:
    """Requests with fewer nodes than a round has rows for leave some of their rows unused."""
    limits: list[Any] = ["on", "off", 2, "on", 3]
    params = [replace(GREEDY, temperature=0.7, seed=3, speculation=limit) for limit in limits]
    draft = Standalone(dense_draft, num_steps=2, topk=2, num_nodes=5)
    with make_engine(module_of("qwen3_5"), draft, device, batch_invariant=True) as engine:
        together = engine.generate(random_prompts(), params)
        alone = [engine.generate([prompt], each)[0] for prompt, each in zip(random_prompts(), params, strict=True)]
    assert [output.tokens for output in together] == [output.tokens for output in alone]
    with make_engine(module_of("qwen3_5"), None, device) as engine:
        expect_same("qwen3_5", together, engine.generate(random_prompts(), params), params)


@pytest.mark.parametrize("case", ["lfm2", *exhaustive("qwen3_next", "falcon_h1", "nemotron_h", "zamba2")])
def test_text_of_keys_and_values_in_8_bits_is_the_same_with_drafts(case: str, device: torch.device) -> None:
    with make_engine(module_of(case), None, device, kv_dtype="fp8_e4m3") as engine:
        want = engine.generate(random_prompts(), GREEDY)
    guesses = [replace(GREEDY, prediction=list(output.tokens)) for output in want]
    with make_engine(module_of(case), Ngram(num_nodes=9), device, kv_dtype="fp8_e4m3") as engine:
        assert engine.target.pools.dtype == torch.float8_e4m3fn
        got = engine.generate(random_prompts(), guesses)
    assert [output.tokens for output in got] == [output.tokens for output in want]
    assert all(output.stats.accept_length > 2 for output in got)


@pytest.mark.parametrize(
    ("case", "count"), [("lfm2", 24), *exhaustive(("qwen3_next", 200), ("falcon_h1", 200), ("nemotron_h", 200))]
)
def test_requests_of_all_kinds_end_as_they_do_alone(case: str, count: int, device: torch.device) -> None:
    """Through a pool that is too small for them, with cancels, and drafts for some, by rounds of any size."""
    rng, module = random.Random(case), module_of(case)
    texts = [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 5, 30, 60]))] for _ in range(8)]
    kinds = [replace(GREEDY, max_new_tokens=40, seed=i, temperature=0.9 * (i % 2)) for i in range(len(texts))]
    with make_engine(module, None, device) as engine:
        alone = engine.generate(texts, kinds)
    chosen = [rng.randrange(len(texts)) for _ in range(count)]
    params = [
        replace(
            kinds[index],
            max_new_tokens=rng.randint(1, 40),
            speculation=rng.choice(["on", "off", 3]),
            prediction=list(alone[index].tokens) if rng.random() < 0.5 else None,
        )
        for index in chosen
    ]
    options = {"adaptive": True, "page_size": 4, "num_pages": 48, "num_slots": 5, "rounds_in_flight": 2}
    comparison, cancelled = Comparison(module), set(rng.sample(range(count), count // 6))
    with make_engine(module, Ngram(num_nodes=8), device, **(options | {"prefill_chunk": 16})) as engine:
        requests = engine.submit_many([texts[index] for index in chosen], params)
        for at, request in enumerate(requests):
            if at in cancelled:
                request.cancel()
        outputs = [request.result() for request in requests]
        assert engine.stats().retractions > 0
    for at, (index, output) in enumerate(zip(chosen, outputs, strict=True)):
        if output.tokens:
            comparison.check(texts[index], list(output.tokens), list(alone[index].tokens), params[at])
        assert at in cancelled or len(output.tokens) == params[at].max_new_tokens
    assert len(comparison.near_ties) <= 1 + count // 50


@pytest.mark.parametrize(
    "case", ["qwen3_next", *exhaustive("falcon_h1", "nemotron_h latent", "lfm2_moe", "zamba2 adapters")]
)
def test_new_weights_and_sleep_leave_states_and_graphs_as_they_are(case: str, device: torch.device) -> None:
    module, other = module_of(case), hybrid_module(case, seed=8)
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with (
        make_engine(module, Ngram(num_nodes=6), device) as engine,
        make_engine(other, Ngram(num_nodes=6), device) as fresh,
    ):
        before = tokens_of(engine)
        engine.update_weights(dict(other.state_dict()))
        assert tokens_of(engine) == tokens_of(fresh) != before
        engine.update_weights(weights)
        assert tokens_of(engine) == before
        states = engine.target.states
        assert states is not None
        engine.sleep()
        assert engine.target.states is not None and engine.target.states.num_bytes == 0
        engine.wake()
        assert engine.target.states.num_bytes == states.num_bytes
        assert tokens_of(engine) == before


def tokens_of(engine: Engine) -> list[list[int]]:
    return [list(output.tokens) for output in engine.generate(random_prompts(), GREEDY)]


@pytest.mark.parametrize("case", ["falcon_h1", *exhaustive("qwen3_next", "lfm2")])
def test_exported_requests_continue_with_their_states(case: str, device: torch.device) -> None:
    prompt, params = random_prompts()[2], replace(GREEDY, max_new_tokens=40)
    want = greedy_alone(module_of(case), prompt, 40)
    with (
        make_engine(module_of(case), Ngram(num_nodes=6), device) as one,
        make_engine(module_of(case), Ngram(num_nodes=6), device, page_size=4) as two,
    ):
        wrap_method(one.core.executor, "launch", start_late)
        request = one.submit(prompt, replace(params, prediction=want[:20]))
        for _ in request:
            if len(request.output.tokens) >= 6:
                break
        exported = one.export_request(request)
        assert any(name.startswith("state.") for name in exported.tensors)
        output = two.import_request(exported).result()
    comparison = Comparison(module_of(case))
    comparison.check(prompt, list(output.tokens), want)


def start_late(begin: Callable[..., None], *size: int) -> None:
    """Begin a round late, so that a request can leave before its end."""
    time.sleep(0.005)
    begin(*size)


def test_states_are_counted_and_what_they_rule_out_is_refused(device: torch.device) -> None:
    module = module_of("qwen3_next")

    def refusal(draft: Draft | None = None, **changes: Any) -> str:
        with pytest.raises(ValueError) as error:
            make_engine(module, draft, device, **changes)
        return str(error.value)

    assert refusal(prefix_cache=True, num_snapshots=0) == (
        "Engine: num_snapshots is 0, expected at least 1 with prefix_cache "
        "(qwen3_next has layers with a recurrent state)"
    )
    assert refusal(Ngram(num_nodes=65)) == (
        "Engine: draft has num_nodes=65, expected at most 64 (qwen3_next has layers with a recurrent state)"
    )
    assert refusal(Standalone(deepcopy(module))) == (
        "Standalone: model is a qwen3_next, whose layers keep a recurrent state, expected one with KV in every layer"
    )
    with make_engine(module, Ngram(num_nodes=64), device) as engine:
        states = engine.target.states
        assert states is not None and engine.config.state_bytes == states.num_bytes
        assert not engine.config.prefix_cache


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("qwen3_next", {"linear_conv_kernel_dim": 9}, "model: convolutions have 9 taps, expected 2 to 8"),
        ("falcon_h1", {"mamba_d_state": 300}, "model: states have a dimension of 300, expected at most 256"),
        ("bamba", {"hidden_act": "gelu"}, "model: hidden_act is 'gelu', expected 'silu'"),
        (
            "lfm2",
            {"layer_types": ["conv"] * 4},
            "model: lfm2 has no attention in its layers, expected some that have",
        ),
    ],
)
def test_auto_names_what_our_layers_lack_for_a_hybrid(
    case: str, changes: dict[str, Any], message: str, device: torch.device
) -> None:
    """Transformers' modules would be refused for their states, which says nothing about the config."""
    with pytest.raises(ValueError) as error:
        make_engine(hybrid_module(case, **changes), None, device, implementation="auto")
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("model_type", "changes", "kind"),
    [
        ("jamba", {"num_experts": 1, "mamba_dt_rank": 4}, "Mamba 1"),
        ("olmo_hybrid", {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    ],
)
@pytest.mark.parametrize("implementation", ["auto", "transformers"])
def test_hybrids_without_layers_of_ours_are_refused_by_name(
    model_type: str, changes: dict[str, Any], kind: str, implementation: str
) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    config = AutoConfig.for_model(model_type, **(SIZES | {"num_hidden_layers": 2} | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with pytest.raises(ValueError) as error:
        make_engine(model, None, "cpu", implementation=implementation)
    assert str(error.value) == (
        f"model: {type(model).__name__} has layers of {kind}, whose state goes from token to token, expected a decoder "
        "with causal attention through transformers' attention interface"
    )


def test_auto_names_a_hybrid_s_mismatch(device: torch.device) -> None:
    module = deepcopy(module_of("lfm2"))
    module.lm_head.register_forward_hook(lambda _, __, logits: -logits)
    with pytest.raises(ValueError, match=r"gives other logits than our layers.*\(no other backend keeps recurrent"):
        make_engine(module, None, device, implementation="auto")
