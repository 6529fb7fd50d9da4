"""Every family divided among ranks: threads of one process whose logits and states are those of the whole model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels.models.backends.native import CausalLM
from specdec_kernels.models.layers.linear import Linear
from specdec_kernels.models.layers.reduction import Columns
from specdec_kernels.models.shard import Shard, query_heads
from support.divided_models import options, outputs_of
from support.exhaustive import thinned
from support.family_cases import CASES, random_module
from support.hybrid_cases import HYBRIDS, hybrid_module
from support.latent_cases import LATENT, latent_module
from support.random_checkpoints import EXPERTS
from support.thread_reduction import ThreadReduction

REFUSED = (
    "falcon", "falcon groups", "falcon one norm", "falcon serial", "stablelm normed", "zamba2",
    "zamba2 adapters", "longcat_flash",
)  # fmt: skip
FEW_GROUPS = ("bamba", "falcon_h1 normed", "granitemoehybrid", "nemotron_h", "qwen3_")  # refused by four ranks


def module_of(case: str) -> Any:
    if case in HYBRIDS:
        return hybrid_module(case)
    return latent_module(case) if case in LATENT else random_module(case)


def expect_equal_shards(case: str, size: int) -> None:
    module = module_of(case)
    modules = [copy.deepcopy(module) for _ in range(size)]
    vocab = module.config.get_text_config().vocab_size
    tokens = torch.randint(vocab, (1, 7), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        want = outputs_of(whole := CausalLM(module, options()), tokens)
    reduction = ThreadReduction(size)
    models = [CausalLM(modules[rank], options(shard=Shard(rank, size), reduction=reduction)) for rank in range(size)]
    rows = [lm.pools.groups[0].pools[0][0].numel() for lm in models]
    assert case in LATENT or rows[0] < whole.pools.groups[0].pools[0][0].numel()
    outputs = reduction.run(lambda rank: outputs_of(models[rank], tokens))
    for got in outputs:
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        assert torch.equal(got, outputs[0])


ALL = [case for case in (*CASES, *EXPERTS, *HYBRIDS, *LATENT) if case not in REFUSED]
FEW = (
    "olmo2 32",
    "step3p5",
    "qwen2_moe",
    "gpt_oss",
    "qwen3_next",
    "nemotron_h latent",
    "falcon_h1 normed first",
    "kimi_linear",
    "codegen",
)


@pytest.mark.parametrize("case", thinned(ALL, FEW.__contains__))
def test_two_ranks_compute_what_one_computes(case: str) -> None:
    expect_equal_shards(case, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [case for case in ALL if not case.startswith(FEW_GROUPS)])
def test_four_ranks_compute_what_one_computes_with_two_key_heads(case: str) -> None:
    expect_equal_shards(case, 4)


@pytest.mark.parametrize(("case", "each"), [("llama 32", 2), ("gemma2", 2), ("granite", 2), ("gptj", 1), ("cohere", 1)])
def test_layers_reduce_in_norms_and_parallel_parts_once(case: str, each: int) -> None:
    module, reduction = module_of(case), ThreadReduction(2)
    tokens, layers = torch.arange(7)[None], module.config.num_hidden_layers
    models = [CausalLM(copy.deepcopy(module), options(shard=Shard(rank, 2), reduction=reduction)) for rank in range(2)]
    reduction.run(lambda rank: outputs_of(models[rank], tokens))
    # The last layer of a prompt is entered twice: by all rows, and by the last one alone.
    twice = 0 if case == "gemma2" else 1
    assert reduction.sums == 2 * each * layers + twice
    assert reduction.norms == (0 if each == 1 else reduction.sums)  # a LayerNorm reads whole sums


def test_eight_ranks_replicate_key_heads_and_share_a_vocabulary_that_they_do_not_divide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = {"num_attention_heads": 8, "head_dim": 32, "vocab_size": 203, "tie_word_embeddings": True}
    monkeypatch.setitem(CASES, "eight", ("llama", changes))
    expect_equal_shards("eight", 8)


def test_rows_of_a_divided_head_are_those_of_the_whole() -> None:
    weight, order = torch.randn(11, 4), [10, 0, 7, 7, 3]
    reduction = ThreadReduction(3)
    ranges = [range(0, 4), range(4, 8), range(8, 11)]

    def picked(rank: int) -> Tensor:
        own = ranges[rank]
        head = Linear(weight[own.start : own.stop], None, Columns(reduction, own, 11))
        return head.permute_outputs(order)(torch.eye(4))

    assert all(torch.equal(rows, weight[order].T) for rows in reduction.run(picked))


def test_query_heads_that_differ_between_layers_are_divided_layer_by_layer() -> None:
    config = module_of("step3p5").config
    whole, own = (query_heads(each) for each in (config, Shard(1, 2).config(config)))
    assert len(set(whole)) == 2 and own == [heads // 2 for heads in whole]
    with pytest.raises(ValueError) as error:
        Shard(0, 3).config(config)
    assert str(error.value) == "model: num_attention_heads is 4, expected a multiple of 3 (ranks)"


def test_key_heads_that_differ_between_layers_are_refused_by_name() -> None:
    config = module_of("step3p5").config
    config.per_layer_config = {1: {"num_key_value_heads": 1}}
    with pytest.raises(ValueError) as error:
        Shard(0, 2).config(config)
    assert str(error.value) == "model: num_key_value_heads differs between layers, which is not divided among ranks"


@pytest.mark.parametrize("case", REFUSED[:1] + REFUSED[4:6] + REFUSED[-1:])
def test_families_that_are_not_divided_are_refused_by_name(case: str) -> None:
    with pytest.raises(ValueError, match="is not divided among ranks"):
        CausalLM(module_of(case), options(shard=Shard(0, 2), reduction=ThreadReduction(2)))


def test_codegen_is_divided_by_the_machines_of_its_projection() -> None:
    with pytest.raises(ValueError) as error:
        CausalLM(module_of("codegen"), options(shard=Shard(0, 8), reduction=ThreadReduction(8)))
    assert str(error.value) == "model: codegen is divided among ranks by its four machines, expected 2 or 4"
