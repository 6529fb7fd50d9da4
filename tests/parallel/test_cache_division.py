"""What a model keeps of a sequence, divided among ranks and joined again, and the checksum of divided weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec_kernels.models.backends.native import CausalLM
from specdec_kernels.models.cache_division import CacheDivision, DividedDim
from specdec_kernels.models.kv_pools import KeyValueLayout, LatentLayout
from specdec_kernels.models.shard import Shard
from specdec_kernels.models.weights.checksum import checksum
from support.divided_models import options
from support.exhaustive import exhaustive
from support.hybrid_cases import hybrid_module
from support.quantized_checkpoints import EXPERTS, write_model
from support.random_checkpoints import save_random_model
from support.thread_reduction import ThreadReduction

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32]


@pytest.mark.parametrize(("heads", "size"), [(6, 2), (6, 3), (1, 3), (2, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_scattered_by_heads_and_gathered_without_replicas(heads: int, size: int, dtype: torch.dtype) -> None:
    reduction = ThreadReduction(size)
    layout = KeyValueLayout(heads=len(Shard(0, size).heads(heads, "heads")), k_dim=8, v_dim=8)
    whole = torch.randint(-100, 100, (5, heads, 8)).to(dtype)
    given = whole.clone()

    def moved(rank: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        caches = CacheDivision(Shard(rank, size), reduction, heads)
        divided = caches.of_rows(layout)
        own = caches.scatter(whole if rank == 0 else None, whole.shape, whole, divided)
        return own, caches.gather(own, divided)

    results = reduction.run(moved)
    for rank, (own, _) in enumerate(results):
        mine = Shard(rank, size).heads(heads, "heads")
        assert torch.equal(own.view(torch.uint8), whole[:, mine.start : mine.stop].contiguous().view(torch.uint8))
    joined = results[0][1]
    assert joined is not None and torch.equal(joined.view(torch.uint8), given.view(torch.uint8))
    assert torch.equal(whole.view(torch.uint8), given.view(torch.uint8))
    assert [gathered for _, gathered in results[1:]] == [None] * (size - 1)


def test_channels_are_divided_part_by_part_and_states_by_heads() -> None:
    caches = CacheDivision(Shard(1, 2), ThreadReduction(2), 4, conv_parts=((4, 2), (1, 3), (1, 3)))
    window = torch.arange(2 * 14).view(2, 14)
    channels = caches.of_state(torch.empty(5, 2, 10))
    assert channels == DividedDim(-1, caches.conv_parts)
    assert channels.part(window, caches.shard)[0].tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    parts = [channels.part(window, Shard(rank, 2)) for rank in range(2)]
    assert torch.equal(channels.join(parts), window)
    assert caches.of_state(torch.empty(5, 3, 8, 16)) == DividedDim(-3, ((6, 1),))
    alone = CacheDivision(Shard(1, 2), ThreadReduction(2), 4)
    assert alone.of_state(torch.empty(5, 2, 10)) is None
    assert alone.of_rows(LatentLayout(16, 4)) is None and alone.whole(LatentLayout(16, 4)) == LatentLayout(16, 4)


def saved(case: str, folder: Path) -> Path:
    if case in ("gptq", "awq", "fp8 blocks"):
        return write_model(folder, case, hidden_size=256, intermediate_size=384)[0]
    if case == "fp8 experts":
        return write_model(folder, "fp8 rows", "qwen3_moe", **EXPERTS)[0]
    if case in ("qwen3_next", "nemotron_h"):
        hybrid_module(case).save_pretrained(folder)
        return folder
    return save_random_model(folder, case, tie_word_embeddings=case == "llama")


CASES = ["llama", "gptq", *exhaustive("gpt_oss", "qwen3_moe", "awq", "fp8 experts", "qwen3_next", "nemotron_h")]


@pytest.mark.parametrize("case", CASES)
def test_checksum_of_divided_weights_is_that_of_the_whole(case: str, tmp_path: Path) -> None:
    folder = saved(case, tmp_path)
    whole = CausalLM(folder, options())
    reduction = ThreadReduction(2)
    ranks = [CausalLM(folder, options(shard=Shard(rank, 2), reduction=reduction)) for rank in range(2)]
    want = checksum(whole.model)
    assert reduction.run(lambda rank: checksum(ranks[rank].model))[0] == want
    with torch.no_grad():
        for parameter in ranks[1].model.get_decoder().layers[0].parameters():
            parameter.neg_()
        for buffer in ranks[1].model.get_decoder().layers[0].buffers():
            if buffer.dtype == torch.float32:
                buffer.neg_()
            else:
                buffer.view(torch.uint8).bitwise_not_()
    assert reduction.run(lambda rank: checksum(ranks[rank].model))[0] != want
