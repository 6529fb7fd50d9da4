"""A page pool of the ops next to the reference's, and their invariant: no page is lost, none owned twice."""

from __future__ import annotations

from collections import Counter

import torch

import specdec_kernels as sd
from specdec_kernels.reference import kv as reference
from support.paged import INT


class TwoPools:
    """The ops' pool on a device and the reference's on the host, driven together and compared after every call."""

    def __init__(self, device: torch.device, num_pages: int, num_slots: int, max_pages: int, page_size: int) -> None:
        self.device = device
        self.pool = sd.make_page_pool(num_pages, num_slots, max_pages, page_size, torch.empty(0, device=device))
        self.model = sd.make_page_pool(num_pages, num_slots, max_pages, page_size, torch.empty(0))
        self.status = torch.zeros(num_slots, dtype=INT, device=device)
        self.model_status = torch.zeros(num_slots, dtype=INT)
        self.num_slots = num_slots

    def alloc(self, lens: list[int], reserve: int = 0, slots: list[int] | None = None) -> None:
        host_lens, host_slots = self._ints(lens), None if slots is None else self._ints(slots)
        reference.alloc_pages(self.model, host_lens, reserve, host_slots, self.model_status)
        sd.alloc_pages(self.pool, self._put(host_lens), reserve, slots=self._put(host_slots), status=self.status)
        self.compare()

    def free(self, prefix_lens: list[int], slots: list[int] | None = None, window: int | None = None) -> None:
        host_lens, host_slots = self._ints(prefix_lens), None if slots is None else self._ints(slots)
        reference.free_pages(self.model, host_lens, host_slots, self.model_status, window)
        sd.free_pages(self.pool, self._put(host_lens), window=window, slots=self._put(host_slots), status=self.status)
        self.compare()

    def fork(self, sources: list[int], targets: list[int], lens: list[int]) -> list[int]:
        arguments = [self._ints(values) for values in (sources, targets, lens)]
        want = reference.fork_pages(self.model, *arguments, self.model_status)
        got = sd.fork_pages(self.pool, *[self._put(values) for values in arguments], status=self.status)
        self.compare()
        assert got.tolist() == want.tolist()
        return want.tolist()

    def assign(self, sources: list[int], destinations: list[int]) -> None:
        arguments = [self._ints(values) for values in (sources, destinations)]
        reference.assign_pages(self.model, *arguments)
        sd.assign_pages(self.pool, *[self._put(values) for values in arguments])
        self.compare()

    def set_entry(self, slot: int, index: int, page: int) -> None:
        for pool in (self.pool, self.model):
            pool.page_table[slot, index] = page

    def table(self, slot: int) -> list[int]:
        """Return the pages that a slot holds."""
        return self.model.page_table[slot, self.held(slot).start : self.held(slot).stop].tolist()

    def held(self, slot: int) -> range:
        """Return the range of table entries that the slot holds."""
        return range(int(self.model.page_starts[slot]), int(self.model.page_counts[slot]))

    def num_free(self) -> int:
        return int(self.model.num_free)

    def compare(self) -> None:
        for name in ("page_table", "page_counts", "page_starts", "page_refs", "num_free"):
            assert torch.equal(getattr(self.pool, name).cpu(), getattr(self.model, name)), name
        height = self.num_free()  # entries above the top mean nothing
        assert torch.equal(self.pool.free_stack[:height].cpu(), self.model.free_stack[:height])
        assert self.status.tolist() == self.model_status.tolist()

    def assert_conserved(self) -> None:
        """Check that every page is on the stack once, or has one reference for each table that lists it; never both."""
        free = self.model.free_stack[: self.num_free()].tolist()
        owners = Counter(page for slot in range(self.num_slots) for page in self.table(slot))
        refs = self.model.page_refs.tolist()
        assert refs == [owners[page] for page in range(len(refs))]
        assert sorted(free) == [page for page in range(len(refs)) if refs[page] == 0]
        for slot in range(self.num_slots):
            assert (self.model.page_table[slot, : self.held(slot).start] == -1).all()
            assert (self.model.page_table[slot, self.held(slot).stop :] == -1).all()

    def _ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=INT)

    def _put(self, values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values.to(self.device)
