"""Block drafters of hybrid targets and of targets with latent attention: texts stay those of plain decoding."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_kernels.engine import DSpark, Engine, Ngram, SamplingParams, Union
from support.block_drafters import HIDDEN, Drafter, draft_of, is_same, record, write_drafter
from support.exhaustive import thinned
from support.hybrid_cases import hybrid_module
from support.latent_cases import latent_module
from support.random_checkpoints import VOCAB

SIZES = {"hidden_size": HIDDEN, "vocab_size": VOCAB}
MODULES = {
    "youtu": latent_module,
    "qwen3_5": hybrid_module,
    "lfm2": hybrid_module,
    "glm4_moe_lite": latent_module,
    "kimi_linear": latent_module,
}
GREEDY = SamplingParams(max_new_tokens=14, ignore_eos=True)
LENGTHS = 1, 7, 19, 40, 3


@functools.cache
def module_of(case: str) -> Any:
    return MODULES[case](case, **SIZES)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB - 2, (length,), generator=generator).tolist() for length in LENGTHS]


def make_engine(case: str, draft: Any, **options: Any) -> Engine:
    defaults: dict[str, Any] = {
        "adaptive": False, "max_len": 96, "num_slots": 3, "page_size": 4, "prefill_chunk": 7, "prefix_cache": False,
    }  # fmt: skip
    return Engine(module_of(case), draft=draft, dtype=torch.float32, device="cpu", **(defaults | options))


@functools.cache
def plain_texts(case: str) -> list[list[int]]:
    with make_engine(case, None) as engine:
        return [output.tokens for output in engine.generate(prompts(), GREEDY)]


def write_for(case: str, name: str, folder: Path) -> Path:
    count = module_of(case).config.num_hidden_layers
    changes: dict[str, Any] = {"num_target_layers": count}
    if name.startswith("dspark"):
        changes["target_layer_ids"] = [0, count - 2]
    else:
        changes["dflash_config"] = {"target_layer_ids": [0, count - 2], "mask_token_id": VOCAB - 1}
    return write_drafter(folder, name, **changes)


CASES = [(case, name) for case in MODULES for name in ("dspark", "dspark rnn", "dflash")]
DEFAULT = ("qwen3_5", "dspark"), ("glm4_moe_lite", "dspark"), ("kimi_linear", "dflash")


@pytest.mark.usefixtures("measured_costs")
@pytest.mark.parametrize(("case", "name"), thinned(CASES, DEFAULT.__contains__))
def test_texts_are_those_of_plain_decoding(case: str, name: str, tmp_path: Path) -> None:
    folder = write_for(case, name, tmp_path / "drafter")
    options: list[tuple[Any, dict[str, Any]]] = [
        (draft_of(name, folder), {"page_size": 16}),
        (draft_of(name, folder, topk=1), {"page_size": 1, "prefill_chunk": 512}),
        (Union(draft_of(name, folder), Ngram(), num_nodes=16), {"adaptive": True}),
    ]
    for draft, sizes in options:
        with make_engine(case, draft, **sizes) as engine:
            assert [output.tokens for output in engine.generate(prompts(), GREEDY)] == plain_texts(case)


@pytest.mark.parametrize("case", ("lfm2", "youtu"))
def test_trees_follow_the_target_s_states(case: str, tmp_path: Path) -> None:
    folder = write_for(case, "dspark", tmp_path / "drafter")
    formula = Drafter(module_of(case), folder)
    draft = DSpark(folder, num_nodes=12, num_candidates=6)
    texts = prompts()[1:3]
    with make_engine(case, draft, batch_invariant=True) as engine, pytest.MonkeyPatch.context() as patch:
        drafted = record(engine, patch)
        wholes = [prompt + o.tokens for prompt, o in zip(texts, engine.generate(texts, GREEDY), strict=True)]
    assert len(drafted) >= 12
    for length, tree in drafted[::4]:
        texts = [whole[: length + 1] for whole in wholes if length < len(whole)]
        assert any(is_same(tree, formula.tree(text, 11, 6)) for text in texts)


@pytest.mark.exhaustive
@pytest.mark.parametrize("topk", [None, 1])
@pytest.mark.parametrize("case", MODULES)
def test_slots_survive_caching_retraction_and_migration(case: str, topk: int | None, tmp_path: Path) -> None:
    folder, want = write_for(case, "dspark", tmp_path / "drafter"), plain_texts(case)

    def draft() -> DSpark:
        return DSpark(folder, topk=topk)

    with make_engine(case, draft(), prefix_cache=True, page_size=4) as engine:
        for _ in range(2):
            assert [output.tokens for output in engine.generate(prompts(), GREEDY)] == want
        assert engine.stats().prefix_hits > 0
    with make_engine(case, draft(), max_len=72, num_pages=28 if topk is None else 20) as engine:
        assert [output.tokens for output in engine.generate(prompts(), GREEDY)] == want
        assert engine.stats().retractions > 0
    with make_engine(case, draft()) as one, make_engine(case, draft()) as other:
        for prompt, text in zip(prompts(), want, strict=True):
            request = one.submit(prompt, GREEDY)
            next(iter(request))
            assert other.import_request(one.export_request(request)).result().tokens == text
