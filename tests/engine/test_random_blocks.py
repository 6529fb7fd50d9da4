"""Random combinations of block drafters with targets, sizes and requests: texts and scores are those of plain decoding.

Targets are dense, or have recurrent layers, latent attention or experts; some engines have two ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from specdec_kernels.engine import Draft, Ngram, Standalone, Union
from specdec_kernels.tiny import tiny_model
from support.block_drafters import CASES, draft_of
from support.random_combinations import Combination, Targets, draw_options, run_each

pytestmark = pytest.mark.exhaustive

KINDS = {
    "dense": ["llama", "qwen3", "gemma2", "mistral"],
    "experts": ["qwen3_moe", "mixtral", "glm4_moe", "gpt_oss"],
    "hybrid": ["qwen3_5", "qwen3_next", "nemotron_h", "lfm2"],
    "latent": ["youtu", "glm4_moe_lite", "kimi_linear"],
}
SPEAKING = 2048  # tokens of the tiny model's tokenizer
REFUSED = "batch_invariant is set, expected not with|, expected "


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    return Targets(tmp_path_factory.mktemp("targets"))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the processes that tests start use a core each."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield


@pytest.mark.parametrize(("tp", "count"), [*[(None, 12)] * 4, *[(2, 4)] * 2])
def test_random_combinations_say_what_plain_decoding_says(tp: int | None, count: int, targets: Targets) -> None:
    run_each((random.randrange(2**31) for _ in range(count)), lambda rng: draw(rng, targets, tp).check(rng))


def draw(rng: random.Random, targets: Targets, tp: int | None) -> Combination:
    kind = rng.choice(list(KINDS))
    speaks = kind == "dense" and rng.random() < 0.4
    vocab = SPEAKING if speaks else 199
    source, module = targets.target(kind, rng.choice(KINDS[kind]), True, vocab)
    drafter = rng.choice([name for name in CASES if name != "dspark reduced"])
    folder = targets.drafter(drafter, vocab, module.config.num_hidden_layers)
    draft, tensors = draw_draft(rng, targets, drafter, folder, vocab)
    options: dict[str, Any] = draw_options(rng)
    if rng.random() < 0.1:
        options["batch_invariant"] = True
    if rng.random() < 0.2:
        options["cuda_graph"] = False
    plain: dict[str, Any] = {"tokenizer": tiny_model("target"), "grammars": True} if speaks else {}
    options |= plain | ({} if tp is None else {"tp": tp})
    return Combination(source, module, draft, options, plain, REFUSED, speaks, tensors)


def draw_draft(rng: random.Random, targets: Targets, drafter: str, folder: Path, vocab: int) -> tuple[Draft, list[Any]]:
    """Return a draft, and the tensors of each of its parts for updates."""
    topk = rng.choice([None, None, 1, 1, 2, 5])
    options: dict[str, Any] = {
        "num_steps": rng.choice([None, 1, 2, 4]),
        "topk": topk,
        "num_candidates": rng.choice([None, 1, 3, 64]),
        "num_nodes": rng.choice([None, 1, 2, 3, 9, 40]),
        "draft_weights": rng.choice([None, None, "fp8", "fp8-head"]),
        "kv_dtype": rng.choice([None, None, "fp8_e4m3"]),
    }
    is_rnn, scores_alone = "rnn" in drafter, drafter == "dflash2"
    if is_rnn and topk not in (None, 1):
        options["topk"] = 1
    sampled = options["topk"] == 1 and not scores_alone and rng.random() < 0.4
    block, own = draft_of(drafter, folder, **options, sampled=sampled), load_file(folder / "model.safetensors")
    if sampled:
        return block, [own]
    ngram = Ngram(num_nodes=rng.randint(2, 12))
    dense = targets.dense(vocab)
    model = Standalone(dense, num_steps=2, topk=rng.choice([1, 2]))
    nodes = {"num_nodes": rng.randint(1, 24)}
    return rng.choice(
        [
            (block, [own]),
            (block, [own]),
            (Union(block, ngram, **nodes), [own, None]),
            (Union(ngram, block, **nodes), [None, own]),
            (Union(block, model, **nodes), [own, load_file(dense / "model.safetensors")]),
        ]
    )
