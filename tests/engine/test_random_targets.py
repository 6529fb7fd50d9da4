"""Random combinations of targets, drafts, sizes and requests: texts and scores are those of plain decoding.

Targets have recurrent layers, latent attention, experts or MTP layers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from specdec_kernels.engine import MTP, Draft, Ngram, Standalone, Union
from support.block_drafters import HIDDEN, draft_of
from support.hybrid_cases import HYBRIDS
from support.latent_cases import LATENT
from support.random_combinations import WITH_MTP, Combination, Targets, draw_options, run_each

pytestmark = pytest.mark.exhaustive

SEEDS_OF_A_RUN = 12
KINDS = {"hybrid": list(HYBRIDS), "latent": list(LATENT), "mtp": WITH_MTP}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    return Targets(tmp_path_factory.mktemp("targets"))


@pytest.mark.parametrize("part", range(4))
def test_random_combinations_say_what_plain_decoding_says(part: int, targets: Targets) -> None:
    def run(rng: random.Random) -> None:
        kind = rng.choice(list(KINDS))
        source, module = targets.target(kind, rng.choice(KINDS[kind]))
        draft = draw_draft(rng, targets, kind, module.config)
        Combination(source, module, draft, draw_options(rng), {}).check(rng)

    run_each((random.randrange(2**31) for _ in range(SEEDS_OF_A_RUN)), run)


def draw_draft(rng: random.Random, targets: Targets, kind: str, config: Any) -> Draft | None:
    steps, topk = rng.randint(1, 3), rng.choice([1, 1, 2, 3])
    sizes: dict[str, Any] = {"num_steps": steps, "topk": topk}
    if topk > 1:
        sizes["num_nodes"] = rng.randint(2, 1 + topk + (steps - 1) * topk**2)
    ngram = Ngram(num_nodes=rng.randint(2, 12))
    makers: list[Callable[[], Draft]] = [lambda: Standalone(targets.dense(config.vocab_size), **sizes)]
    if kind == "mtp":
        makers += [lambda: MTP(**sizes)] * 3
    if config.hidden_size == HIDDEN:
        block = rng.choice(["dspark", "dflash", "dspark rnn", "dspark gated", "jetspec", "dflash2"])
        folder = targets.drafter(block, config.vocab_size, config.num_hidden_layers)
        makers.append(lambda: draft_of(block, folder, topk=rng.choice([None, 1])))
    model = rng.choice(makers)()
    if topk == 1 and isinstance(model, MTP | Standalone) and rng.random() < 0.2:
        return replace(model, sampled=True)
    return rng.choice([None, ngram, model, model, model, Union(model, ngram, num_nodes=rng.randint(2, 14))])
