"""alloc_pages and free_pages: page conservation after every call of random interleavings, and each rule by hand."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels.reference import kv as reference

INT = torch.int32
STALLED, BAD_PAGE, BAD_LENGTH = (int(bit) for bit in (sd.Status.STALLED, sd.Status.BAD_PAGE, sd.Status.BAD_LENGTH))


class TwoPools:
    """The op's pool on a device and the reference's on the host, driven together and compared after every call."""

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

    def free(self, keep_lens: list[int], slots: list[int] | None = None) -> None:
        host_lens, host_slots = self._ints(keep_lens), None if slots is None else self._ints(slots)
        reference.free_pages(self.model, host_lens, host_slots, self.model_status)
        sd.free_pages(self.pool, self._put(host_lens), slots=self._put(host_slots), status=self.status)
        self.compare()

    def share(self, source: int, target: int) -> None:
        """What a fork does to whole pages: the empty slot `target` becomes another owner of all of `source`'s."""
        for pool in (self.pool, self.model):
            count = int(pool.page_counts[source])
            pages = pool.page_table[source, :count].clone()
            pool.page_table[target, :count] = pages
            pool.page_counts[target] = count
            pool.page_refs[pages.long()] += 1

    def set_entry(self, slot: int, index: int, page: int) -> None:
        for pool in (self.pool, self.model):
            pool.page_table[slot, index] = page

    def table(self, slot: int) -> list[int]:
        return self.pool.page_table[slot, : int(self.pool.page_counts[slot])].tolist()

    def compare(self) -> None:
        num_free = int(self.model.num_free)
        for name in ("page_table", "page_counts", "page_refs", "num_free"):
            assert torch.equal(getattr(self.pool, name).cpu(), getattr(self.model, name)), name
        assert torch.equal(self.pool.free_stack[:num_free].cpu(), self.model.free_stack[:num_free])
        assert self.status.tolist() == self.model_status.tolist()

    def assert_conserved(self) -> None:
        """Every page is on the stack once, or has as many references as tables that list it; never both."""
        free = self.pool.free_stack[: int(self.pool.num_free)].tolist()
        owners = Counter(page for slot in range(self.num_slots) for page in self.table(slot))
        assert len(set(free)) == len(free)
        refs = self.pool.page_refs.tolist()
        assert refs == [owners[page] for page in range(len(refs))]
        assert set(free) == {page for page in range(len(refs)) if refs[page] == 0}
        for slot in range(self.num_slots):
            assert (self.pool.page_table[slot, len(self.table(slot)) :] == -1).all()

    def _ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=INT)

    def _put(self, values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values.to(self.device)


def draw(low: int, high: int, count: int) -> list[int]:
    return torch.randint(low, high, (count,)).tolist()


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(("num_slots", "num_pages"), [(1, 1), (5, 23), (13, 400)])
def test_random_interleavings_conserve_pages(
    device: torch.device, page_size: int, num_slots: int, num_pages: int
) -> None:
    max_pages = 67
    pools = TwoPools(device, num_pages, num_slots, max_pages, page_size)
    longest = max_pages * page_size
    for _ in range(60):
        slots = None if torch.rand(()) < 0.2 else draw(-1, num_slots + 1, int(torch.randint(0, 2 * num_slots, ())))
        match int(torch.randint(0, 4, ())):
            case 0 | 1:
                reserve = int(torch.randint(0, page_size + 2, ()))
                pools.alloc(draw(-1, max(longest // 3, 2), num_slots), reserve, slots)
            case 2:
                pools.free([max(keep, 0) for keep in draw(-longest // 2, longest // 2, num_slots)], slots)
            case _:
                source, target = draw(0, num_slots, 2)
                if not pools.table(target) and source != target:
                    pools.share(source, target)
        pools.assert_conserved()
    pools.free([0] * num_slots)
    pools.assert_conserved()
    assert int(pools.pool.num_free) == num_pages


@pytest.mark.sanitize
def test_small(device: torch.device) -> None:
    pools = TwoPools(device, 5, 3, 4, 2)
    pools.alloc([1, 3, 5], 1, [2, 0, 2, -1, 1])
    pools.assert_conserved()
    pools.free([0, 0, 3], [2, 0])
    pools.assert_conserved()


def test_lowest_pages_first_and_last_in_first_out(device: torch.device) -> None:
    pools = TwoPools(device, 8, 2, 8, 4)
    pools.alloc([9, 5], 3)
    assert pools.table(0) == [0, 1, 2] and pools.table(1) == [3, 4]
    pools.free([4, 0])
    assert pools.table(0) == [0] and pools.table(1) == []
    pools.alloc([4, 12])
    assert pools.table(1) == [3, 4, 1], "slot 1's own pages in their old order, then slot 0's"


def test_a_slot_that_does_not_fit_is_stalled_and_later_ones_are_tried(device: torch.device) -> None:
    pools = TwoPools(device, 4, 3, 4, 1)
    pools.alloc([2, 3, 2])
    assert [len(pools.table(slot)) for slot in range(3)] == [2, 0, 2]
    assert pools.status.tolist() == [0, STALLED, 0]
    pools.alloc([2, 0, 2])  # what it holds suffices now
    assert pools.status.tolist() == [0, 0, 0]
    pools.alloc([2, 1, 2], slots=[1])
    assert pools.status.tolist() == [0, STALLED, 0]
    pools.free([0, 0, 2])
    pools.alloc([2, 1, 2], slots=[1])
    assert pools.status.tolist() == [0, 0, 0] and pools.table(1) == [0]


def test_order_of_slots_is_the_order_of_service(device: torch.device) -> None:
    pools = TwoPools(device, 3, 3, 3, 1)
    pools.alloc([1, 1, 1], slots=[2, -1, 0, 2, 1])
    assert [pools.table(slot) for slot in range(3)] == [[1], [2], [0]]


def test_a_slot_named_twice_is_served_once(device: torch.device) -> None:
    pools = TwoPools(device, 4, 2, 3, 1)
    pools.alloc([2, 3], slots=[0, 1, 0, 1])
    assert pools.table(0) == [0, 1] and pools.table(1) == []
    pools.free([1, 0], slots=[0, 0])
    assert pools.table(0) == [0] and int(pools.pool.num_free) == 3


def test_more_rows_than_a_block_has_threads(device: torch.device) -> None:
    pools = TwoPools(device, 1500, 700, 5, 2)
    order = torch.randperm(700).tolist()
    pools.alloc(draw(0, 9, 700), 1, order + order[:300])
    pools.assert_conserved()
    assert STALLED in pools.status.tolist()
    pools.free(draw(0, 9, 700), order[350:] + order)
    pools.assert_conserved()


def test_many_pages_at_once(device: torch.device) -> None:
    pools = TwoPools(device, 1000, 3, 700, 1)
    pools.alloc([650, 200, 0])
    pools.share(0, 2)
    pools.free([3, 199, 333])
    pools.assert_conserved()


@pytest.mark.sanitize
def test_bad_lengths_get_nothing(device: torch.device) -> None:
    pools = TwoPools(device, 9, 5, 2, 3)
    lens = [-1, 7, 2**31 - 1, -(2**31), 6]
    pools.alloc(lens)
    assert pools.status.tolist() == [BAD_LENGTH] * 4 + [0]
    assert pools.pool.page_counts.tolist() == [0, 0, 0, 0, 2]
    pools.alloc([6, 6, 6, 6, 2**31 - 1], 2**31 - 1, [4])
    assert pools.status.tolist() == [BAD_LENGTH] * 5
    pools.free([0, 0, 0, 0, -1])
    assert pools.pool.page_counts.tolist() == [0, 0, 0, 0, 2]
    pools.free([0, 0, 0, 0, 2**31 - 1])  # keeps everything
    assert pools.pool.page_counts.tolist() == [0, 0, 0, 0, 2]


@pytest.mark.sanitize
@pytest.mark.parametrize("count", [-1, 4, 2**31 - 1, -(2**31)])
def test_bad_counts_stay_in_bounds(device: torch.device, count: int) -> None:
    pools = TwoPools(device, 9, 2, 3, 1)
    pools.pool.page_counts[0] = count
    lens = torch.tensor([2, 2], dtype=INT, device=device)
    sd.alloc_pages(pools.pool, lens, 0, status=pools.status)
    sd.free_pages(pools.pool, lens, status=pools.status)
    assert pools.status.tolist() == [BAD_LENGTH, 0]
    assert pools.pool.page_table.tolist() == [[-1, -1, -1], [0, 1, -1]]
    assert pools.pool.page_counts.tolist() == [count, 2]


@pytest.mark.sanitize
def test_table_entries_that_are_no_pages_are_skipped(device: torch.device) -> None:
    pools = TwoPools(device, 60, 2, 50, 1)
    pools.alloc([45, 5])
    pools.set_entry(0, 1, -1)
    pools.set_entry(0, 2, 60)
    pools.set_entry(0, 40, 2**31 - 1)
    pools.set_entry(0, 7, 6)  # page 6 twice: the second time it has no owner left
    pools.set_entry(0, 3, 44)  # and one that is gone before its turn comes
    pools.free([0, 5])
    assert pools.status.tolist() == [BAD_PAGE, 0]
    assert pools.table(0) == []


@pytest.mark.sanitize
def test_a_page_listed_twice_with_two_owners_is_free_after_both(device: torch.device) -> None:
    pools = TwoPools(device, 9, 3, 8, 1)
    pools.alloc([4, 0, 0])
    pools.share(0, 1)
    pools.set_entry(0, 3, 2)  # slot 0 lets go of page 2 twice, slot 1 finds no owner
    pools.free([0, 0, 0], [0, 1])
    assert pools.status.tolist() == [0, BAD_PAGE, 0]


@pytest.mark.sanitize
@pytest.mark.parametrize("num_free", [-3, 9, 2**31 - 1])
def test_a_wild_stack_stays_in_bounds(device: torch.device, num_free: int) -> None:
    pool = sd.make_page_pool(4, 2, 3, 1, torch.empty(0, device=device))
    pool.num_free[0] = num_free
    pool.free_stack[2:] = torch.tensor([-5, 2**31 - 1], dtype=INT)
    status = torch.zeros(2, dtype=INT, device=device)
    lens = torch.tensor([3, 1], dtype=INT, device=device)
    sd.alloc_pages(pool, lens, 0, status=status)
    if num_free < 0:
        assert status.tolist() == [STALLED, STALLED]
    else:
        assert status.tolist() == [BAD_PAGE, 0]
        assert pool.page_table.tolist() == [[-1, -1, 2], [3, -1, -1]]
    pool.num_free[0] = num_free
    sd.free_pages(pool, torch.zeros_like(lens), status=status)
    assert 0 <= int(pool.num_free) <= 4


def test_empty_batch_and_no_slots(device: torch.device) -> None:
    like = torch.empty(0, device=device)
    pool = sd.make_page_pool(4, 0, 3, 1, like)
    nothing = torch.empty(0, dtype=INT, device=device)
    sd.alloc_pages(pool, nothing, 1)
    sd.free_pages(pool, nothing)
    pool = sd.make_page_pool(4, 2, 3, 1, like)
    sd.alloc_pages(pool, torch.ones(2, dtype=INT, device=device), 1, slots=nothing)
    assert int(pool.num_free) == 4


def test_a_pool_of_numpy_arrays() -> None:
    np = pytest.importorskip("numpy")
    pool = sd.make_page_pool(4, 2, 3, 2, np.empty(0))
    sd.alloc_pages(pool, np.array([1, 3], np.int32), 0)
    assert pool.page_table.tolist() == [[0, -1, -1], [1, 2, -1]]
    assert type(pool.free_stack) is np.ndarray and pool.num_free.tolist() == [1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_graph_replay_with_changed_lengths() -> None:
    device = torch.device("cuda")
    pool, model = (sd.make_page_pool(9, 3, 4, 2, torch.empty(0, device=d)) for d in (device, torch.device("cpu")))
    lens = torch.zeros(3, dtype=INT, device=device)
    sd.alloc_pages(pool, lens, 0)
    sd.free_pages(pool, lens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sd.alloc_pages(pool, lens, 1)
    for values in ([1, 2, 3], [3, 5, 4]):
        host = torch.tensor(values, dtype=INT)
        lens.copy_(host)
        graph.replay()
        reference.alloc_pages(model, host, 1)
        assert torch.equal(pool.page_table.cpu(), model.page_table)


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        ("alloc_pages", {"lens": torch.zeros(3, dtype=INT)}, "alloc_pages: lens has shape [3], expected [num_slots=2]"),
        ("alloc_pages", {"lens": torch.zeros(2)}, "alloc_pages: lens is float32, expected int32"),
        ("alloc_pages", {"reserve": -1}, "alloc_pages: reserve is -1, expected 0 to 2147483647"),
        ("alloc_pages", {"free_stack": torch.zeros(5, dtype=INT)}, "alloc_pages: free_stack has shape [5], expected [num_pages=4]"),
        ("alloc_pages", {"page_table": torch.zeros(3, 2, dtype=INT).t()}, "alloc_pages: page_table has shape [2, 3] and is not contiguous, expected a contiguous tensor"),
        ("alloc_pages", {"page_size": 0}, "alloc_pages: page_size is 0, expected 1 to 2147483647"),
        ("free_pages", {"keep_lens": torch.zeros(1, dtype=INT)}, "free_pages: keep_lens has shape [1], expected [num_slots=2]"),
        ("free_pages", {"num_free": torch.zeros(2, dtype=INT)}, "free_pages: num_free has shape [2], expected [1]"),
        ("free_pages", {"status": torch.zeros(1, dtype=INT)}, "free_pages: status has shape [1], expected [num_slots=2]"),
        ("free_pages", {"slots": torch.zeros(2, 1, dtype=INT)}, "free_pages: slots has shape [2, 1], expected [batch]"),
    ],
)  # fmt: skip
def test_messages(op: str, change: dict[str, object], message: str) -> None:
    pool = sd.make_page_pool(4, 2, 3, 1, torch.empty(0))
    pool = pool._replace(**{name: change.pop(name) for name in list(change) if name in sd.PagePool._fields})
    lens = torch.zeros(2, dtype=INT)
    arguments = {"lens": lens, "reserve": 0} if op == "alloc_pages" else {"keep_lens": lens}
    with pytest.raises(ValueError) as error:
        getattr(sd, op)(pool, **(arguments | change))
    assert str(error.value) == message


def test_make_page_pool_names_a_bad_page_size() -> None:
    with pytest.raises(ValueError) as error:
        sd.make_page_pool(4, 2, 3, 0, torch.empty(0))
    assert str(error.value) == "make_page_pool: page_size is 0, expected at least 1"
