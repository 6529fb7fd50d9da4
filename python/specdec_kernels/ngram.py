"""N-gram index: drafts from earlier text, without a model."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _C
from ._deprecated import takes_old_arguments
from .ops._alloc import empty, wrong_type
from .ops.structs import Tree, tree_outputs

if TYPE_CHECKING:
    from .ops._tensor import Tensor


class NgramStatistics(NamedTuple):
    """Counters since construction, `load` (the draft counters) or `clear`."""

    inserted: int  # tokens
    held: int  # tokens not yet overwritten
    entries: int  # table entries in use
    load: float  # fraction of table entries in use
    evictions: int  # entries replaced by a new n-gram
    drafts: int  # rows drafted for a slot with a stream
    matches: int  # drafted rows with a match of at least one token
    drafted: int  # nodes, roots excluded
    rounds_by_match: list[int]  # rows that `extend` got with match_len m, for m = 0 to 32
    accepted_by_match: list[int]  # tokens accepted in those rows, without bonus tokens
    refused: int  # rows, or chunks of an `insert`, that a GPU ignored


class NgramDraft(NamedTuple):
    """Result of `NgramIndex.draft`."""

    tree: Tree  # of [B, N] nodes
    scores: Tensor  # [B, N] float32: log p of each node, 0 for the root, -inf after num_nodes
    match_len: Tensor  # [B] int32: tokens of the longest verified match, 0 for none; pass it to `extend`


class NgramIndex:
    """An index that drafts token trees from earlier occurrences of a request's last tokens.

    A table maps the hash of the last n tokens, n in {1, 2, 4, 8}, to their 15 most recent occurrences in a ring of
    stored text. Every occurrence is verified against that text before use, so a draft always continues inserted text.
    Memory is fixed at construction: when the ring is full, the oldest text of any stream is overwritten. The same calls
    give the same drafts and the same bytes, on the CPU and on a GPU.

    Every text belongs to a scope and is found only there: the global scope (0), a group, or a stream's private scope. A
    stream reads its private scope, its group and the global scope.

    On a GPU all tensors are on its device, calls are ordered by the streams they are made on, and `draft`, `insert`,
    `extend`, `begin`, `release` and `clear` are launches that a CUDA graph may capture; the index must outlive the
    graph. Calls that return a number wait for the device. Tensor contents that the CPU rejects (a negative token, a
    length out of range, a stream that would exceed max_len) add nothing and are counted in `statistics`.

    On the CPU, calls release the GIL and may come from several threads: drafts run concurrently, writes exclusively,
    and a long `insert` yields to others in between. Bytes are reproducible only if the order of writing calls is (for
    example from one thread), and that of a slot's drafts, each of which records the occurrence that the next follows.

    Args:
        max_tokens: minimum tokens stored, 1 to 2^30. A document occupies its last block of 27 tokens whole.
        num_slots: request slots, 1 to 65536.
        max_len: the longest stream of a slot; documents have no limit.
        num_threads: threads that share the rows of a `draft` and the text of a long `insert`, the caller's included;
            1 to 256. The resulting bytes do not depend on it. No effect on a GPU.
        device: "cpu", or a CUDA device as torch names it; the memory is then a torch tensor.

    Memory is about 68.8 bytes per token of `max_tokens` and 304 per slot; `num_bytes` is exact.
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
        """Copy the index to another device, running streams included. Wait for both devices."""
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
        """Load an index that `save` wrote, without its streams: their text remains, as documents do.

        Args:
            path: the file.
            num_slots: request slots. None: as saved.
            max_len: longest stream of a slot. None: as saved.
            num_threads: as for a new index.
            device: as for a new index.

        Raises:
            OSError: no such file.
            ValueError: the file is truncated, corrupt, of another version or no index; an argument out of range.
        """
        index = cls.__new__(cls)
        with open(path, "rb", buffering=0) as file:
            index._index = _C.NgramIndex.load(file.fileno(), num_slots, max_len, num_threads)
        index._memory = None
        return index if str(device) == "cpu" else index.to(device)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write text and table to a file, which appears under its name only when it is complete.

        The file is about as large as the index, and readable on machines of the same byte order. Several threads and
        processes may save to one path: one of their files remains, complete. If the path is a symbolic link, the link
        stays and its target is written.

        Raises:
            OSError: the file cannot be written.
            ValueError: the path exists and is no regular file: a FIFO, a device, a directory.
        """
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            raise ValueError(f"ngram_save: path is {str(path)!r}, expected a regular file, or nothing yet")
        partial = Path(f"{target}.{os.getpid()}.{secrets.token_hex(8)}.partial")
        # The name is unique to this call, so that no other save removes the file.
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
        """Start a stream in a slot, or resume one; the slot's previous stream ends.

        Without it, the first tokens of a slot start a stream in the global scope.

        Args:
            slot: the request's slot.
            group: scope of its text, which it reads besides the global one; 0 for none.
            private: only this stream reads its text, which is lost when it ends.
            request: the caller's id of the request, 0 or more. A stream with the same id, group and privacy that ended
                in a slot not reused since is resumed: its text is already stored, and `insert` with `start` skips it.

        Raises:
            ValueError: an argument out of range.
        """
        self._index.begin(slot, group, private, request)

    def length(self, slot: int) -> int:
        """Return the number of tokens in a slot's stream, 0 without a stream. Wait for the device.

        Raises:
            ValueError: slot out of range.
        """
        return self._index.length(slot)

    def insert(self, tokens: Tensor, slot: int | None = None, *, group: int = 0, start: int | None = None) -> None:
        """Insert text: a document in the global scope or a group, or the next tokens of a slot.

        Args:
            tokens: [T] int32, each 0 or more.
            slot: the slot whose stream the tokens continue: insert the prompt, then `extend` by each round's accepted
                tokens. None: a document.
            group: scope of a document; 0: global.
            start: position of tokens[0] in the slot's stream; tokens that the stream already has are skipped. None: the
                end of the stream.

        Raises:
            ValueError: wrong dtype, shape or device; a negative token; an argument out of range; both slot and group; a
                start beyond the stream; a stream that would exceed max_len. The index is unchanged then.
        """
        self._index.insert(tokens, slot, group, start)

    def extend(self, tokens: Tensor, num_valid: Tensor, slots: Tensor | None, match_len: Tensor | None = None) -> None:
        """Append a round's accepted tokens to the streams of its slots, row by row, as `insert` would.

        Args:
            tokens: [B, S] int32; the first `num_valid` of each row are 0 or more, the rest is ignored.
            num_valid: [B] int32, 0 to S.
            slots: [B] int32, -1 for an empty row, which adds nothing. None: row b is slot b.
            match_len: [B] int32, from `draft`, for `statistics`; or None.

        Raises:
            ValueError: wrong dtype, shape or device; num_valid or match_len out of range; a negative token; a stream
                that would exceed max_len. The index is unchanged then.
        """
        self._index.extend(tokens, num_valid, slots, match_len)

    def release(self, slot: int) -> None:
        """End the stream of a slot. Its text stays, like a document, until it is overwritten."""
        self._index.release(slot)

    def clear(self) -> None:
        """Remove all text, end all streams, reset the statistics."""
        self._index.clear()

    @takes_old_arguments
    def draft(
        self,
        slots: Tensor | None,
        seq_lens: Tensor,
        num_nodes: int,
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
        """Draft a tree of likely continuations of each slot's stream, best first, from all text inserted so far.

        Candidates are at most 32 occurrences. The first is the one that matched furthest at the stream's last draft,
        advanced by the tokens that the stream has gained since (at most 256), whether they match or not, so that a
        draft continues after a differing token. Then come occurrences of the last 8, 4, 2, 1 tokens, in this order; of
        each n-gram those in the stream's private scope, its group and the global scope, in this order; of each scope
        the 15 most recent, newest first.

        A candidate whose text matches the request's last m tokens (m verified up to 32) weighs 2^min(m, 24), times the
        weight of its scope (`own_weight` in the request's own stream), times recency^i if its n-gram has i newer
        occurrences. A node of depth d has the candidates that agree with its path. With m their longest match, p(node)
        = ((m + 2) / (m + 4))^d * their weight / the weight of all candidates. The tree grows by the node of largest p
        (log2 p in steps of 1/256); ties go to the longer match, then to the earlier candidate. It may have fewer than N
        nodes: see `num_nodes`.

        Args:
            slots: [B] int32; -1 or a slot without a stream is an empty row. None: row b is slot b.
            seq_lens: [B] int32, L: the position of each root.
            num_nodes: N, nodes including the root, 1 to 256.
            mode: "tree", or "chain": only the best child of each node.
            min_prob: omit nodes of a smaller p.
            min_match: omit candidates of a shorter match, 0 to 32.
            own_weight: weight of the request's own text, 0 to 256 in steps of 1/16; 0 excludes it.
            group_weight: the same for other text of its group.
            global_weight: the same for other text of the global scope.
            recency: above 0, at most 1; its powers are rounded to 1/256.
            out: preallocated result.

        Returns:
            NgramDraft. An empty row has num_nodes 0, tokens and positions 0, all scores -inf and match_len 0.

        Raises:
            ValueError: wrong dtype, shape or device; an argument out of range.
        """
        if mode != "tree" and mode != "chain":
            raise ValueError(f"ngram_draft: mode is {mode!r}, expected 'tree' or 'chain'")
        n = num_nodes
        if not 1 <= n <= 256:  # before its outputs are allocated
            raise ValueError(f"ngram_draft: num_nodes is {n}, expected 1 to 256")
        if out is None:
            tree = tree_outputs("ngram_draft", "seq_lens", seq_lens, n, ndim=1)
            scores = empty("ngram_draft", seq_lens, tree.tokens.shape, "float32")
            match_len = empty("ngram_draft", seq_lens, tree.num_nodes.shape, "int32")
            out = NgramDraft(tree, scores, match_len)
        elif not isinstance(out, NgramDraft):
            raise wrong_type("ngram_draft", "out", out, NgramDraft)
        tree, scores, match_len = out
        self._index.draft(
            slots, seq_lens, n, mode == 'chain', min_prob, min_match, own_weight, group_weight, global_weight, recency,
            *tree, scores, match_len,
        )  # fmt: skip
        return out


def device_memory(index: _C.NgramIndex, device: str | Any) -> Any:
    """Allocate GPU memory for an index of this size; None on the CPU, where the index owns its memory."""
    if str(device) == "cpu":
        return None
    import torch

    return torch.empty(index.device_words, dtype=torch.int64, device=device)
