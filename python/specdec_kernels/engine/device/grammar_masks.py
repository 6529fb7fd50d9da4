"""Token masks of a round's trees, for requests with a grammar."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...ops import Tree
from ..grammars import FULL, Matcher

if TYPE_CHECKING:
    from ..._C import ConstrainedRow

POLL_SECONDS = 5e-5  # between two polls for the device's trees


class TreeMasks:
    """The tokens that each node of a round's trees allows, computed on the host while the target runs over the trees.

    Attributes:
        allowed: [rows, ceil(V / 32)] int32 on the device, of packed rows as `edit_logits` takes them.
        on_host: the same on the host, up to date in the rows that were filled last.
        filled: these rows.
    """

    def __init__(self, num_slots: int, num_rows: int, most_nodes: int, vocab: int, device: torch.device) -> None:
        words = -(-vocab // 32)
        pinned = device.type == "cuda"
        self.allowed = torch.full((num_rows, words), FULL, dtype=torch.int32, device=device)
        self.on_host = torch.full(self.allowed.shape, FULL, dtype=torch.int32, pin_memory=pinned)
        self._trees = torch.zeros(num_slots * (3 * most_nodes + 1) + 1, dtype=torch.int32, pin_memory=pinned)
        self._number = torch.zeros(1, dtype=torch.int64, pin_memory=pinned)
        self._copies = torch.cuda.Stream(device) if pinned else None
        self._threads = ThreadPoolExecutor(thread_name_prefix="specdec masks")
        self.matchers: dict[int, Matcher] = {}  # of slots, where they have one
        self.filled = range(0)

    def reset(self) -> None:
        """Discard the trees of all rounds."""
        self._number.zero_()

    def publish(self, tree: Tree, cu_seqlens: Tensor, number: Tensor) -> None:
        """Copy the trees of a round [B, N] to the host, and then the round's number, which says that they are there."""
        parts = (tree.tokens, tree.first_child, tree.next_sibling, cu_seqlens)
        together = torch.cat([part.flatten() for part in parts])
        self._trees[: len(together)].copy_(together, non_blocking=True)
        self._number.copy_(number, non_blocking=True)

    def fill(
        self,
        number: int,
        requests: Sequence[ConstrainedRow],
        batch: int,
        num_nodes: int,
        busy: Callable[[], bool],
    ) -> None:
        """Fill the masks of round `number`, with `batch` trees of `num_nodes`, once its trees are published.

        Args:
            number: of the round.
            requests: the constrained requests of the round, with their new tokens.
            batch: rows of the round.
            num_nodes: nodes of each tree.
            busy: whether the device is working; an idle device publishes nothing more.
        """
        self._wait_for_trees(number, busy)
        size = batch * num_nodes
        tokens, first_child, next_sibling = self._trees[: 3 * size].view(3, batch, num_nodes).long()
        ends = self._trees[3 * size : 3 * size + batch + 1].tolist()

        @torch.inference_mode()
        def fill_one(request: ConstrainedRow) -> None:
            row, matcher = request.row, self.matchers[request.slot]
            for token in request.tokens:
                matcher.accept(token)
            begin, count = ends[row], ends[row + 1] - ends[row]
            allowed = self.on_host[begin : begin + count].fill_(FULL)
            if count > 0 and not matcher.has_ended:
                links = [part[row, :count].tolist() for part in (first_child, next_sibling, tokens)]
                fill_tree(matcher, links[0], links[1], links[2], allowed)

        # Both backends release the GIL.
        for _ in self._threads.map(fill_one, requests) if len(requests) > 1 else map(fill_one, requests):
            pass
        rows = [(ends[request.row], ends[request.row + 1]) for request in requests]
        self.filled = range(min(first for first, _ in rows), max(last for _, last in rows))
        self._copy_filled()

    def take(self, number: int, first: int, words: Tensor, busy: Callable[[], bool]) -> None:
        """Take masks that another rank has filled for round `number`: int32 words of the rows from `first` on."""
        self._wait_for_trees(number, busy)
        rows = words.view(-1, self.allowed.shape[1])
        self.filled = range(first, first + len(rows))
        self.on_host[first : first + len(rows)] = rows
        self._copy_filled()

    def _wait_for_trees(self, number: int, busy: Callable[[], bool]) -> None:
        while int(self._number) != number:
            if not busy() and int(self._number) != number:
                raise RuntimeError(f"the device is idle and has not published the trees of record {number}")
            time.sleep(POLL_SECONDS)

    def _copy_filled(self) -> None:
        begin, end = self.filled.start, self.filled.stop
        if self._copies is None:
            self.allowed[begin:end] = self.on_host[begin:end]
            return
        # Runs parallel to the target's pass. Earlier rounds have read what this overwrites, or no tree would be there.
        with torch.cuda.stream(self._copies):
            self.allowed[begin:end].copy_(self.on_host[begin:end], non_blocking=True)
        torch.cuda.current_stream(self.allowed.device).wait_stream(self._copies)


def fill_tree(
    matcher: Matcher, first_child: Sequence[int], next_sibling: Sequence[int], tokens: Sequence[int], masks: Tensor
) -> None:
    """Fill the masks of a tree's nodes, given a matcher of the text up to the root; node 0 is the root.

    Nodes that the grammar allows get the tokens that may come next: none at a dead end. Other nodes, which no walk
    reaches, keep their masks. So do nodes that end the text: a walk samples a token there, so some must be allowed, but
    none follows it.
    """

    def visit(node: int) -> None:
        matcher.fill(masks[node])
        child = first_child[node]
        while child >= 0:
            if matcher.accept(tokens[child]):
                if not matcher.has_ended:
                    visit(child)
                matcher.rollback(1)
            child = next_sibling[child]

    visit(0)
