"""The n-gram index: drafts from text seen before, without a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from . import _C
from ._alloc import empty, shape_of
from .ops import Tree

if TYPE_CHECKING:
    from .ops import Tensor


class NgramStatistics(NamedTuple):
    """Counters since construction or `clear`."""

    tokens: int  # inserted
    entries: int  # of the table, in use
    evictions: int  # entries that gave way to a new n-gram
    drafts: int  # rows drafted for a slot with a stream
    matches: int  # of those, with at least one candidate
    drafted: int  # nodes beyond the roots


class NgramIndex:
    """Drafts token trees from the places where the last tokens of a request stood before.

    A table maps the hash of the last n tokens, n in {1, 2, 4, 8}, to the 7 most recent places they stood, over a ring
    of stored text. Every place is verified against that text before it is used, so a draft always continues something
    that was inserted. Memory is fixed at construction: when the ring is full the oldest text is overwritten, whoever
    wrote it. The same calls give the same drafts and the same bytes. Everything lies on the CPU. Calls from several
    threads take turns.

    Args:
        max_tokens: text kept, at least; 1 to 2^30. Documents fill up their last block of 28 tokens.
        num_slots: request slots, 1 to 65536.
        max_len: the longest stream of a slot; documents have no limit.

    Memory is about 68.6 bytes a token of `max_tokens` and 272 a slot; `num_bytes` is exact.
    """

    def __init__(self, max_tokens: int = 1 << 20, num_slots: int = 64, max_len: int = 4096) -> None:
        self._index = _C.NgramIndex(max_tokens, num_slots, max_len)

    @property
    def num_bytes(self) -> int:
        return self._index.num_bytes

    @property
    def statistics(self) -> NgramStatistics:
        return NgramStatistics(*self._index.statistics())

    def insert(self, tokens: Tensor, slot: int | None = None) -> None:
        """Adds text: a document for everybody, or the next tokens of a slot.

        Args:
            tokens: [T] int32, each 0 or more.
            slot: None for a document. Otherwise the tokens continue the stream of that slot (the prompt here, then
                what each round accepted through `extend`); the first call after `release` starts a new stream.

        Raises:
            ValueError: a wrong dtype, shape or device, a negative token, a slot out of range, a stream that would
                exceed max_len. The index is unchanged then.
        """
        self._index.insert(tokens, slot)

    def extend(self, tokens: Tensor, lengths: Tensor, slots: Tensor | None) -> None:
        """Adds what a round accepted to the streams of its slots, row after row, as `insert` would one by one.

        Args:
            tokens: [B, S] int32, the first `lengths` of each row 0 or more; what lies behind is ignored.
            lengths: [B] int32, 0 to S.
            slots: [B] int32 or None; -1 is an empty row, which adds nothing.

        Raises:
            ValueError: a wrong dtype, shape or device, a length out of range, a negative token, a stream that would
                exceed max_len. The index is unchanged then.
        """
        self._index.extend(tokens, lengths, slots)

    def release(self, slot: int) -> None:
        """Ends the stream of a slot. Its text stays, as a document, until it is overwritten."""
        self._index.release(slot)

    def clear(self) -> None:
        """Forgets all text, ends all streams, resets the statistics."""
        self._index.clear()

    def draft(
        self,
        slots: Tensor | None,
        seq_lens: Tensor,
        num_draft_tokens: int,
        *,
        mode: str = "tree",
        min_prob: float = 0.0,
        min_match: int = 1,
        out_tokens: Tensor | None = None,
        out_parents: Tensor | None = None,
        out_positions: Tensor | None = None,
        out_first_child: Tensor | None = None,
        out_next_sibling: Tensor | None = None,
        out_mask: Tensor | None = None,
        out_num_nodes: Tensor | None = None,
        out_scores: Tensor | None = None,
        out_match_len: Tensor | None = None,
    ) -> tuple[Tree, Tensor, Tensor]:
        """A tree of what may follow the stream of each slot, best first, from all text inserted so far.

        Candidates are the places found for the last 8, 4, 2, 1 tokens, in this order and the most recent first. One
        whose text agrees with the request over the last m tokens (m verified up to 32) weighs 2^min(m, 24), and four
        times that in the request's own stream. A node is reached by the candidates that agree with the path to it:
        p(node) = their weight / the weight of all. The tree takes the node of largest p next; ties go to the longer
        best match, then to the earlier candidate. It is never filled up: `num_nodes` says how many there are.

        Args:
            slots: [B] int32 or None; -1 or a slot without a stream is an empty row.
            seq_lens: [B] int32, L: the position of each root.
            num_draft_tokens: N, nodes including the root, 1 to 256.
            mode: "tree", or "chain": always the best child, so no node has two.
            min_prob: no node with a smaller p.
            min_match: no candidate with a shorter match, 1 to 32.

        Returns:
            `Tree`, scores [B, N] float32, log p of each node (root 0, unused -inf), and match_len [B] int32, the
            longest verified match (0: none). An empty row has num_nodes 0, tokens and positions 0 and all scores -inf.

        Raises:
            ValueError: a wrong dtype, shape or device; a number out of range.
        """
        if mode not in ("tree", "chain"):
            raise ValueError(f"ngram_draft: mode is {mode!r}, expected 'tree' or 'chain'")
        n = num_draft_tokens
        if not 1 <= n <= 256:  # before its outputs are allocated
            raise ValueError(f"ngram_draft: num_draft_tokens is {n}, expected 1 to 256")
        (batch,) = shape_of("ngram_draft", "seq_lens", seq_lens, 1)

        def output(given: Tensor | None, shape: tuple[int, ...], dtype: str = "int32") -> Tensor:
            return empty("ngram_draft", seq_lens, shape, dtype) if given is None else given

        tree = Tree(
            tokens=output(out_tokens, (batch, n)),
            parents=output(out_parents, (batch, n)),
            positions=output(out_positions, (batch, n)),
            first_child=output(out_first_child, (batch, n)),
            next_sibling=output(out_next_sibling, (batch, n)),
            mask=output(out_mask, (batch, n, (n + 63) // 64), "int64"),
            num_nodes=output(out_num_nodes, (batch,)),
        )
        scores = output(out_scores, (batch, n), "float32")
        match_len = output(out_match_len, (batch,))
        self._index.draft(slots, seq_lens, n, mode == "chain", min_prob, min_match, *tree, scores, match_len)
        return tree, scores, match_len
