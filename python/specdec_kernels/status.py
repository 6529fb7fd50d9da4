"""What the per-slot words `status`, `finish_reasons` and `LogitEdits.kinds` say."""

from __future__ import annotations

from enum import IntEnum, IntFlag


class Status(IntFlag):
    """Sticky bits of `status[slot]`: an op never throws for bad data on the device, sets a bit, stays in bounds."""

    STALLED = 1  # alloc_pages or fork_pages could not serve the slot; cleared when they can
    BAD_TREE = 2  # a malformed tree: cycle, child before parent, second root, node out of range
    BAD_PAGE = 4  # a page id outside the pool, or a table entry missing where a row must be
    BAD_LENGTH = 8  # a length that is negative or beyond the page table
    SHARED_PAGE = 16  # a write into a page with more than one owner, refused
    BAD_LOGITS = 32  # a row of logits with nothing to choose from


class FinishReason(IntEnum):
    """`finish_reasons[slot]`; the last three are never on the device, but in what the scheduler reports."""

    RUNNING = 0
    STOP = 1  # a stop token, kept as the last one, or (found by the host) a stop string
    LENGTH = 2  # the budget of new tokens is used up
    CONTEXT = 3  # the sequence reached its maximal length
    CANCELLED = 4
    ERROR = 5  # the slot's status says why
    TIMEOUT = 6  # it did not end in the time that it was given


class Edit(IntFlag):
    """Bits of `LogitEdits.kinds[slot]`: what `edit_logits` does to the slot's logits."""

    BIAS = 1  # adds `bias`
    PENALTIES = 2  # for tokens that `counts` and the tree have
    MASK = 4  # rules out what `vocab_mask` does not allow
