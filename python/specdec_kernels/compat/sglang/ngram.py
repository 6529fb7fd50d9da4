"""Draft trees from an n-gram index, in the form that SGLang's n-gram worker reads. Does not import SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..followed_texts import FollowedTexts

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ALGORITHM", "NgramTrees"]

ALGORITHM = "SPECDEC_NGRAM"  # its name in SGLang


class NgramTrees:
    """Drafts for the requests of SGLang's batches, from the text of all requests, prompts included.

    Requests are identified by their `rid`, also after a retraction.

    Args:
        num_nodes: nodes of a tree, root included, 1 to 256.
        max_requests: most running requests.
        max_len: longest text, in tokens.
        max_tokens: capacity of the index.
    """

    def __init__(self, num_nodes: int, max_requests: int, max_len: int, *, max_tokens: int = 1 << 20) -> None:
        self.num_nodes = num_nodes
        # With room for the round in which a text exceeds its limit.
        self._texts = FollowedTexts(max_requests, max_len + num_nodes, max_tokens)
        self.index = self._texts.index

    def clear(self) -> None:
        self._texts.clear()

    def draft(self, batch: Any, *, overlap: bool) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Draft a tree for each request of a batch.

        Args:
            batch: `reqs` with `rid`, `origin_input_ids_unpadded` and `output_ids`; `spec_info` with the last round's
                result: `accept_tokens`, num_nodes for each request, and `accept_lens`.
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
        ids = req.origin_input_ids_unpadded  # with the tokens of images, whose hashes are no tokens
        prompt, output = len(ids), len(req.output_ids)
        length = prompt + output + len(last)

        def text_from(known: int) -> list[int]:
            return [*ids[known:], *req.output_ids[max(known - prompt, 0) :], *last][known - length :]

        return self._texts.follow(req.rid, length, text_from), length
