"""Values of the per-slot words `status`, `finish_reasons` and `LogitEdits.kinds`."""

from __future__ import annotations

from enum import IntEnum, IntFlag


class Status(IntFlag):
    """Sticky bits of `status[slot]`. For bad device data an op sets a bit and stays in bounds; it never raises."""

    STALLED = 1  # alloc_pages or fork_pages could not serve the slot; cleared when they can again
    BAD_TREE = 2  # a malformed tree: cycle, child before parent, second root, node out of range
    BAD_PAGE = 4  # a page id outside the pool, or a table entry missing where a row must be
    BAD_LENGTH = 8  # a length that is negative or beyond the page table
    SHARED_PAGE = 16  # a rejected write into a page with more than one owner
    BAD_LOGITS = 32  # a row of logits without any token above -inf


class FinishReason(IntEnum):
    """Values of `finish_reasons[slot]`. Only the scheduler reports the last three; the device never has them."""

    RUNNING = 0
    STOP = 1  # a stop token, which stays as the last token, or a stop string found by the host
    LENGTH = 2  # max_new_tokens was reached
    CONTEXT = 3  # the sequence reached max_len
    CANCELLED = 4
    ERROR = 5  # the slot's status says why
    TIMEOUT = 6  # the request exceeded its time limit


class Edit(IntFlag):
    """Bits of `LogitEdits.kinds[slot]`: the edits that `edit_logits` applies to the slot's logits."""

    BIAS = 1  # add `bias`
    PENALTIES = 2  # penalize tokens in `counts` and on the tree's path
    MASK = 4  # forbid tokens that `vocab_mask` does not allow
