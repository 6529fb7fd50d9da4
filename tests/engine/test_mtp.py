"""MTP layers as drafts: texts are the target's, and drafts those of the layer's formula."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from specdec_kernels.engine import MTP, Draft, Engine, Ngram, Request, SamplingParams, Union
from specdec_kernels.models.weights.mtp_layouts import ERNIE, NEXTN, QWEN, MtpLayout
from specdec_kernels.synthetic.acceptance import EvenAcceptance, PublishedAcceptance
from specdec_kernels.synthetic.models import SyntheticText, synthetic_causal_lm
from specdec_kernels.synthetic.mtp import save_with_mtp, synthetic_mtp
from specdec_kernels.synthetic.shapes import shape_config
from support.exhaustive import exhaustive, thinned
from support.hybrid_cases import DELTA
from support.hybrid_cases import EXPERTS as HYBRID_EXPERTS
from support.mtp_checkpoints import CASES, LATENT, Reference, write_nemotron_with_mtp, write_target_with_mtp
from support.quantized_checkpoints import quantize
from support.random_checkpoints import EXPERTS, random_prompts
from support.recorded_chains import record_chains
from support.synthetic_mtp import expect_accepted_as_published, wide_target
from support.tiny_checkpoint import Comparison, greedy_by_transformers

INT4 = ("gptq", "gptq shuffled", "awq", "packed")
patched = pytest.MonkeyPatch.context
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)
CHAIN: dict[str, Any] = {"num_steps": 3, "topk": 1}
TREE: dict[str, Any] = {"num_steps": 3, "topk": 3, "num_nodes": 10}


def make_engine(target: Path, draft: Draft | None, **options: Any) -> Engine:
    defaults: dict[str, Any] = {
        "adaptive": False, "max_len": 128, "num_slots": 2, "page_size": 4, "device": "cpu",
    }  # fmt: skip
    return Engine(target, draft=draft, dtype=torch.float32, **(defaults | options))


def texts(engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.tokens for output in engine.generate(prompts, params)]


# The layers of all layouts are compared with the formula without an engine, too.
@pytest.mark.parametrize("name", thinned(CASES, ("glm4_moe", "qwen3_next hybrid").__contains__))
def test_texts_are_the_target_s_and_chains_the_formula_s(name: str, tmp_path: Path) -> None:
    folder = write_target_with_mtp(tmp_path / "target", name)
    reference, prompts = Reference(folder, name), random_prompts(3)
    comparison = Comparison(reference.target)
    expected = greedy_by_transformers(reference.target, prompts, 12, eos_token_id=None)
    drawn = [replace(GREEDY, temperature=0.9, top_p=0.95, seed=seed) for seed in range(3)]
    with make_engine(folder, None) as engine:
        plain = [engine.generate([prompt], params)[0].tokens for prompt, params in zip(prompts, drawn, strict=True)]
    for options in (CHAIN, TREE):
        # Patches end before the engine closes the draft, which forgets its attributes.
        with make_engine(folder, MTP(**options), prefill_chunk=7, rounds_in_flight=1) as engine, patched() as patch:
            drafted = record_chains(engine, patch)
            for prompt, ours, theirs in zip(prompts, texts(engine, prompts), expected, strict=True):
                comparison.check(prompt, ours, theirs)
            if options is CHAIN:
                compare_chains(reference, drafted, [p + t for p, t in zip(prompts, expected, strict=True)])
            outputs = [engine.generate([prompt], params)[0] for prompt, params in zip(prompts, drawn, strict=True)]
            assert [output.tokens for output in outputs] == plain
    assert len(comparison.near_ties) <= 1


def compare_chains(reference: Reference, drafted: list[tuple[int, list[int]]], whole: list[list[int]]) -> None:
    """Check that each chain is what the formula drafts after the first tokens of some text."""
    assert len(drafted) >= 15
    chains = {
        length: [reference.chain(text[: length + 1], 3)[0] for text in whole if length < len(text)]
        for length in {length for length, _ in drafted}
    }
    wrong = [length for length, chain in drafted if chain not in chains[length]]
    assert len(wrong) <= 1  # a near-tie


def test_drawn_drafts_and_unions_give_texts(tmp_path: Path) -> None:
    folder = write_target_with_mtp(tmp_path / "target", "glm4_moe")
    prompts = random_prompts(3)
    with make_engine(folder, None) as engine:
        expected = texts(engine, prompts)
    drafts = MTP(num_steps=3, topk=1, sampled=True), Union(MTP(**TREE), Ngram(num_nodes=8), num_nodes=10)
    for draft in drafts:
        with make_engine(folder, draft) as engine:
            assert texts(engine, prompts) == expected
            drawn = replace(GREEDY, temperature=1.0, seed=3)
            assert texts(engine, prompts[:1], drawn) == texts(engine, prompts[:1], drawn)


def test_layer_of_several_parts_keeps_the_text(tmp_path: Path) -> None:
    folder, prompts = tmp_path / "target", random_prompts(3)
    write_nemotron_with_mtp(folder)
    with make_engine(folder, None) as engine:
        expected = texts(engine, prompts)
    with make_engine(folder, MTP(**TREE)) as engine:
        assert texts(engine, prompts) == expected
    with make_engine(folder, MTP(**CHAIN), rounds_in_flight=1) as engine, patched() as patch:
        drafted = record_chains(engine, patch)
        assert texts(engine, prompts) == expected
        before = list(drafted)
        engine.sleep(2)
        engine.wake()
        engine.update_weights(load_file(folder / "model.safetensors"))
        drafted.clear()
        assert texts(engine, prompts) == expected
        assert drafted == before


def test_another_checkpoint_s_layer_drafts_as_the_target_s_own(tmp_path: Path) -> None:
    folder, prompts = write_target_with_mtp(tmp_path / "target", "mimo"), random_prompts(3)
    rounds = []
    for draft in (MTP(**TREE), MTP(folder, **TREE)):
        with make_engine(folder, draft) as engine:
            rounds.append([(out.tokens, out.stats.rounds) for out in engine.generate(prompts, GREEDY)])
    assert rounds[0] == rounds[1]


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_next"])
def test_update_weights_and_sleep_reach_the_layer(name: str, tmp_path: Path) -> None:
    folder, prompts = write_target_with_mtp(tmp_path / "target", name), random_prompts(2)
    weights = load_file(folder / "model.safetensors")
    with make_engine(folder, MTP(**CHAIN), rounds_in_flight=1) as engine, patched() as patch:
        drafted = record_chains(engine, patch)
        expected = texts(engine, prompts)
        before = list(drafted)
        engine.sleep(2)
        engine.wake()
        engine.update_weights(weights)
        drafted.clear()
        assert texts(engine, prompts) == expected
        assert drafted == before
        block = CASES[name].block
        half = {key: weight / 2 for key, weight in weights.items() if key.startswith(f"{block}self_attn.q_proj")}
        norm = f"{CASES[name].names['hnorm']}.weight"
        engine.update_weights(half | {norm: weights[norm].flip(0)})
        drafted.clear()
        assert texts(engine, prompts) == expected
        assert drafted != before
        with pytest.raises(ValueError, match=rf"^update_weights: weights has {block}mlp.unknown.weight, unknown to "):
            engine.update_weights({f"{block}mlp.unknown.weight": torch.ones(1)})


@pytest.mark.usefixtures("measured_costs")
@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_next hybrid"])
def test_adaptive_engines_with_a_prefix_cache_write_the_same_texts(name: str, tmp_path: Path) -> None:
    folder, prompts = write_target_with_mtp(tmp_path / "target", name), random_prompts(3)
    with make_engine(folder, None) as engine:
        expected = texts(engine, prompts)
    with make_engine(folder, MTP(**TREE), adaptive=True, prefix_cache=True) as engine:
        assert texts(engine, prompts) == expected
        assert texts(engine, prompts) == expected
        assert engine.stats().prefix_hits > 0


def test_a_migrated_request_goes_on_with_its_drafts(tmp_path: Path) -> None:
    folder, [prompt] = write_target_with_mtp(tmp_path / "target", "qwen3_next"), random_prompts(1)
    with make_engine(folder, MTP(**CHAIN)) as one, make_engine(folder, MTP(**CHAIN)) as other:
        expected = one.generate([prompt], replace(GREEDY, max_new_tokens=60))[0]
        request: Request = one.submit(prompt, replace(GREEDY, max_new_tokens=60))
        next(iter(request))
        try:
            request = other.import_request(one.export_request(request))
        except ValueError as error:
            assert str(error) == f"export_request: request {request.id} has ended, expected one that runs"
        assert request.result().tokens == expected.tokens


@pytest.mark.parametrize("name", ["mimo", "qwen3_5 hybrid"])
def test_drafts_without_an_mtp_layer_leave_its_tensors_out(name: str, tmp_path: Path) -> None:
    folder, prompts = write_target_with_mtp(tmp_path / "target", name), random_prompts(2)
    with make_engine(folder, MTP(**CHAIN)) as engine:
        expected = texts(engine, prompts)
    with make_engine(folder, Ngram(num_nodes=4)) as engine:
        assert texts(engine, prompts) == expected
        weights = load_file(folder / "model.safetensors")
        engine.update_weights(weights)
        for key in [key for key in weights if key.startswith(CASES[name].block)][:2]:  # by itself it has no layout
            engine.update_weights({key: weights[key]})
        assert texts(engine, prompts) == expected


def test_drafts_among_frequent_tokens_alone_keep_the_text(tmp_path: Path) -> None:
    folder, prompts = write_target_with_mtp(tmp_path / "target", "mimo"), random_prompts(2)
    torch.save(torch.arange(0, 150, 3), tmp_path / "frequent.pt")
    with make_engine(folder, None) as engine:
        expected = texts(engine, prompts)
    with make_engine(folder, MTP(vocabulary=tmp_path / "frequent.pt", **TREE)) as engine, patched() as patch:
        drafted = record_chains(engine, patch)
        assert texts(engine, prompts) == expected
    assert all(token % 3 == 0 for _, tree in drafted for token in tree)
    with pytest.raises(ValueError) as error:
        make_engine(folder, MTP(vocabulary=tmp_path / "frequent.pt", num_steps=2, topk=60))
    assert str(error.value) == "MTP: vocabulary has 50 tokens, expected at least topk=60"


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        MTP(3)  # type: ignore[arg-type]
    assert str(error.value) == "MTP: head is a int, expected a folder, a hub id, an MtpHead, a tuple of these or None"
    with pytest.raises(ValueError) as error:
        MTP(("a folder",))  # type: ignore[arg-type]
    assert str(error.value) == "MTP: head is a tuple, expected a folder, a hub id, an MtpHead, a tuple of these or None"
    folder = write_target_with_mtp(tmp_path / "target", "mimo")
    module = Reference(folder, "mimo").target
    module.config.name_or_path = ""
    with pytest.raises(ValueError) as error:
        make_engine(module, MTP(**CHAIN))
    assert str(error.value) == "MTP: head is None, expected a folder or hub id for a target that has none"


@pytest.mark.parametrize("layout", [NEXTN, *exhaustive(ERNIE)], ids=["nextn", "ernie"])
def test_synthetic_layer_is_accepted_as_often_as_published(layout: MtpLayout, tmp_path: Path) -> None:
    (target, text), acceptance = wide_target("tiny"), PublishedAcceptance("math", "mtp")
    save_with_mtp(target, synthetic_mtp(target, text, acceptance, layout), tmp_path / "target")
    expect_accepted_as_published(
        lambda draft: make_engine(tmp_path / "target", draft, max_len=640), text, acceptance.rates[:4]
    )


def test_synthetic_layer_refuses_a_text_that_is_too_long() -> None:
    config = shape_config("tiny")
    text = SyntheticText.of(config.vocab_size, 65)
    target = synthetic_causal_lm(config, text, device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"^synthetic_mtp: text has 65 tokens, expected at most 64$"):
        synthetic_mtp(target, text, EvenAcceptance(2.0), NEXTN)


SYNTHETIC: dict[str, tuple[str, dict[str, Any], MtpLayout]] = {
    "latent experts": ("deepseek_v3", LATENT | {"num_key_value_heads": 2}, NEXTN),
    "experts": ("glm4_moe", EXPERTS["glm4_moe"], NEXTN),
    "hybrid": ("qwen3_5_text", DELTA | {"layer_types": ["linear_attention", "full_attention"]}, QWEN),
    "hybrid experts": (
        "qwen3_next",
        DELTA | HYBRID_EXPERTS | {"layer_types": ["linear_attention", "full_attention"]},
        QWEN,
    ),
}


def write_synthetic(folder: Path, name: str) -> SyntheticText:
    """Write a synthetic target with an MTP layer whose chains of 3 give 2.5 tokens a round, and return its text."""
    model_type, sizes, layout = SYNTHETIC[name]
    common = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 2}
    common |= {"vocab_size": 256, "num_key_value_heads": 1, "max_position_embeddings": 512, "pad_token_id": None}
    config = AutoConfig.for_model(model_type, **(common | {"head_dim": 64, "tie_word_embeddings": False} | sizes))
    text = SyntheticText.of(256, 64)
    target = synthetic_causal_lm(config, text, device=torch.device("cpu"), dtype=torch.float32)
    save_with_mtp(target, synthetic_mtp(target, text, EvenAcceptance(2.5), layout), folder)
    return text


@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_layers_have_the_target_s_kind(name: str, tmp_path: Path) -> None:
    text = write_synthetic(tmp_path / "target", name)
    with make_engine(tmp_path / "target", MTP(num_steps=3, topk=1), max_len=300) as engine:
        [output] = engine.generate([text.tokens(3, 10)], SamplingParams(max_new_tokens=256, ignore_eos=True))
    assert output.tokens == text.tokens(13, 256)
    assert output.stats.accept_length == pytest.approx(2.5, rel=0.1)


@pytest.mark.parametrize(
    ("name", "options", "step"),
    [
        ("latent experts", CHAIN, 8),
        *exhaustive(
            *((name, options, 1) for name in ("latent experts", "hybrid experts") for options in (CHAIN, TREE))
        ),
    ],
)
def test_rounds_accept_the_same_at_any_batch_size(
    name: str, options: dict[str, Any], step: int, tmp_path: Path, device: torch.device
) -> None:
    """Rounds of 1 to 17 requests, padded to 17 and on a GPU captured, accept what rounds of their size accept."""
    text = write_synthetic(tmp_path / "target", name)
    prompts = [text.tokens(7 * i, 3 + i) for i in range(17)]
    defaults = {"num_slots": 17, "device": device, "max_len": 64}
    with (
        make_engine(tmp_path / "target", MTP(**options), batch_sizes=(17,), **defaults) as padded,
        make_engine(tmp_path / "target", MTP(**options), cuda_graph=False, **defaults) as eager,
    ):
        alone = [accepted_of(eager, [prompt])[0] for prompt in prompts]
        assert len({tuple(rounds) for rounds in alone}) > 4
        for count in range(1, 18, step):
            for engine in (padded, eager):
                assert accepted_of(engine, prompts[:count]) == alone[:count]


def accepted_of(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Return how many tokens each round gave each request."""
    requests = engine.submit_many(prompts, [GREEDY] * len(prompts))
    return [[count for new in request for count in new.rounds] for request in requests]


