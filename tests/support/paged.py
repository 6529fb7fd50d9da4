"""Paged KV pools for the tests: shuffled page tables, and pools that are NaN where nobody wrote."""

from __future__ import annotations

import torch

INT = torch.int32
POISON = torch.nan


def page_table(num_slots: int, max_pages: int, spare_pages: int = 2) -> tuple[torch.Tensor, int]:
    """Return a full table of distinct pages in random order, and the number of pages."""
    num_pages = num_slots * max_pages + spare_pages
    pages = torch.randperm(num_pages, dtype=INT)[: num_slots * max_pages]
    return pages.view(num_slots, max_pages).contiguous(), num_pages


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, POISON).to(dtype)


def assert_same_bytes(got: torch.Tensor, want: torch.Tensor) -> None:
    """Check bitwise equality, NaN equal to NaN: elements that must not be written are compared, too."""
    if want.dtype == torch.float8_e4m3fn:  # few operations support it
        got, want = got.float(), want.float()
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)
