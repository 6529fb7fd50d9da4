"""Draft trees from an n-gram index, in the form that SGLang's n-gram worker reads. Does not import SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...ngram import NgramIndex

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ALGORITHM", "NgramTrees"]

ALGORITHM = "SPECDEC_NGRAM"  # its name in SGLang


class NgramTrees:
    """Drafts for the requests of SGLang's batches, from the text of all requests, prompts included.

    Each text is inserted once, as it grows. Requests are identified by their `rid`, also after a retraction. The text
    of finished requests can be matched until newer text overwrites it.

    Args:
        num_nodes: nodes of a tree, root included, 1 to 256.
        max_requests: most running requests.
        max_len: longest text, in tokens.
        max_tokens: capacity of the index.
    """

    def __init__(self, num_nodes: int, max_requests: int, max_len: int, *, max_tokens: int = 1 << 20) -> None:
        self.num_nodes = num_nodes
        # Also slots for as many retracted requests, and room for the round in which a text exceeds its limit.
        self.index = NgramIndex(max_tokens, 2 * max_requests, max_len + num_nodes)
        self._known: dict[str, tuple[int, int]] = {}  # slot and length by rid, least recently drafted first
        self._free = list(range(2 * max_requests))

    def clear(self) -> None:
        self.index.clear()
        self._free += [slot for slot, _ in self._known.values()]
        self._known = {}

    def draft(self, batch: Any, *, overlap: bool) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Draft a tree for each request of a batch.

        Args:
            batch: `reqs` with `rid`, `origin_input_ids` and `output_ids`; `spec_info` with the last round's result:
                `accept_tokens`, num_nodes for each request, and `accept_lens`.
            overlap: whether `output_ids` do not contain that result yet.

        Returns:
            Tokens [requests * num_nodes] and tree masks [requests * num_nodes * num_nodes]. Nodes for which the index
            has no draft are children of the root with its token.
        """
        emitted = self._emitted(batch) if overlap else [[]] * len(batch.reqs)
        slots, lengths = [], []
        for req, last in zip(batch.reqs, emitted, strict=True):
            slot, length = self._follow(req, last)
            slots.append(slot)
            lengths.append(length)
        tree = self.index.draft(np.array(slots, np.int32), np.array(lengths, np.int32), self.num_nodes).tree
        seen: NDArray[np.bool_] = tree.dense_mask()
        seen[:, :, 0] = True
        return tree.tokens.astype(np.int64).ravel(), seen.ravel()

    def _emitted(self, batch: Any) -> list[list[int]]:
        tokens, counts = batch.spec_info.accept_tokens.cpu().tolist(), batch.spec_info.accept_lens.cpu().tolist()
        return [tokens[i * self.num_nodes : i * self.num_nodes + count] for i, count in enumerate(counts)]

    def _follow(self, req: Any, last: list[int]) -> tuple[int, int]:
        """Insert a request's new text, and return its slot and its length."""
        prompt, output = len(req.origin_input_ids), len(req.output_ids)
        length = prompt + output + len(last)
        slot, known = self._known.pop(req.rid, (-1, 0))
        if slot < 0:
            slot = self._free.pop() if self._free else self._known.pop(next(iter(self._known)))[0]
        if known == 0 or known > length:
            self.index.release(slot)
            new = [*req.origin_input_ids, *req.output_ids, *last]
        else:
            new = [*req.origin_input_ids[known:], *req.output_ids[max(known - prompt, 0) :], *last]
            new = new[len(new) - (length - known) :]
        if new:
            self.index.insert(np.array(new, np.int32), slot)
        self._known[req.rid] = slot, length
        return slot, length
