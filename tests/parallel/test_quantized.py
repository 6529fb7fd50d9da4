"""Quantized weights divided among ranks: rows anywhere, columns at the boundaries of groups with one scale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdec_kernels.models.backends.native import CausalLM
from specdec_kernels.models.layers.fp8 import FP8, column_major
from specdec_kernels.models.layers.moe import QuantizedExperts
from specdec_kernels.models.layers.quantized import Fp8Weight, Int4Weight, QuantizedWeight, pack_int4, unpack_int4
from specdec_kernels.models.shard import Shard
from support.divided_models import options, outputs_of
from support.exhaustive import exhaustive
from support.quantized_checkpoints import write_model
from support.thread_reduction import ThreadReduction


def fp8(outs: int, ins: int, groups: int) -> Fp8Weight:
    elements = torch.randn(outs, ins).to(FP8)
    return Fp8Weight(elements, column_major(torch.rand(outs, groups) + 0.5), "group" if groups > 1 else "token")


def int4(outs: int, ins: int, groups: int) -> Int4Weight:
    elements = torch.randint(16, (outs, ins), dtype=torch.uint8)
    return Int4Weight.pack(elements, torch.randint(16, (outs, groups)), torch.rand(outs, groups) + 0.5)


WEIGHTS: dict[str, tuple[Callable[[], QuantizedWeight], int]] = {
    "fp8 blocks": (lambda: fp8(24, 512, 4), 256),
    "fp8 rows": (lambda: fp8(24, 96, 1), 48),
    "int4 words": (lambda: int4(24, 1024, 8), 512),
    "int4 words to neighbors": (lambda: int4(24, 256, 8), 128),
    "int4 neighbors": (lambda: int4(24, 96, 3), 32),
    "int4 rows": (lambda: int4(24, 512, 1), 256),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_parts_of_a_weight_have_the_elements_of_the_whole(kind: str) -> None:
    torch.manual_seed(0)
    make, width = WEIGHTS[kind]
    weight = make()
    whole = weight.dequantize()
    rows = torch.tensor([7, 8, 9, 20, 21])
    assert torch.equal(weight.pick_rows(rows).dequantize(), whole[rows])
    for begin in range(0, weight.shape[1], width):
        part = weight.slice_columns(range(begin, begin + width))
        assert torch.equal(part.dequantize(), whole[:, begin : begin + width])


@pytest.mark.parametrize("columns", [96, 256, 768])
def test_int4_elements_are_unpacked_as_they_were_packed(columns: int) -> None:
    elements = torch.randint(16, (3, columns), dtype=torch.uint8)
    assert torch.equal(unpack_int4(pack_int4(elements)), elements)


def test_boundaries_within_a_group_are_refused() -> None:
    with pytest.raises(ValueError, match="columns 64 to 128 cut a group of 128, expected whole groups"):
        fp8(8, 512, 4).slice_columns(range(64, 128))
    shuffled = torch.arange(64).flip(0) % 2
    weight = Int4Weight.pack(torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, 2), torch.ones(2, 2), shuffled)
    with pytest.raises(ValueError, match="desc_act"):
        weight.slice_columns(range(32))


def test_divided_experts_sum_to_the_whole() -> None:
    torch.manual_seed(0)
    parts = {(expert, part): fp8(*shape, groups) for expert in range(3) for part, shape, groups in (
        ("gate", (256, 128), 1), ("up", (256, 128), 1), ("down", (128, 256), 1),
    )}  # fmt: skip

    def experts() -> QuantizedExperts:
        module = QuantizedExperts(3, torch.nn.SiLU())
        for (expert, part), weight in parts.items():
            module.store(expert, part, Fp8Weight(weight.qweight, weight.scales, "none"))
        return module

    x, ids = torch.randn(5, 128), torch.randint(3, (5, 1))
    weights = torch.rand(5, 1)
    want = experts()(x, ids, weights)
    total = torch.zeros_like(want)
    for own in (range(0, 128), range(128, 256)):
        half = experts()
        half.divide(own)
        total += half(x, ids, weights)
    torch.testing.assert_close(total, want, rtol=1e-4, atol=1e-4)


CHECKPOINTS = {"gptq": {}, "fp8 weights alone": {}, "awq": {}, "packed": {}, "fp8 blocks": {"intermediate_size": 512}}
CHECKPOINTS["fp8 blocks"] |= {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}


@pytest.mark.parametrize("name", ["gptq", *exhaustive(*(name for name in CHECKPOINTS if name != "gptq"))])
def test_a_divided_checkpoint_computes_what_the_whole_does(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder, _ = write_model(tmp_path, name, **sizes | CHECKPOINTS[name])
    tokens = torch.arange(7)[None] * 5
    with torch.inference_mode():
        want = outputs_of(CausalLM(folder, options()), tokens)
    reduction = ThreadReduction(2)
    models = [CausalLM(folder, options(shard=Shard(rank, 2), reduction=reduction)) for rank in range(2)]
    outputs: list[Tensor] = reduction.run(lambda rank: outputs_of(models[rank], tokens))
    for got in outputs:
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
        assert torch.equal(got, outputs[0])