@pytest.mark.parametrize("name", ["fp8 weights alone", "awq"])
def test_quantized_targets_draft_with_a_layer_that_is_not(name: str, tmp_path: Path) -> None:
    folder, prompts = write_target_with_mtp(tmp_path / "target", "qwen3_next"), random_prompts(2)
    quantize(folder, name, r"model\.layers\..*_proj\.weight")
    with make_engine(folder, None) as engine:
        expected = texts(engine, prompts)
    with make_engine(folder, MTP(**TREE)) as engine:
        assert texts(engine, prompts) == expected


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("qwen3_next hybrid", "fp8 weights alone"),
        ("qwen3_5 hybrid", "packed"),
        *exhaustive(("qwen3_5 hybrid", "fp8 weights alone"), *(("qwen3_next hybrid", name) for name in INT4)),
    ],
)
def test_quantized_hybrids_draft_with_a_layer_that_is_not(case: str, name: str, tmp_path: Path) -> None:
    """Texts are those of the dequantized weights, with recurrent layers' projections among them."""
    folder = write_target_with_mtp(tmp_path / "target", case, {"head_dim": 64})
    prompts = random_prompts(2)
    twin = Path(shutil.copytree(folder, tmp_path / "twin"))
    means = quantize(folder, name, r"model\.layers\.\d+\..*(_proj|in_proj_\w+)\.weight")
    assert any("linear_attn" in key for key in load_file(folder / "model.safetensors") if key not in means)
    save_file(means, twin / "model.safetensors", metadata={"format": "pt"})
    with make_engine(twin, None) as engine:
        expected = texts(engine, prompts)
    for draft in (None, MTP(**TREE)):
        with make_engine(folder, draft) as engine:
            assert texts(engine, prompts) == expected
    kept = {
        key: tensor for key, tensor in load_file(folder / "model.safetensors").items() if not key.startswith("mtp.")
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"has no MTP layer under .* quantizers drop these tensors\)$"):
        make_engine(folder, MTP(**TREE))


@pytest.mark.parametrize("name", ["qwen3_next", *exhaustive("deepseek_v3")])
def test_layers_of_8_bits_keep_the_text(name: str, tmp_path: Path) -> None:
    folder, prompts = write_target_with_mtp(tmp_path / "target", name), random_prompts(2)
    quantize(folder, "fp8 weights alone", r".*_proj(_with_mqa)?\.weight")
    with make_engine(folder, None) as engine:
        expected = texts(engine, prompts)
    with make_engine(folder, MTP(**TREE)) as engine:
        assert texts(engine, prompts) == expected


def test_layers_of_4_bits_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_target_with_mtp(tmp_path / "target", "qwen3_next")
    quantize(folder, "awq", r".*_proj\.weight")
    with make_engine(folder, None) as engine:  # the target runs
        texts(engine, random_prompts(1))
    with pytest.raises(ValueError, match=r"has mtp\.layers\.0\..*_proj\.\w+ of torch\.int32, expected one of"):
        make_engine(folder, MTP(**CHAIN))
