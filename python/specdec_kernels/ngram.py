"""The n-gram index: drafts from text seen before, without a model."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _C
from .ops._alloc import empty, wrong_type
from .ops.structs import Tree, tree_outputs

if TYPE_CHECKING:
    from .ops import Tensor


class NgramStatistics(NamedTuple):
    """Counters since construction, `load` (of what was drafted) or `clear`."""

    inserted: int  # tokens
    held: int  # of them, not overwritten
    entries: int  # of the table, in use
    load: float  # the share of its entries in use
    evictions: int  # entries that gave way to a new n-gram
    drafts: int  # rows drafted for a slot with a stream
    matches: int  # of those, with a match of one token or more
    drafted: int  # nodes beyond the roots
    rounds_by_match: list[int]  # rows that `extend` got with a match_len m, at m = 0 to 32
    accepted_by_match: list[int]  # tokens accepted in those, bonus tokens left out
    refused: int  # rows, or pieces of an `insert`, that a GPU left out


class NgramDraft(NamedTuple):
    """What `NgramIndex.draft` makes of the streams of slots."""

    tree: Tree  # of [B, N] nodes
    scores: Tensor  # [B, N] float32: log p of each node, 0 for the root, -inf behind num_nodes
    match_len: Tensor  # [B] int32: tokens of the longest verified match, 0 for none; `extend` counts by it


class NgramIndex:
    """Drafts token trees from the places where the last tokens of a request stood before.

    A table maps the hash of the last n tokens, n in {1, 2, 4, 8}, to the 15 most recent places they stood, over a ring
    of stored text. Every place is verified against that text before it is used, so a draft always continues something
    that was inserted. Memory is fixed at construction: when the ring is full the oldest text is overwritten, whoever
    wrote it. The same calls give the same drafts and the same bytes, on the CPU and on a GPU.

    Every text belongs to a scope, and is found there only: everybody's (0), a group's, or a stream's own. A stream
    looks into its own, its group's and everybody's.

    On a GPU all tensors are on its device, calls are ordered by the streams they are made on, and `draft`, `insert`,
    `extend`, `begin`, `release` and `clear` are launches, which may be captured in a CUDA graph; the index must outlive
    it. What returns a number waits for the device. What the CPU refuses because of a tensor's content (a negative
    token, a length out of range, a stream that would exceed max_len) adds nothing and is counted in `statistics`.

    On the CPU calls hold no GIL and may come from several threads: drafts run side by side, what writes runs alone, and
    a long `insert` lets others in between. Bytes are the same only if the writing calls come in the same order, from
    one thread, say, and so do the drafts of a slot, which note there what the next one follows.

    Args:
        max_tokens: text kept, at least; 1 to 2^30. Documents fill up their last block of 27 tokens.
        num_slots: request slots, 1 to 65536.
        max_len: the longest stream of a slot; documents have no limit.
        num_threads: threads that share the rows of a `draft` and the text of a long `insert`, the caller's included;
            1 to 256. They leave the bytes that one would. Of no use on a GPU.
        device: "cpu", or a CUDA device as torch names it, where the memory is a torch tensor.

    Memory is about 68.8 bytes a token of `max_tokens` and 304 a slot; `num_bytes` is exact.
    """

    def __init__(
        self,
        max_tokens: int = 1 << 20,
        num_slots: int = 64,
        max_len: int = 4096,
        *,
        num_threads: int = 1,
        device: str | Any = "cpu",
    ) -> None:
        self._index = _C.NgramIndex(max_tokens, num_slots, max_len, num_threads, None)
        self._memory = device_memory(self._index, device)
        if self._memory is not None:
            self._index = _C.NgramIndex(max_tokens, num_slots, max_len, num_threads, self._memory)

    def to(self, device: str | Any) -> NgramIndex:
        """A copy on another device, running streams included. Waits for both devices."""
        index = NgramIndex.__new__(NgramIndex)
        index._memory = device_memory(self._index, device)
        index._index = self._index.copy(index._memory)
        return index

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        num_slots: int | None = None,
        max_len: int | None = None,
        num_threads: int = 1,
        device: str | Any = "cpu",
    ) -> NgramIndex:
        """The index that `save` wrote, without its streams: their text is there as documents are.

        Args:
            path: the file.
            num_slots, max_len: None: as they were.
            num_threads, device: as above.

        Raises:
            OSError: no such file.
            ValueError: the file is truncated, corrupt, of another version or something else; a number out of range.
        """
        index = cls.__new__(cls)
        with open(path, "rb", buffering=0) as file:
            index._index = _C.NgramIndex.load(file.fileno(), num_slots, max_len, num_threads)
        index._memory = None
        return index if str(device) == "cpu" else index.to(device)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes text and table to a file, which appears under its name only when it is complete.

        The file is about as large as the index, and readable on machines of the same byte order. Several threads and
        processes may save to one path: one of their files is there in the end, whole. Where the path is a symbolic
        link, it stays one, and the file that it names is written.

        Raises:
            OSError: it cannot be written.
            ValueError: the path is something else than a regular file: a FIFO, a device, a directory.
        """
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            raise ValueError(f"ngram_save: path is {str(path)!r}, expected a regular file, or nothing yet")
        partial = Path(f"{target}.{os.getpid()}.{secrets.token_hex(8)}.partial")
        # No other save's, and so never removed for another one.
        file = open(partial, "xb", buffering=0)  # noqa: SIM115
        try:
            with file:
                if error := self._index.save(file.fileno()):
                    raise OSError(error, os.strerror(error), str(path))
            partial.replace(target)
        except BaseException:
            partial.unlink()
            raise

    @property
    def num_bytes(self) -> int:
        return self._index.num_bytes

    @property
    def statistics(self) -> NgramStatistics:
        return NgramStatistics(*self._index.statistics())

    def begin(self, slot: int, *, group: int = 0, private: bool = False, request: int | None = None) -> None:
        """Starts a stream in a slot, or resumes one; what the slot held before ends.

        Without it, the first tokens of a slot start a stream that everybody sees.

        Args:
            slot: the request's.
            group: whose texts the stream sees beside everybody's, and where its own goes; 0 for none.
            private: its text is for itself alone, and lost when it ends.
            request: the caller's number for the request, 0 or more. Where a stream of that number, group and privacy
                has ended in any slot that was not given away since, it is resumed: its text is held already, and
                `insert` with `start` skips that.

        Raises:
            ValueError: a number out of range.
        """
        self._index.begin(slot, group, private, request)

    def length(self, slot: int) -> int:
        """How many tokens the stream of a slot has; 0 without one. Waits for the device.

        Raises:
            ValueError: a number out of range.
        """
        return self._index.length(slot)

    def insert(self, tokens: Tensor, slot: int | None = None, *, group: int = 0, start: int | None = None) -> None:
        """Adds text: a document for everybody or for a group, or the next tokens of a slot.

        Args:
            tokens: [T] int32, each 0 or more.
            slot: None for a document. Otherwise the tokens continue the stream of that slot (the prompt here, then
                what each round accepted through `extend`).
            group: of a document: who finds it, 0 for everybody.
            start: where tokens[0] stands in the slot's stream; what the stream holds already is skipped. None: behind
                all of it.

        Raises:
            ValueError: a wrong dtype, shape or device, a negative token, a number out of range, a group with a slot, a
                start behind the stream, a stream that would exceed max_len. The index is unchanged then.
        """
        self._index.insert(tokens, slot, group, start)

    def extend(self, tokens: Tensor, num_valid: Tensor, slots: Tensor | None, match_len: Tensor | None = None) -> None:
        """Adds what a round accepted to the streams of its slots, row after row, as `insert` would one by one.

        Args:
            tokens: [B, S] int32, the first `num_valid` of each row 0 or more; what lies behind is ignored.
            num_valid: [B] int32, 0 to S.
            slots: [B] int32 or None; -1 is an empty row, which adds nothing.
            match_len: [B] int32, what `draft` gave for the rows, or None: counted in `statistics`.

        Raises:
            ValueError: a wrong dtype, shape or device, a num_valid or match_len out of range, a negative token, a
                stream that would exceed max_len. The index is unchanged then.
        """
        self._index.extend(tokens, num_valid, slots, match_len)

    def release(self, slot: int) -> None:
        """Ends the stream of a slot. Its text stays, like a document, until it is overwritten."""
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
        min_match: int = 0,
        own_weight: float = 4.0,
        group_weight: float = 1.0,
        global_weight: float = 1.0,
        recency: float = 1.0,
        out: NgramDraft | None = None,
    ) -> NgramDraft:
        """A tree of what may follow the stream of each slot, best first, from all text inserted so far.

        Candidates are the places found for the last 8, 4, 2, 1 tokens, in this order, in the stream's own scope, its
        group's and everybody's, in this order, and the 15 most recent of each first; at most 32. Before them comes the
        place that agreed furthest at the stream's last draft, as many tokens further on as the stream has grown since
        (256 at most), whether they agree or not, so that a draft goes on behind a token that was another. One whose
        text agrees with the request over the last m tokens (m verified up to 32) weighs 2^min(m, 24), times the weight
        of its scope or, in the request's own stream, `own_weight`, times recency^i if i of the places of its n-gram are
        newer. A node of depth d is reached by the candidates that agree with the path to it, the longest match of which
        is m:
        p(node) = ((m + 2) / (m + 4))^d * their weight / the weight of all. The tree takes the node of largest p next
        (log2 p in steps of 1/256); ties go to the longer match, then to the earlier candidate. It is never filled up:
        `num_nodes` says how many there are.

        Args:
            slots: [B] int32 or None; -1 or a slot without a stream is an empty row.
            seq_lens: [B] int32, L: the position of each root.
            num_draft_tokens: N, nodes including the root, 1 to 256.
            mode: "tree", or "chain": always the best child, so no node has two.
            min_prob: no node with a smaller p.
            min_match: no candidate with a shorter match, 0 to 32.
            own_weight, group_weight, global_weight: of a candidate's text, 0 to 256 in steps of 1/16; 0 leaves it out.
            recency: above 0, at most 1; its powers are rounded to 1/256.

        Returns:
            NgramDraft. An empty row has num_nodes 0, tokens and positions 0, all scores -inf and match_len 0.

        Raises:
            ValueError: a wrong dtype, shape or device; a number out of range.
        """
        if mode != "tree" and mode != "chain":
            raise ValueError(f"ngram_draft: mode is {mode!r}, expected 'tree' or 'chain'")
        n = num_draft_tokens
        if not 1 <= n <= 256:  # before its outputs are allocated
            raise ValueError(f"ngram_draft: num_draft_tokens is {n}, expected 1 to 256")
        if out is None:
            tree = tree_outputs("ngram_draft", "seq_lens", seq_lens, n, ndim=1)
            scores = empty("ngram_draft", seq_lens, tree.tokens.shape, "float32")
            match_len = empty("ngram_draft", seq_lens, tree.num_nodes.shape, "int32")
            out = NgramDraft(tree, scores, match_len)
        elif not isinstance(out, NgramDraft):
            raise wrong_type("ngram_draft", "out", out, NgramDraft)
        tree, scores, match_len = out
        self._index.draft(
            slots,
            seq_lens,
            n,
            mode == "chain",
            min_prob,
            min_match,
            own_weight,
            group_weight,
            global_weight,
            recency,
            *tree,
            scores,
            match_len,
        )
        return out


def device_memory(index: _C.NgramIndex, device: str | Any) -> Any:
    """Memory for an index of this size on a GPU; None for the CPU, where it has its own."""
    if str(device) == "cpu":
        return None
    import torch

    return torch.empty(index.device_words, dtype=torch.int64, device=device)
