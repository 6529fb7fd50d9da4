"""Random sequences of page ops: results equal the reference's, and no page is lost, after every call."""

from __future__ import annotations

import random

import pytest
import torch

import specdec_kernels as sd
from support.exhaustive import covering, exhaustive
from support.page_pools import TwoPools
from support.paged import INT

SEQUENCES, CALLS = 120, 14


def run_sequence(pools: TwoPools, page_size: int, max_pages: int, rng: random.Random) -> None:
    slots = range(pools.num_slots)
    longest = max_pages * page_size

    def some_slots() -> list[int]:
        """Return slots in any order, some repeated, some invalid."""
        return [rng.choice([*slots, *slots, -1, pools.num_slots]) for _ in range(rng.randrange(2 * pools.num_slots))]

    def rows(slot: int) -> int:
        """Return a number of rows that the slot holds, full pages preferred."""
        held = pools.held(slot).stop
        return rng.choice([held * page_size, rng.randint(0, held) * page_size, rng.randint(0, held * page_size)])

    for _ in range(CALLS):
        named = rng.choice([None, some_slots(), some_slots()])
        match rng.randrange(7):
            case 0 | 1:
                lens = [rng.choice([-1, longest + 1, *[rng.randint(0, longest // 2)] * 12]) for _ in slots]
                pools.alloc(lens, rng.randrange(page_size + 2), named)
            case 2:
                pools.free([rng.choice([-1, 0, 0, rows(slot), rows(slot)]) for slot in slots], named)
            case 3:
                lens = [rng.choice([-1, 0, longest, rng.randint(0, longest), rows(slot)]) for slot in slots]
                pools.free(lens, named, window=rng.randint(1, 2 * page_size + 2))
            case 4:  # pages of one slot replace those of another
                held = [
                    [slot * max_pages + i for i in range(max_pages) if pools.model.page_table[slot, i] >= 0]
                    for slot in slots
                ]
                source, target = rng.choice(held), rng.choice(held)
                if source is not target:
                    count = min(len(source), len(target))
                    pools.assign(rng.sample(source, count), rng.sample(target, count))
            case _:
                targets = some_slots()
                sources = [rng.choice([*slots, -1]) for _ in targets]
                lens = [rng.choice([-1, longest]) for _ in slots]
                for source, target in zip(sources, targets, strict=True):
                    if 0 <= target < pools.num_slots and rng.random() < 0.9:
                        lens[target] = rows(source) if source >= 0 else 0
                pools.fork(sources, targets, lens)
        pools.assert_conserved()
    pools.free([0] * pools.num_slots)
    pools.assert_conserved()
    assert pools.num_free() == len(pools.pool.page_refs)


@pytest.mark.parametrize(
    ("sizes", "page_size"),
    [
        *covering([(1, 1, 1), (3, 4, 3), (5, 9, 4), (8, 23, 7)], [1, 3, 16, 64]),
        *exhaustive(*(((13, 60, 40), page_size) for page_size in (1, 3, 16, 64))),
    ],
    ids=str,
)
def test_page_ops_conserve_pages(device: torch.device, sizes: tuple[int, int, int], page_size: int) -> None:
    num_slots, num_pages, max_pages = sizes
    for seed in range(SEQUENCES):
        pools = TwoPools(device, num_pages, num_slots, max_pages, page_size)
        run_sequence(pools, page_size, max_pages, random.Random(seed))


WILD = [-(2**31), -2, -1, 0, 1, 2, 3, 5, 2**31 - 1]
GUARD = 64  # guard elements on either side of every tensor


class GuardedPool:
    """A pool of random content between guards."""

    def __init__(self, rng: random.Random, device: torch.device) -> None:
        num_slots, max_pages, num_pages = rng.randint(1, 6), rng.randint(1, 5), rng.randint(1, 9)
        self.buffers = []

        def guarded(*shape: int, sound: list[int]) -> torch.Tensor:
            count = torch.Size(shape).numel()
            wild = rng.random() < 0.5
            values = [rng.choice(WILD) if wild and rng.random() < 0.3 else rng.choice(sound) for _ in range(count)]
            buffer = torch.full((count + 2 * GUARD,), 77, dtype=INT, device=device)
            buffer[GUARD : GUARD + count] = torch.tensor(values, dtype=INT)
            self.buffers.append(buffer)
            return buffer[GUARD : GUARD + count].view(shape)

        pages = list(range(num_pages))
        self.pool = sd.PagePool(
            page_table=guarded(num_slots, max_pages, sound=[*pages, -1]),
            page_counts=guarded(num_slots, sound=list(range(max_pages + 1)) + [0] * max_pages),
            page_starts=guarded(num_slots, sound=[*[0] * max_pages, 1]),
            page_refs=guarded(num_pages, sound=[0, 1, 1, 1, 2, 3]),
            free_stack=guarded(num_pages, sound=pages),
            num_free=guarded(1, sound=list(range(num_pages + 1))),
            page_size=rng.choice([1, 2, 16]),
        )
        self.status = guarded(num_slots, sound=[0])
        batch = rng.randint(1, 2 * num_slots)
        slots = list(range(num_slots))
        self.rows = guarded(batch, sound=slots), guarded(batch, sound=slots)
        entries = [*range(num_slots * max_pages), -1]
        self.entries = guarded(batch, sound=entries), guarded(batch, sound=entries)
        self.lens = guarded(num_slots, sound=list(range(max_pages * self.pool.page_size + 1)))
        self.num_rows = guarded(batch, sound=[0])

    def call(self, op: str) -> None:
        match op:
            case "alloc_pages":
                sd.alloc_pages(self.pool, self.lens, 1, slots=self.rows[0], status=self.status)
            case "free_pages":
                sd.free_pages(self.pool, self.lens, slots=self.rows[0], status=self.status)
            case "free_pages with window":
                sd.free_pages(self.pool, self.lens, window=2, slots=self.rows[0], status=self.status)
            case "assign_pages":
                sd.assign_pages(self.pool, *self.entries)
            case _:
                sd.fork_pages(self.pool, *self.rows, self.lens, status=self.status, out=self.num_rows)

    def contents(self) -> list[list[int]]:
        height = max(0, min(int(self.pool.num_free), len(self.pool.free_stack)))
        self.pool.free_stack[height:] = 0  # means nothing
        return [buffer.tolist() for buffer in self.buffers]

    def guards(self) -> set[int]:
        return {x for buffer in self.contents() for x in buffer[:GUARD] + buffer[-GUARD:]}


OPS = ["alloc_pages", "free_pages", "free_pages with window", "fork_pages", "assign_pages"]


@pytest.mark.parametrize("op", OPS)
def test_page_ops_of_random_content_stay_in_bounds_and_agree(device: torch.device, op: str) -> None:
    for seed in range(400):
        got, want = (GuardedPool(random.Random(seed), d) for d in (device, torch.device("cpu")))
        for pool in (got, want):
            pool.call(op)
        assert got.contents() == want.contents(), f"seed {seed}"
        assert got.guards() == {77}


@pytest.mark.sanitize
def test_page_ops_conserve_pages_in_short_sequences(device: torch.device) -> None:
    rng = random.Random(0)
    pools = TwoPools(device, 9, 5, 4, 3)
    run_sequence(pools, 3, 4, rng)
    for op in OPS:
        for seed in range(6):
            GuardedPool(random.Random(seed), device).call(op)
