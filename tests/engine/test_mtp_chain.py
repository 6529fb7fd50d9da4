"""Chains of MTP layers as drafts: texts are the target's, and drafts those of the layers' formula."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from specdec_kernels.cli.doctor_measure import Recorder, Text, measure, record, write_texts
from specdec_kernels.engine import MTP, Draft, Engine, Ngram, Request, SamplingParams, Union
from specdec_kernels.models.heads.base import Features
from specdec_kernels.models.layers.paged_batch import PagedBatch
from specdec_kernels.models.weights.mtp_layouts import STEP
from specdec_kernels.synthetic.acceptance import EvenAcceptance, PublishedAcceptance
from specdec_kernels.synthetic.models import SyntheticText, synthetic_causal_lm
from specdec_kernels.synthetic.mtp import mtp_text_length, save_with_mtp, synthetic_mtp, synthetic_mtp_heads
from specdec_kernels.synthetic.shapes import shape_config
from support.exhaustive import exhaustive
from support.leaks import expect_nothing_lost
from support.mtp_checkpoints import NUM_LAYERS, ChainReference, write_target_with_chain
from support.observed_rounds import wrap_method
from support.random_checkpoints import VOCAB, random_prompts
from support.recorded_chains import record_chains
from support.step_cases import StepReference, write_step
from support.synthetic_mtp import expect_accepted_as_published, wide_target
from support.tiny_checkpoint import Comparison, greedy_by_transformers

patched = pytest.MonkeyPatch.context
LAYERS = 3
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)
MODULES = [  # of a published MTP layer
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "g_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    *("input_layernorm", "post_attention_layernorm", "enorm", "hnorm", "eh_proj"),
    *("transformer.shared_head.norm", "transformer.shared_head.output"),
]
TREE: dict[str, Any] = {"num_steps": LAYERS, "topk": 3, "num_nodes": 10}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target_with_chain(tmp_path_factory.mktemp("chain") / "target", LAYERS)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Also prompts with fewer tokens than there are layers."""
    first, second, third = random_prompts(3)
    return [first, [5], second, [7, 9], third]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    with make_engine(folder, None) as engine:
        return texts(engine, prompts)


def make_engine(target: Any, draft: Draft | None, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"adaptive": False, "max_len": 128, "num_slots": 2, "page_size": 4}
    return Engine(target, draft=draft, dtype=torch.float32, device="cpu", **(defaults | options))


def texts(engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.tokens for output in engine.generate(prompts, params)]


