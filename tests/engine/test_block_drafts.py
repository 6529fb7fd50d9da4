"""Block drafters: texts are the target's, and drafts those of the formulas."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from specdec_kernels.engine import (
    DFlash,
    Draft,
    DSpark,
    Engine,
    JetSpec,
    Ngram,
    SamplingParams,
    Union,
)
from specdec_kernels.engine.drafts.composition import pools_of
from specdec_kernels.models.heads.block import DSparkHead
from specdec_kernels.models.heads.block_config import BlockConfig, expect_architecture
from specdec_kernels.models.layers.quantized import QuantizedLinear
from specdec_kernels.synthetic.acceptance import EvenAcceptance, PublishedAcceptance, mean_accept_length
from specdec_kernels.synthetic.block import block_text_length, save_block_drafter, synthetic_block
from specdec_kernels.synthetic.models import SyntheticText, synthetic_causal_lm
from specdec_kernels.synthetic.shapes import shape_config
from support.block_drafters import CASES, CLASSES, Drafter, Tree, draft_of, is_same, record, write_drafter, write_target
from support.exhaustive import exhaustive, thinned
from support.observed_rounds import wrap_launch
from support.random_checkpoints import random_prompts
from support.sampled_texts import distribution, expect_distribution
from support.tiny_checkpoint import Comparison, accept_length, greedy_by_transformers

GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)
NODES, CANDIDATES = 12, 6


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("block") / "target")


def make_engine(target: Path, draft: Draft | None, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"adaptive": False, "max_len": 128, "num_slots": 2, "page_size": 4, "prefill_chunk": 7}
    return Engine(target, draft=draft, dtype=torch.float32, device="cpu", **(defaults | options))


@pytest.mark.parametrize("name", thinned(CASES, ("dflash window", "dflash2", "dspark", "dspark gated").__contains__))
def test_texts_are_the_target_s_and_trees_the_formula_s(name: str, target: Path, tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter", name)
    formula, prompts = Drafter(target, folder), random_prompts(2)
    comparison = Comparison(formula.target)
    expected = greedy_by_transformers(formula.target, prompts, 12, eos_token_id=None)
    is_chain = "rnn" in name
    options = {} if is_chain else {"num_nodes": NODES, "num_candidates": CANDIDATES}
    # Patches end before the engine closes the draft, which forgets its attributes. The calibration stays as it is.
    with make_engine(target, draft_of(name, folder, **options), batch_invariant=True) as engine, patched() as patch:
        drafted = record(engine, patch)
        for prompt, output, theirs in zip(prompts, engine.generate(prompts, GREEDY), expected, strict=True):
            comparison.check(prompt, output.tokens, theirs)
    assert len(drafted) >= 12
    wholes = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    for length, tree in drafted[::3]:
        texts = [whole[: length + 1] for whole in wholes if length < len(whole)]
        if is_chain:
            chains = [formula.chain(text) for text in texts]
            assert list(max(tree, key=len)) in chains
        else:
            assert any(is_same(tree, formula.tree(text, NODES - 1, CANDIDATES)) for text in texts)
    assert len(comparison.near_ties) <= 1


patched = pytest.MonkeyPatch.context


@pytest.mark.parametrize("name", ["dspark", "dspark neighbors"])
def test_chain_of_a_serial_head_is_the_best_token_after_each(name: str, target: Path, tmp_path: Path) -> None:
    """The confidence head reads the Markov embedding in one of them, and states alone in the other."""
    folder = write_drafter(tmp_path / "drafter", name)
    formula, prompts = Drafter(target, folder), random_prompts(2)
    draft = DSpark(folder, topk=1, num_candidates=64)
    with make_engine(target, draft, batch_invariant=True) as engine, patched() as patch:
        drafted = record(engine, patch)
        wholes = [p + o.tokens for p, o in zip(prompts, engine.generate(prompts, GREEDY), strict=True)]
    for length, tree in drafted[::4]:
        chains = [formula.chain(whole[: length + 1]) for whole in wholes if length < len(whole)]
        chain = list(max(tree, key=len))
        assert chain in chains and len(tree) == formula.depth
        # Its scores are the confidence head's.
        texts = [whole[: length + 1] for whole in wholes if length < len(whole)]
        want = formula.confidences(texts[chains.index(chain)])
        assert sorted(tree.values(), reverse=True) == pytest.approx(want, abs=2e-3)


@pytest.mark.parametrize(
    "name", thinned(("dspark", "dflash window", "dflash2", "dspark reduced"), ("dspark", "dflash2").__contains__)
)
def test_weights_in_8_bits_draft_the_tree_of_rounded_weights_and_the_same_text(
    name: str, target: Path, tmp_path: Path
) -> None:
    folder = write_drafter(tmp_path / "drafter", name)
    [prompt] = random_prompts(1)
    texts, trees, sizes = [], [], []
    for weights in (None, "fp8", "fp8-head"):
        draft = draft_of(name, folder, num_nodes=NODES, num_candidates=CANDIDATES, draft_weights=weights)
        with make_engine(target, draft, batch_invariant=True) as engine, patched() as patch:
            drafted = record(engine, patch)
            texts.append(engine.generate([prompt], GREEDY)[0].tokens)
            trees.append(drafted[0][1])
            sizes.append(sum(weight.nbytes for weight in draft.loaded.weights.values()))  # type: ignore[attr-defined]
    assert texts[0] == texts[1] == texts[2] and sizes[2] == sizes[1] < 0.7 * sizes[0]
    text, is_shared = [*prompt, texts[0][0]], "reduced" not in name
    own, whole = (Drafter(target, folder, weights=w).tree(text, NODES - 1, CANDIDATES) for w in ("fp8", "fp8-head"))
    assert distance(trees[1], own) < 0.02 < distance(trees[0], own)
    assert distance(trees[2], whole) < 0.02 and (distance(trees[1], whole) > 0.02) == is_shared


def distance(one: Tree, other: Tree) -> float:
    """Return the mean difference of the scores of paths that both trees have, at least half of them."""
    common = one.keys() & other.keys()
    assert 2 * len(common) >= len(one)
    return sum(abs(one[path] - other[path]) for path in common) / len(common)


@pytest.mark.parametrize("name", thinned(("dflash window", "dspark"), "dflash window".__eq__))
def test_kv_in_8_bits_drafts_nearly_the_same_tree_and_the_same_text(name: str, target: Path, tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter", name)
    prompts = random_prompts(2)
    texts, trees, sizes = [], [], []
    for kv_dtype in (None, "fp8_e4m3"):
        draft = draft_of(name, folder, num_nodes=NODES, num_candidates=CANDIDATES, kv_dtype=kv_dtype)
        with make_engine(target, draft, batch_invariant=True) as engine, patched() as patch:
            drafted = record(engine, patch)
            texts.append([output.tokens for output in engine.generate(prompts, GREEDY)])
            trees.append(drafted[0][1])
            sizes.append(pools_of(draft)[0].num_bytes)
    assert texts[0] == texts[1] and 4 * sizes[1] == sizes[0]
    assert 1e-4 < distance(*trees) < 0.5


@pytest.mark.parametrize("prefix_cache", [False, None])
def test_pools_of_layers_with_a_window_are_as_small_as_it(
    prefix_cache: bool | None, target: Path, tmp_path: Path
) -> None:
    """They have all rows with a prefix cache, the default: a cached page serves requests that see other rows of it."""
    folder = write_drafter(tmp_path / "drafter", "dflash window")
    formula, prompts = Drafter(target, folder), random_prompts(2)
    expected = greedy_by_transformers(formula.target, prompts, 60, eos_token_id=None)
    options: dict[str, Any] = {"max_len": 128, "page_size": 4, "prefill_chunk": 7, "prefix_cache": prefix_cache}
    if prefix_cache is False:
        options["batch_invariant"] = True  # the calibration stays as it is
    draft = DFlash(folder, num_nodes=NODES, num_candidates=CANDIDATES)
    with make_engine(target, draft, **options) as engine, patched() as patch:
        drafted = record(engine, patch)
        params = replace(GREEDY, max_new_tokens=60)
        assert [output.tokens for output in engine.generate(prompts, params)] == expected
        windowed, full = sorted(pools_of(draft)[0].groups, key=lambda group: group.layout.window or 1000)
        slots, whole = 2, full.pools[0].shape[1]
        # The window, the rows that a round or a chunk writes, and two pages that are used in part.
        held = slots * (-(-(7 + NODES + 1) // 4) + 1)
        assert windowed.pools[0].shape[1] == (whole if prefix_cache is None else held)
        assert held < whole / 2
    wholes = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    for length, tree in drafted[::12] if prefix_cache is False else ():  # far beyond the window
        texts = [text[: length + 1] for text in wholes if length < len(text)]
        assert any(is_same(tree, formula.tree(text, NODES - 1, CANDIDATES)) for text in texts)


@pytest.mark.exhaustive
def test_weights_in_8_bits_of_a_given_head_are_a_copy_that_sleeps_and_is_updated(tmp_path: Path) -> None:
    target, text = synthetic()
    config, tensors = synthetic_block(target, text, EvenAcceptance(4.0), "dspark", num_layers=4, rank=32)
    folder = save_block_drafter(config, tensors, tmp_path / "dspark")
    prompt, expected, params = text.tokens(3, 10), text.tokens(13, 40), replace(GREEDY, max_new_tokens=40)
    with make_engine(target, DSpark(folder, topk=1)) as engine:
        head = engine.draft.loaded  # type: ignore[attr-defined]
        before = {name: parameter.clone() for name, parameter in head.named_parameters()}
        with make_engine(target, DSpark(head, topk=1, draft_weights="fp8-head")) as other:
            loaded: Any = other.draft.loaded  # type: ignore[attr-defined]
            assert isinstance(loaded.layers[0].mlp.down_proj, QuantizedLinear)
            for sleeps in (False, True):
                if sleeps:
                    other.sleep()
                    other.wake()
                [output] = other.generate([prompt], params)
                assert output.tokens == expected and output.stats.accept_length > 3
            name = "layers.0.self_attn.o_proj.weight"
            other.update_weights(draft={name: torch.zeros_like(tensors[name])})
            [output] = other.generate([prompt], params)
            assert output.tokens == expected and output.stats.accept_length < 2
            other.update_weights(draft={name: tensors[name]})
            [output] = other.generate([prompt], params)
            assert output.stats.accept_length > 3
            halves = before["lm_head.weight"] / 2
            other.update_weights({"lm_head.weight": halves})  # the copy in 8 bits follows
            assert torch.allclose(loaded.logits_weight.dequantize(), halves, rtol=0.07, atol=1e-4)
            other.update_weights({"lm_head.weight": before["lm_head.weight"]})
        assert all(torch.equal(before[name], parameter) for name, parameter in head.named_parameters())
        assert engine.generate([prompt], params)[0].tokens == expected


@pytest.mark.parametrize("name", thinned(("dspark", "dspark rnn", "dflash"), "dspark".__eq__))
def test_drawn_blocks_give_texts_and_unions_the_target_s(name: str, target: Path, tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter", name)
    prompts = random_prompts(3)
    with make_engine(target, None) as engine:
        plain = [output.tokens for output in engine.generate(prompts, GREEDY)]
    with make_engine(target, draft_of(name, folder, topk=1, sampled=True)) as engine:
        assert [output.tokens for output in engine.generate(prompts, GREEDY)] == plain
        drawn = engine.generate(prompts, replace(GREEDY, temperature=0.8, seed=3))
        assert [len(output.tokens) for output in drawn] == [12] * 3
    with make_engine(target, Union(draft_of(name, folder), Ngram(), num_nodes=16), adaptive=True) as engine:
        assert [output.tokens for output in engine.generate(prompts, GREEDY)] == plain


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "temperature"), [("dspark", 2.0), ("dspark gated", 2.0), ("dspark rnn", 2.0), ("dflash", 2.0)]
)
def test_drawn_texts_have_the_distribution_of_the_target(name: str, temperature: float, tmp_path: Path) -> None:
    """Chi-square of texts of a small vocabulary: a random drafter has some of its tokens accepted."""
    vocab, prompt = 10, [3, 1, 4, 1, 5]
    target = write_target(tmp_path / "target", vocab_size=vocab)
    changes: dict[str, Any] = {"vocab_size": vocab, "mask_token_id": vocab - 1}
    if name == "dflash":
        changes = {"vocab_size": vocab, "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": vocab - 1}}
    folder = write_drafter(tmp_path / "drafter", name, **changes)
    params = [SamplingParams(4, ignore_eos=True, seed=seed, temperature=temperature, top_k=4) for seed in range(2000)]
    with make_engine(target, draft_of(name, folder, topk=1, sampled=True), num_slots=50, max_len=32) as engine:
        outputs = engine.generate([prompt] * len(params), params)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    freedom = expect_distribution(outputs, distribution(model, prompt, params[0]))
    assert freedom > 8 and accept_length(outputs) > 1.1


@pytest.mark.parametrize("sees_its_token", [False, *exhaustive(True)])
def test_drawn_chains_cut_by_confidence_have_the_target_s_distribution_unless_it_sees_the_token(
    sees_its_token: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square of two tokens whose rounds verify those drafts of a batch that the confidence head rates highest."""
    vocab, prompt = 4, [2, 1, 0, 1, 2]
    target = write_target(tmp_path / "target", vocab_size=vocab)
    folder = write_drafter(tmp_path / "drafter", "dspark", vocab_size=vocab, mask_token_id=vocab - 1)
    params = [SamplingParams(4, ignore_eos=True, seed=seed, temperature=2.0) for seed in range(1000)]

    def confidence(head: Any, states: torch.Tensor, roots: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Depend strongly on the token before, or on the token itself."""
        seen = tokens if sees_its_token else torch.cat([roots[:, None], tokens[:, :-1]], 1)
        return -2.0 * (seen % 3)

    monkeypatch.setattr(DSparkHead, "confidence", confidence)
    draft, counts = DSpark(folder, topk=1, sampled=True), set[int]()
    # It would learn that such a confidence means nothing.
    with make_engine(target, draft, adaptive=True, calibrate=False, num_slots=50, max_len=32) as engine:
        wrap_launch(engine, lambda launch, batch, rows, most: launch(batch, 3 * batch // 2 if rows > 0 else rows, most))
        round: Any = engine.core.executor.round
        commit = round.commit

        def noted(drafted: Any) -> Any:
            counts.update(drafted.shares.cu_seqlens.diff().tolist())
            return commit(drafted)

        round.commit = noted
        outputs = engine.generate([prompt] * len(params), params)
    assert counts >= {1, 2, 3}  # requests of one round differ
    want = Counter[tuple[int, ...]]()
    for text, chance in distribution(AutoModelForCausalLM.from_pretrained(target), prompt, params[0]).items():
        want[text[1:3]] += chance  # type: ignore[assignment]
    drafted = [replace(output, tokens=output.tokens[1:3]) for output in outputs]
    if sees_its_token:
        with pytest.raises(AssertionError):
            expect_distribution(drafted, want)  # type: ignore[arg-type]
    else:
        assert expect_distribution(drafted, want) > 8  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["dspark", "dflash window"])
def test_tuning_has_the_calibration_of_drawn_chains_with_confidence(name: str, target: Path, tmp_path: Path) -> None:
    folder, params = write_drafter(tmp_path / "drafter", name), replace(GREEDY, temperature=1.0, seed=1)
    with make_engine(target, draft_of(name, folder, topk=1, sampled=True)) as engine:
        engine.generate(random_prompts(2), params)
        tuning = engine.tuning
    assert len(tuning["calibrations"]) == ("dspark" in name)
    with make_engine(target, draft_of(name, folder, topk=1, sampled=True), tuning=tuning) as engine:
        assert engine.tuning["calibrations"] == tuning["calibrations"]
    for entry in tuning["calibrations"]:
        assert entry["draft"] == "DSpark" and torch.tensor(entry["counts"]).any()


def synthetic() -> tuple[Any, SyntheticText]:
    """Return a synthetic target and its text, with room for the values of a block drafter."""
    config = shape_config("tiny")
    config.update({"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024})
    text = SyntheticText.of(config.vocab_size, block_text_length(config))
    return synthetic_causal_lm(config, text, device=torch.device("cpu"), dtype=torch.float32), text


@pytest.mark.parametrize("kind", thinned(("dspark", "dflash"), "dspark".__eq__))
def test_synthetic_drafter_has_the_published_acceptance_and_its_tree_more(
    kind: Literal["dspark", "dflash"], tmp_path: Path
) -> None:
    target, text = synthetic()
    acceptance = PublishedAcceptance("chat", kind)
    folder = save_block_drafter(
        *synthetic_block(target, text, acceptance, kind, num_layers=4, rank=32), tmp_path / kind
    )
    lengths = []
    for options in ({"topk": 1}, {"num_nodes": 16}, {"num_nodes": 32}):
        draft = CLASSES[kind](folder, **options)
        with make_engine(target, draft, max_len=200, prefill_chunk=512) as engine:
            [output] = engine.generate([text.tokens(3, 10)], replace(GREEDY, max_new_tokens=128))
        assert output.tokens == text.tokens(13, 128)
        lengths.append(output.stats.accept_length)
    chain, small, large = lengths
    assert chain == pytest.approx(mean_accept_length(acceptance.rates), rel=0.1)
    assert chain + 0.5 < small < large - 0.3


def test_union_with_the_index_accepts_what_each_alone_accepts_on_a_repetitive_text(tmp_path: Path) -> None:
    target, text = synthetic()
    made = synthetic_block(target, text, PublishedAcceptance("chat", "dspark"), "dspark", num_layers=4, rank=32)
    folder, params = save_block_drafter(*made, tmp_path / "dspark"), replace(GREEDY, max_new_tokens=90)
    prompt = text.tokens(3, 90)  # the text repeats itself after 128 tokens
    lengths = []
    drafts = DSpark(folder, num_nodes=16), Ngram(num_nodes=16)
    for draft in (*drafts, Union(DSpark(folder, num_nodes=16), Ngram(num_nodes=16), num_nodes=32)):
        with make_engine(target, draft, max_len=256, num_slots=1, prefill_chunk=512) as engine:
            [output] = engine.generate([prompt], params)
        assert output.tokens == text.tokens(93, 90)
        lengths.append(output.stats.accept_length)
    block, index, both = lengths
    assert both >= max(block, index) > 1.5 and both > block + 0.3


def test_synthetic_drafter_refuses_by_name() -> None:
    target, text = synthetic()
    acceptance = EvenAcceptance(3.0)
    with pytest.raises(ValueError, match=r"^synthetic_block: num_layers is 3, expected at least 4 for 7 rows$"):
        synthetic_block(target, text, acceptance, "dspark", num_layers=3)
    longer = SyntheticText.of(1024, 129)
    with pytest.raises(ValueError, match=r"^synthetic_block: text has 129 tokens, expected at most 128$"):
        synthetic_block(target, longer, acceptance, "dflash")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("dflash", {"architectures": ["Gemma4DSparkModel"]}, "architectures is ['Gemma4DSparkModel'], expected one of"),
        ("dflash", {"dflash_config": {"new_entry": 1}}, "config has new_entry, expected no entries that are unknown"),
        ("dflash", {"use_gemma_norm": True}, "use_gemma_norm is True, expected False (not supported)"),
        ("dflash", {"num_target_layers": 9}, "num_target_layers is 9, expected the target's 4"),
        ("dflash", {"block_size": 1}, "block_size is 1, expected 2 to 63"),
        (
            "dflash",
            {"eagle_aux_hidden_state_layer_ids": [2, 3]},
            "layers 2, 3, expected those of target_layer_ids, 1, 3",
        ),
        (
            "dflash window",
            {"use_sliding_window": False},
            "use_sliding_window is False with layers of sliding_attention",
        ),
        (
            "dflash",
            {"use_sliding_window": True, "max_window_layers": 1},
            "use_sliding_window is True, expected layer_types",
        ),
        (
            "dflash",
            {"is_causal": True, "causal": False},
            "config has is_causal True and causal False, expected one mask",
        ),
        ("dspark", {"dspark_bonus_anchor": True, "sample_from_anchor": True}, "dspark_bonus_anchor is True with"),
        ("dspark", {"dspark_draft_topk": 4}, "config has dspark_draft_topk, expected no entries that are unknown here"),
        (
            "dspark",
            {"rope_is_neox_style": False, "is_neox_style": True},
            "config has rope_is_neox_style False and is_neox_style True, expected one rotation",
        ),
        (
            "dspark neighbors",
            {"rope_is_neox_style": None},
            "rope_is_neox_style is missing, expected it for Lfm2DSparkDraftModel",
        ),
        (
            "dspark",
            {"confidence_head_with_markov": False},
            "confidence_head_with_markov is False, expected True for a confidence_head.proj.weight of 128 columns",
        ),
        (
            "dspark",
            {"markov_rank": 16},
            "confidence_head.proj.weight has 128 columns, expected 96, or 112 with the Markov embedding",
        ),
        ("dflash window", {"is_causal": False}, "a layer with a sliding window is not causal"),
        ("dspark", {"markov_head_type": "other"}, "markov_head_type is 'other', expected one of vanilla, gated, rnn"),
        ("dspark", {"mask_token_id": None}, "mask_token_id is None, expected a number from 0 on"),
        ("dspark", {"mask_token_id": 5000}, "mask_token_id is 5000, expected 0 to 198"),
        ("dspark", {"target_layer_ids": [3]}, "target_layer_ids is [3], expected -1 to 2"),
        ("dspark", {"num_hidden_layers": 3}, "num_hidden_layers is 3, expected the 2 of the tensors"),
        ("dflash", {"dflash_config": {"attention_value_scale": 0.5}}, "attention_value_scale is 0.5, expected 1.0"),
        (
            "dflash",
            {"architectures": [["a"]]},
            "DFlash head: architectures is [['a']], expected one of DFlashDraftModel (not",
        ),
        ("dflash", {"architectures": 3}, "DFlash head: architectures is 3, expected one of DFlashDraftModel (not"),
        ("dflash", {"final_logit_softcapping": {}}, "final_logit_softcapping is {}, expected a finite number"),
        ("dflash", {"input_embedding_scale": "2"}, "input_embedding_scale is '2', expected a finite number"),
        ("dflash", {"output_multiplier": math.inf}, "output_multiplier is inf, expected a finite number"),
        ("dflash", {"attention_sink_bias": "false"}, "attention_sink_bias is 'false', expected true or false"),
        ("dflash", {"causal": 1}, "causal is 1, expected true or false"),
        ("dspark", {"sample_from_anchor": []}, "sample_from_anchor is [], expected true or false"),
        ("dspark", {"rope_is_neox_style": "x"}, "rope_is_neox_style is 'x', expected true or false"),
        ("dspark", {"target_layer_ids": 2}, "target_layer_ids is 2, expected integers"),
        ("dspark", {"aux_hidden_state_layer_ids": 2}, "aux_hidden_state_layer_ids is 2, expected integers"),
        (
            "dflash",
            {"dflash_config": {"layer_types": ["full_attention"]}},
            "layer_types is ['full_attention'], expected sliding_attention or full_attention for each of 2 layers",
        ),
        ("dspark", {"head_dim": -1}, "DSpark head: head_dim is -1, expected a number from 1 on ("),
        ("dspark", {"rope_theta": "x"}, "/drafter has rope_theta 'x', expected a number above 0, below 2**63"),
        (
            "dspark",
            {"rope_theta": 10**20},
            "has rope_theta 100000000000000000000, expected a number above 0, below 2**63",
        ),
        ("dspark", {"hidden_act": 3}, "/drafter has hidden_act 3, expected str"),
        ("dflash", {"layer_types": 3}, "/drafter has layer_types 3, expected list[str] | None"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str, target: Path, tmp_path: Path
) -> None:
    if isinstance(changes.get("dflash_config"), dict):
        changes = {"dflash_config": CASES[name].entries["dflash_config"] | changes["dflash_config"]}
    folder = write_drafter(tmp_path / "drafter", name)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    with pytest.raises(ValueError) as error:
        make_engine(target, draft_of(name, folder)).close()
    assert message in str(error.value)


OTHERS = (
    ("dflash", ("LiLiCorrDraftModel", "Qwen3XPressModel", "DFlashQwen3XPressModel", "MuseGlimmerAssistantModel")),
    ("dspark", ("Gemma4DSparkModel", "MuseSparkDSparkModel", "K3DSparkModel", "DSparkMiniMaxDraftModel")),
)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in OTHERS for name in names])
def test_architectures_of_other_layers_are_refused(kind: str, name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^head: architectures is \['{name}'\], expected one of .* \(not supported\)$"
    ):
        expect_architecture(LlamaConfig(architectures=[name]), "head", kind)


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_folders_of_speculators_say_what_their_other_forms_say(kind: str) -> None:
    own = {"mask_token_id": 3, "block_size": 5, "markov_rank": 8, "selector_rank": 8, "selector_top_k": 4}
    others = {"dflash": ("markov", "selector"), "dflash2": ("markov",), "dspark": ("selector",)}[kind]
    own = {key: value for key, value in own.items() if not key.startswith(others)}
    layers = LlamaConfig(num_hidden_layers=2).to_dict()
    written = {"speculators_model_type": kind, "aux_hidden_state_layer_ids": [1, 3], "sample_from_anchor": True}
    dense = {"target_layer_ids": [0, 2], "sample_from_anchor": True}
    found = [
        BlockConfig.of(LlamaConfig(**(layers | own | form)), 6, "head", kind)
        for form in (written, dense, {f"{'dspark' if kind == 'dspark' else 'dflash'}_config": dense})
    ]
    assert found[0] == found[1] == found[2] and found[0].feature_layers == (1, 3) and found[0].depth == 5


def test_dspark_without_a_path_is_the_target_s_own(target: Path, tmp_path: Path) -> None:
    own = tmp_path / "target"
    shutil.copytree(target, own)
    with pytest.raises(
        ValueError, match=r"^DSpark: head is None, expected a folder or hub id: .* has no folder dspark$"
    ):
        make_engine(own, DSpark()).close()
    folder = write_drafter(own / "dspark", "dspark")
    texts, prompts = [], random_prompts(1)
    for draft in (DSpark(), DSpark(folder)):
        with make_engine(own, draft) as engine:
            [output] = engine.generate(prompts, GREEDY)
            texts.append((output.tokens, output.stats.accept_length, len(draft.weights)))
    assert texts[0] == texts[1]


def test_options_and_folders_of_another_kind_are_refused(target: Path, tmp_path: Path) -> None:
    dflash, rnn = write_drafter(tmp_path / "dflash", "dflash"), write_drafter(tmp_path / "rnn", "dspark rnn")
    for draft, message in (
        (DSpark(dflash), "is a DFlash drafter, expected a DSpark drafter (DFlash drafts with it)"),
        (JetSpec(dflash), "JetSpec: head has blocks that are not causal, expected causal ones (DFlash drafts with it)"),
        (DFlash(dflash, num_steps=6), "DFlash: num_steps is 6, expected 1 to 5 (the block's)"),
        (DSpark(rnn, topk=2), "DSpark: topk is 2, expected 1 for a head that carries a state (a chain)"),
    ):
        with pytest.raises(ValueError) as error:
            make_engine(target, draft).close()
        assert message in str(error.value)
    neighbors = write_drafter(tmp_path / "neighbors", "dspark neighbors")
    for weights in ("fp8", "fp8-head"):
        message = rf"^DSpark head: draft_weights is '{weights}', expected None with partial or interleaved RoPE$"
        with pytest.raises(ValueError, match=message):
            make_engine(target, DSpark(neighbors, draft_weights=weights))
    with pytest.raises(ValueError, match="DFlash: num_candidates is 65, expected 1 to 64"):
        DFlash(dflash, num_candidates=65)
    with pytest.raises(ValueError, match="DFlash: draft_weights is 'int4', expected None, 'fp8' or 'fp8-head'"):
        DFlash(dflash, draft_weights="int4")
    with pytest.raises(ValueError, match=r"DFlash: kv_dtype is 'int8', expected None \(that of the weights\) or 'fp8_"):
        DFlash(dflash, kv_dtype="int8")
    with pytest.raises(ValueError, match="DFlash: sampled is True with topk=None, expected topk=1"):
        DFlash(dflash, sampled=True)


@pytest.mark.exhaustive
def test_slots_of_block_drafts_survive_caching_retraction_sleep_and_migration(tmp_path: Path) -> None:
    """Texts stay the same and drafts are accepted as before, also after an update of the weights."""
    target, text = synthetic()
    made = synthetic_block(target, text, EvenAcceptance(4.0), "dspark", num_layers=4, rank=32)
    folder, params = save_block_drafter(*made, tmp_path / "dspark"), replace(GREEDY, max_new_tokens=64)
    prompts = [text.tokens(start, 24) for start in (3, 50, 3)]
    expected = [text.tokens(start + 24, 64) for start in (3, 50, 3)]

    def check(engine: Engine, at_least: float = 3.0) -> None:
        outputs = engine.generate(prompts, params)
        assert [output.tokens for output in outputs] == expected
        assert all(output.stats.accept_length > at_least for output in outputs)

    draft = DSpark(folder, num_nodes=16)
    with make_engine(target, draft, prefix_cache=True) as engine:
        check(engine)
        check(engine)
        assert engine.stats().prefix_hits > 0
    with make_engine(target, DSpark(folder, num_nodes=16), num_pages=46, num_slots=3) as engine:
        check(engine, 2.0)
        assert engine.stats().retractions > 0
    with make_engine(target, DSpark(folder, topk=1)) as engine:
        check(engine)
        engine.sleep()
        engine.wake()
        check(engine)
        engine.update_weights(draft={"norm.weight": torch.zeros_like(made[1]["norm.weight"])})
        assert [output.tokens for output in engine.generate(prompts, params)] == expected
        engine.update_weights(draft={"norm.weight": made[1]["norm.weight"]})
        check(engine)
    with make_engine(target, DSpark(folder)) as one, make_engine(target, DSpark(folder)) as other:
        request = one.submit(prompts[0], params)
        next(iter(request))
        assert other.import_request(one.export_request(request)).result().tokens == expected[0]
