"""Models divided among ranks: head counts, linears and weights go by a `Shard`, and a reduction sums partial outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen2Config, Qwen3Config

from specdec_kernels.models.backends.native import CausalLM
from specdec_kernels.models.backends.transformers import TransformersLM
from specdec_kernels.models.families import family_of, kv_heads_of, kv_numbers
from specdec_kernels.models.layers.linear import linear_of
from specdec_kernels.models.layers.reduction import LOCAL, Reduction
from specdec_kernels.models.options import ModelOptions
from specdec_kernels.models.shard import WHOLE, Shard
from specdec_kernels.models.weights.sharding import Division
from support.divided_models import options as divided_options
from support.divided_models import passes_of
from support.thread_reduction import ThreadReduction

SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 256, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: Qwen2Config(**SIZES),  # biases of q, k and v
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=64),  # norms of query and key heads
    "gemma2": lambda: Gemma2Config(**SIZES, head_dim=64),  # norms after parts, which read whole outputs
}


def module_of(name: str) -> Any:
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(CONFIGS[name]())
    for parameter in module.parameters():  # biases, which start at zero, too
        parameter.data.normal_(0, 0.1)
    return module.eval()


def options(**others: Any) -> ModelOptions:
    return divided_options(feature_layers=(1, 2), **others)


def logits_of(lm: CausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits of a prompt's last row by prefill, and of a tree after it by a pass."""
    hidden, states = passes_of(lm, tokens)
    assert states.features is not None
    return lm.logits(hidden), torch.cat([lm.logits(states.hidden), states.features], -1)


@pytest.mark.parametrize("name", CONFIGS)
def test_shards_with_a_reduction_equal_the_whole_model(name: str) -> None:
    tokens = torch.randint(60, (1, 7), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        want = logits_of(CausalLM(module_of(name), options()), tokens)
    reduction = ThreadReduction(2)
    models = [CausalLM(module_of(name), options(shard=Shard(rank, 2), reduction=reduction)) for rank in range(2)]
    for lm in models:
        assert [list(pool.shape[3:]) for pool in lm.pools.groups[0].pools] == [[1, 64], [1, 64]]
    for got in reduction.run(lambda rank: logits_of(models[rank], tokens)):
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    # The norm after a divided linear gets its partial sums; a round reduces nothing else but embeds and logits.
    assert reduction.norms > 0 and reduction.sums == reduction.norms


def divided(module: Any, shard: Shard, reduction: Reduction = LOCAL) -> Any:
    Division(module.config, family_of(module.config).division(), shard, reduction).divide(module)
    return module


def test_divided_linears_keep_their_share_and_one_bias() -> None:
    module, reduction = module_of("llama"), ThreadReduction(2)
    before = {name: parameter.clone() for name, parameter in module.model.layers[0].named_parameters()}
    embedding, head = module.model.embed_tokens.weight.clone(), module.lm_head.weight.clone()
    divided(module, Shard(1, 2), reduction)
    assert torch.equal(module.model.embed_tokens.weight, embedding)
    assert torch.equal(module.lm_head.weight, head[30:])
    attention, mlp = module.model.layers[0].self_attn, module.model.layers[0].mlp
    assert torch.equal(attention.k_proj.weight, before["self_attn.k_proj.weight"][64:])
    assert torch.equal(attention.q_proj.bias, before["self_attn.q_proj.bias"][128:])
    assert torch.equal(mlp.down_proj.weight, before["mlp.down_proj.weight"][:, 48:])
    assert attention.o_proj.bias is None and mlp.down_proj.bias is None
    assert linear_of(mlp.down_proj).reduction is reduction is not linear_of(mlp.up_proj).reduction
    assert (attention.q_proj.out_features, mlp.down_proj.in_features) == (128, 48)


def test_key_heads_that_are_fewer_than_ranks_are_replicated() -> None:
    whole = module_of("llama").model.layers[0].self_attn
    for rank in range(4):
        attention = divided(module_of("llama"), Shard(rank, 4)).model.layers[0].self_attn
        for ours, theirs in ((attention.k_proj, whole.k_proj), (attention.v_proj, whole.v_proj)):
            begin = rank // 2 * 64
            assert torch.equal(ours.weight, theirs.weight[begin : begin + 64])
            assert torch.equal(ours.bias, theirs.bias[begin : begin + 64])
        assert torch.equal(attention.q_proj.weight, whole.q_proj.weight[rank * 64 : rank * 64 + 64])


def test_head_counts_go_by_the_shard() -> None:
    config = LlamaConfig(hidden_size=512, num_attention_heads=8, num_key_value_heads=4)
    local = Shard(0, 2).config(config)
    assert (kv_heads_of(local), kv_numbers(local, 3), local.num_attention_heads, local.head_dim) == (2, 768, 4, 64)
    assert (kv_heads_of(config), kv_numbers(config, 3)) == (4, 1536) and WHOLE.config(config) is config
    assert [list(Shard(rank, 8).heads(2, "heads")) for rank in range(8)] == [[0]] * 4 + [[1]] * 4


def test_models_that_cannot_be_divided_are_refused_by_name() -> None:
    def said(call: Any) -> str:
        with pytest.raises(ValueError) as error:
            call()
        return str(error.value)

    module, reduction = module_of("llama"), ThreadReduction(3)
    assert said(lambda: Shard(2, 2)) == "Shard: rank is 2, expected 0 to 1"
    assert said(lambda: options(shard=Shard(0, 2))) == (
        "model: reduction is LOCAL, expected one that sums the outputs of 2 ranks"
    )
    assert said(lambda: CausalLM(module, options(shard=Shard(0, 3), reduction=reduction))) == (
        "model: num_attention_heads is 4, expected a multiple of 3 (ranks)"
    )
    assert said(lambda: Shard(0, 3).heads(2, "model: num_key_value_heads")) == (
        "model: num_key_value_heads is 2, expected a multiple or a divisor of 3 (ranks)"
    )
    narrow = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | {"intermediate_size": 33}))
    assert said(lambda: divided(narrow, Shard(0, 2))) == (
        "model: layers.0.mlp.gate_proj.out_features is 33, expected a multiple of 2 (ranks)"
    )


def test_transformers_backend_refuses_a_shard() -> None:
    with pytest.raises(ValueError) as error:
        TransformersLM(module_of("llama"), options(shard=Shard(0, 2), reduction=ThreadReduction(2)))
    assert str(error.value) == (
        "model: shard is Shard(rank=0, size=2), expected Shard(rank=0, size=1) with implementation='transformers'"
    )
