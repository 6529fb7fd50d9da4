"""Reductions over process groups: sums in the order of ranks, and gathered columns, with the same bits on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from specdec_kernels.parallel.launch import expect_backend
from specdec_kernels.parallel.reductions import GroupReduction

SIZE = 3


def parts(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(5, 7, generator=generator) * 10**rank).to(dtype) for rank in range(SIZE)]


def reduced(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    reduction = GroupReduction()
    results: dict[str, Any] = {"place": (reduction.rank, reduction.size)}
    for dtype in (torch.float32, torch.bfloat16):
        part = parts(dtype)[rank]
        # A row by itself, too: its sum may not depend on where it stands.
        results[str(dtype)] = reduction.sum(part.t()).t(), reduction.sum(part[3:4]), reduction.gather(part)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_sums_and_gathered_columns_are_the_same_bits_on_every_rank(tmp_path: Path) -> None:
    mp.start_processes(reduced, (str(tmp_path),), nprocs=SIZE, start_method="fork")
    for rank in range(SIZE):
        results = torch.load(tmp_path / f"{rank}.pt")
        assert results["place"] == (rank, SIZE)
        for dtype in (torch.float32, torch.bfloat16):
            total, row, gathered = results[str(dtype)]
            first, second, third = (part.float() for part in parts(dtype))
            want = ((first + second) + third).to(dtype)
            assert torch.equal(total, want) and torch.equal(row, want[3:4])
            assert torch.equal(gathered, torch.cat(parts(dtype), -1))


def test_script_of_torchrun_has_a_process_group_that_reduces_on_the_device() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        expect_backend(torch.device("cpu"))
        with pytest.raises(ValueError) as raised:
            expect_backend(torch.device("cuda", 1))
    finally:
        dist.destroy_process_group()
    assert str(raised.value) == (
        "Engine: torch.distributed has a process group with cpu:gloo,cuda:gloo, expected cuda:nccl (or none, which the "
        "engine makes)"
    )
