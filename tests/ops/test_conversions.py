"""Helpers between other libraries' forms and ours: dense masks, lists of pages, trees of different sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import specdec_kernels as sd
from support.random_drafts import on, random_draft


@pytest.mark.parametrize("columns", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_packed_mask_has_the_bit_of_every_column(columns: int, library: str, device: torch.device) -> None:
    mask = torch.rand(2, 3, columns) < 0.5
    given: Any = mask.numpy() if library == "numpy" else mask.to(device)
    packed = sd.pack_mask(given)
    words = np.asarray(packed if library == "numpy" else packed.cpu()).astype(np.uint64)
    assert words.shape == (2, 3, -(-columns // 64)) and str(packed.dtype).endswith("int64")
    for column in range(columns):
        bit = (words[..., column // 64] >> np.uint64(column % 64)) & np.uint64(1)
        assert (bit == mask[..., column].numpy()).all()
    assert columns % 64 == 0 or (words[..., -1] >> np.uint64(columns % 64) == 0).all()


def test_additive_mask_is_refused() -> None:
    with pytest.raises(ValueError) as error:
        sd.pack_mask(torch.zeros(2, 2))
    assert str(error.value) == "pack_mask: mask is torch.float32 of shape [2, 2], expected bool of shape [..., N]"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lists_of_pages_become_rows_of_the_table(dtype: torch.dtype, device: torch.device) -> None:
    counts = torch.tensor([3, 0, 5, 1])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    pages = torch.randperm(9)
    for width in (None, 5, 8):
        table = sd.page_table_of_lists(indptr.to(device, dtype), pages.to(device, dtype), max_pages=width)
        assert table.dtype == torch.int32 and table.shape == (4, width or 5)
        for row, begin, count in zip(table.tolist(), indptr.tolist(), counts.tolist(), strict=False):
            assert row == [*pages[begin : begin + count].tolist(), *[-1] * (len(row) - count)]
    assert sd.page_table_of_lists(indptr.numpy(), pages.numpy()).tolist() == table[:, :5].tolist()
    assert sd.page_table_of_lists(indptr[:1], pages[:0]).shape == (0, 0)


@pytest.mark.parametrize(
    ("indptr", "max_pages", "message"),
    [
        ([0, 2, 1, 3], None, "indptr is no list of ends, expected 0 to 3 (the length of indices), rising"),
        ([1, 3], None, "indptr is no list of ends, expected 0 to 3 (the length of indices), rising"),
        ([0, 2], None, "indptr is no list of ends, expected 0 to 3 (the length of indices), rising"),
        ([], None, "indptr is no list of ends, expected 0 to 3 (the length of indices), rising"),
        ([0, 3], 2, "max_pages is 2, expected at least 3 (the longest list)"),
    ],
)
def test_lists_that_are_none_are_refused(indptr: list[int], max_pages: int | None, message: str) -> None:
    with pytest.raises(ValueError) as error:
        sd.page_table_of_lists(torch.tensor(indptr, dtype=torch.int32), torch.tensor([4, 5, 6]), max_pages=max_pages)
    assert str(error.value) == f"page_table_of_lists: {message}"


def test_whole_trees_are_packed_one_after_the_other(device: torch.device) -> None:
    tree, _ = random_draft(5, 9, 50)
    rows, ends = sd.pack_whole_trees(on(device, tree))
    counts = tree.num_nodes.tolist()
    assert ends.tolist() == [0, *np.cumsum(counts).tolist()]
    for field in ("tokens", "positions", "mask"):
        want = torch.cat([getattr(tree, field)[b, :count] for b, count in enumerate(counts)])
        got = getattr(rows, field).cpu()
        assert torch.equal(got[: len(want)], want) and not got[len(want) :].any()


def test_known_gpus_plan_like_their_kind() -> None:
    shape = {"batch": 4, "q_rows": 32, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "max_kv_len": 4096}
    plans = {name: sd.attention_plan(**shape, gpu=getattr(sd, name)).name for name in ("H100", "H200", "B200", "A100")}
    assert plans["H100"] == plans["H200"] and plans["H200"].startswith("sm90")
    assert plans["B200"].split(".")[0] == plans["A100"].split(".")[0] != "sm90"