@pytest.mark.parametrize("num_steps", [*exhaustive(1, 2), 3])
def test_texts_are_the_target_s_and_chains_the_formula_s(
    num_steps: int, folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    reference = ChainReference(folder, LAYERS)
    comparison = Comparison(reference.target)
    theirs = greedy_by_transformers(reference.target, prompts, 12, eos_token_id=None)
    draft = MTP(num_steps=num_steps, topk=1)
    with make_engine(folder, draft, prefill_chunk=7, rounds_in_flight=1) as engine, patched() as patch:
        drafted = record_chains(engine, patch)
        for prompt, ours, text in zip(prompts, texts(engine, prompts), theirs, strict=True):
            comparison.check(prompt, ours, text)
    assert len(comparison.near_ties) <= 1
    compare_chains(reference, drafted, [p + t for p, t in zip(prompts, expected, strict=True)], num_steps)


def compare_chains(
    reference: ChainReference | StepReference,
    drafted: list[tuple[int, list[int]]],
    whole: list[list[int]],
    num_steps: int,
) -> None:
    """Check that each chain is what the formula drafts after the first tokens of some text."""
    for length, chain in drafted:
        if length < num_steps:  # nodes without a draft are copies of the root
            assert chain in [num_steps * [text[length]] for text in whole if length < len(text)]
    drafted = [(length, chain) for length, chain in drafted if length >= num_steps]
    assert len(drafted) >= 30
    chains = {
        length: [reference.chain(text[: length + 1], num_steps)[0] for text in whole if length < len(text)]
        for length in {length for length, _ in drafted}
    }
    wrong = [length for length, chain in drafted if chain not in chains[length]]
    assert len(wrong) <= 1  # a near-tie


@pytest.mark.parametrize(
    "make",
    [
        lambda: MTP(**TREE),
        lambda: MTP(num_steps=2, topk=1, sampled=True),
        *exhaustive(lambda: Union(MTP(**TREE), Ngram(num_nodes=8), num_nodes=10)),
    ],
    ids=["tree", "drawn", "union"],
)
def test_drafts_keep_the_text(make: Any, folder: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    with make_engine(folder, make(), adaptive=True) as engine:
        assert texts(engine, prompts) == expected
        drawn = replace(GREEDY, temperature=1.0, seed=3)
        assert [len(text) for text in texts(engine, prompts[:2], drawn)] == [12, 12]


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_step(tmp_path_factory.mktemp("step") / "target", LAYERS)


@pytest.mark.parametrize("page_size", [4, *exhaustive(1, 16, 64)])
@pytest.mark.parametrize(
    "make",
    [lambda: MTP(num_steps=LAYERS, topk=1), lambda: MTP(**TREE), lambda: Ngram(num_nodes=9)],
    ids=["chain", "tree", "ngram"],
)
def test_step_drafts_by_its_layers_and_keeps_the_text(
    make: Any, page_size: int, step: Path, prompts: list[list[int]]
) -> None:
    """Layers of the target and of the chain have other heads, rotations and windows than their neighbors."""
    draft, reference = make(), StepReference(step, LAYERS)
    comparison = Comparison(reference.target)
    theirs = greedy_by_transformers(reference.target, prompts, 12, eos_token_id=None)
    options = {"page_size": page_size, "prefill_chunk": 7, "prefix_cache": True, "num_slots": 5}
    with make_engine(step, draft, rounds_in_flight=1, **options) as engine, patched() as patch:
        is_chain = isinstance(draft, MTP) and draft.topk == 1
        drafted = record_chains(engine, patch) if is_chain else []
        for _ in range(2):  # from an empty prefix cache, and with hits
            for prompt, ours, text in zip(prompts, texts(engine, prompts), theirs, strict=True):
                comparison.check(prompt, ours, text)
        assert page_size > 60 or engine.stats().prefix_hits > 0  # prompts have fewer tokens
        expect_nothing_lost(engine)
    assert len(comparison.near_ties) <= 1
    if is_chain:
        compare_chains(reference, drafted, [p + t for p, t in zip(prompts, theirs, strict=True)], LAYERS)


@pytest.mark.parametrize("in_memory", [False, *exhaustive(True)])
def test_synthetic_chain_is_accepted_as_often_as_published(in_memory: bool, tmp_path: Path) -> None:
    (target, text), acceptance = wide_target("tiny-step"), PublishedAcceptance("math", "mtp")
    if not in_memory:
        save_with_mtp(target, synthetic_mtp(target, text, acceptance, STEP), tmp_path / "target")
    heads = synthetic_mtp_heads(target, text, acceptance) if in_memory else None
    source = target if in_memory else tmp_path / "target"
    expect_accepted_as_published(
        lambda draft: make_engine(source, draft, max_len=640), text, acceptance.rates[:LAYERS], heads
    )


def test_synthetic_chain_is_written_as_published(tmp_path: Path) -> None:
    config = shape_config("tiny-step:5")
    text = SyntheticText.of(config.vocab_size, mtp_text_length(config))
    target = synthetic_causal_lm(config, text, device=torch.device("cpu"), dtype=torch.float32)
    tensors = synthetic_mtp(target, text, EvenAcceptance(2.0), STEP)
    save_with_mtp(target, tensors, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    scaling = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0}
    scaling |= {"original_max_position_embeddings": 2048}
    types = ["full_attention", *3 * ["sliding_attention"], "full_attention", *3 * ["sliding_attention"]]
    assert written["layer_types"] == types and written["moe_layers_enum"] == "3,4"
    assert written["rope_theta"] == [5e6 if kind == "full_attention" else 1e4 for kind in types]
    assert written["partial_rotary_factors"] == [0.5 if kind == "full_attention" else 1.0 for kind in types]
    assert written["rope_scaling"] == scaling and "rope_parameters" not in written
    assert (written["num_attention_groups"], written["moe_num_experts"], written["moe_top_k"]) == (2, 8, 2)
    assert written["attention_other_setting"]["num_attention_heads"] == 4
    assert {name.rpartition(".")[0] for name in tensors if ".7." in name} == {
        f"model.layers.7.{module}" for module in MODULES
    }
    again, values = (each.to_dict() for each in (AutoConfig.from_pretrained(tmp_path), config))
    files = {"architectures", "dtype", "transformers_version", "_name_or_path"}
    assert {key for key in values if again.get(key) != values[key]} <= files


def test_retracted_requests_draft_what_they_would_have(folder: Path, prompts: list[list[int]]) -> None:
    params = replace(GREEDY, max_new_tokens=24)
    reference = ChainReference(folder, LAYERS)
    with make_engine(folder, None) as engine:
        expected = texts(engine, prompts, params)
    tight = {"max_len": 96, "num_slots": 5, "num_pages": 27, "rounds_in_flight": 1}
    with make_engine(folder, MTP(num_steps=3, topk=1), **tight) as engine, patched() as patch:
        drafted = record_chains(engine, patch)
        assert texts(engine, prompts, params) == expected
        assert engine.stats().retractions > 0
    compare_chains(reference, drafted, [p + t for p, t in zip(prompts, expected, strict=True)], 3)


def test_a_migrated_request_goes_on_with_its_drafts(folder: Path, prompts: list[list[int]]) -> None:
    params, prompt = replace(GREEDY, max_new_tokens=40), prompts[0]
    with make_engine(folder, MTP(num_steps=3, topk=1)) as one, make_engine(folder, MTP(num_steps=3, topk=1)) as other:
        expected = one.generate([prompt], params)[0]
        wrap_method(one.core.executor, "launch", start_late)
        with patched() as patch:
            drafted = record_chains(other, patch)
            request: Request = one.submit(prompt, params)
            next(iter(request))
            try:
                request = other.import_request(one.export_request(request))
            except ValueError as error:
                assert str(error) == f"export_request: request {request.id} has ended, expected one that runs"
            assert request.result().tokens == expected.tokens
    reference, text = ChainReference(folder, LAYERS), prompt + expected.tokens
    wrong = [length for length, chain in drafted if chain != reference.chain(text[: length + 1], 3)[0]]
    assert len(wrong) <= 1


def start_late(begin: Any, *size: int) -> None:
    time.sleep(0.005)
    begin(*size)


def test_layers_sleep_and_take_new_weights(folder: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    weights = load_file(folder / "model.safetensors")
    with make_engine(folder, MTP(num_steps=3, topk=1), rounds_in_flight=1, num_slots=1) as engine, patched() as patch:
        drafted = record_chains(engine, patch)
        assert texts(engine, prompts) == expected
        before = list(drafted)
        engine.sleep(2)
        engine.wake()
        engine.update_weights(weights)
        drafted.clear()
        assert texts(engine, prompts) == expected
        assert drafted == before
        norm = f"model.layers.{NUM_LAYERS + 2}.hnorm.weight"
        engine.update_weights({norm: weights[norm].flip(0)})
        drafted.clear()
        assert texts(engine, prompts) == expected
        chains, others = ([chain for _, chain in each] for each in (before, drafted))
        assert chains != others
        with pytest.raises(ValueError, match=r"^update_weights: draft has lm_head.weight, expected names that "):
            engine.update_weights(draft={"lm_head.weight": weights["lm_head.weight"]})


def test_rows_of_no_slot_read_and_write_nothing(folder: Path) -> None:
    """Slot 0, whose lengths they read, may be free, with a longer backlog than rows."""
    with make_engine(folder, MTP(num_steps=LAYERS, topk=1)) as engine:
        chain: Any = engine.draft.module
        rows, none = torch.zeros(2, 3, dtype=torch.int32), torch.full((2,), -1, dtype=torch.int32)
        lens = torch.tensor([-5, 0], dtype=torch.int32)
        batch = PagedBatch(none, engine.state.pool.page_table, lens, tail_len=3, num_valid=torch.zeros_like(lens))
        features = Features(torch.ones(rows.numel(), chain.config.hidden_size))
        chain.prefill(rows, features, rows, batch)
        assert not any(bool(pool.any()) for pools in chain.all_pools for kv in pools.layers for pool in kv.pools)


def test_weights_of_layers_that_do_not_draft_are_left_out(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with make_engine(folder, MTP(num_steps=2, topk=1)) as engine:
        engine.update_weights(load_file(folder / "model.safetensors"))
        assert texts(engine, prompts) == expected


def test_what_is_not_computed_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ValueError) as error:
        make_engine(folder, MTP(num_steps=4, topk=1))
    assert str(error.value) == (
        "MTP: num_steps is 4, expected at most 3 for a checkpoint with 3 MTP layers (each drafts one step)"
    )


@pytest.mark.parametrize("page_size", [4, *exhaustive(1, 2, 16)])
@pytest.mark.parametrize(("num_rows", "rounds_in_flight"), [(2400, 1), *exhaustive((280, 2))])
def test_cached_prefixes_draft_what_whole_prompts_do(
    num_rows: int, rounds_in_flight: int, page_size: int, folder: Path
) -> None:
    """Prompts that are equal, longer, shorter, or diverge next to the end of a page, and conversations."""
    reference = ChainReference(folder, LAYERS)
    text, other = torch.randint(VOCAB, (26,)).tolist(), [7, 9, 11]
    asked = [text, text, text + other, *(text[:end] + other for end in (4, 7, 17)), text[:9], text[:2]]
    params = replace(GREEDY, max_new_tokens=6)
    with make_engine(folder, None, prefix_cache=False) as engine:
        expected = texts(engine, asked, params)
    sizes = {"page_size": page_size, "num_pages": num_rows // page_size, "num_slots": 4, "prefill_chunk": 7}
    options = sizes | {"rounds_in_flight": rounds_in_flight, "prefix_cache": True}
    with make_engine(folder, MTP(num_steps=LAYERS, topk=1), **options) as engine, patched() as patch:
        drafted = record_chains(engine, patch)
        assert [texts(engine, [prompt], params)[0] for prompt in asked] == expected
        assert texts(engine, asked, params) == expected
        turns = [[*prompt, *answer, 5, 6] for prompt, answer in zip(asked[1:3], expected[1:3], strict=True)]
        answers = texts(engine, turns, params)
        assert engine.stats().prefix_hits > 5
        expect_nothing_lost(engine)
    whole = [p + t for p, t in zip([*asked, *turns], [*expected, *answers], strict=True)]
    compare_chains(reference, drafted, whole, LAYERS)


@pytest.mark.parametrize("num_steps", [LAYERS, *exhaustive(1, 2)])
def test_doctor_measures_each_layer_at_its_depth(num_steps: int, folder: Path, prompts: list[list[int]]) -> None:
    reference, recorder = ChainReference(folder, LAYERS), Recorder([NUM_LAYERS])
    with make_engine(folder, recorder) as engine:
        texts = record(engine, prompts, write_texts(engine, prompts, 20))
        # Drafts of the layers follow many tokens, so that roots have right drafts of all depths.
        texts = [text._replace(tokens=favored(reference, text, num_steps)) for text in texts]
        texts = record(engine, prompts, [text.tokens for text in texts])
        found = measure(MTP(folder, num_steps=num_steps, topk=1), num_steps, engine.target, texts)
    right, roots = [0] * num_steps, 0
    for text in texts:
        for root in range(len(text.prompt), len(text.tokens) - num_steps):
            roots += 1
            if root < num_steps:
                continue  # the text is too short for drafts
            chain, _ = reference.chain(text.tokens[: root + 1], num_steps)
            for depth in range(num_steps):
                if chain[: depth + 1] != text.tokens[root + 1 : root + depth + 2]:
                    break
                right[depth] += 1
    assert found.reached[0] == roots and right[-1] > 5
    assert all(abs(ours - theirs) <= 1 for ours, theirs in zip(found.right, right, strict=True))  # a near-tie


def favored(reference: ChainReference, text: Text, num_steps: int) -> list[int]:
    """Return a text of the same length in which the layers' drafts follow many tokens."""
    tokens = text.tokens[: len(text.prompt) + 1]
    while len(tokens) < len(text.tokens):
        chain = reference.chain(tokens, num_steps)[0] if len(tokens) > num_steps else []
        tokens = [*tokens, *chain, *text.tokens[len(tokens) + len(chain) :][:2]]
    return tokens[: len(text.tokens)]
