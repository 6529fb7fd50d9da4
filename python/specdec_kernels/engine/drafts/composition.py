"""Drafts that combine others, as the engine sees them: each member by itself, whatever combines it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from torch import Tensor

from ...models.kv_pools import KvPools
from .base import Draft
from .capabilities import HasPools, HasWeights, Idleable, Migratable
from .context import DraftContext

Capability = TypeVar("Capability")


def walk(draft: Draft) -> Iterator[Draft]:
    """Yield all members, those of members included, and then the draft itself."""
    for member in draft.members:
        yield from walk(member)
    yield draft


def leaves(draft: Draft) -> list[Draft]:
    """Return the drafts that combine no others: of one without members, itself."""
    return [each for each in walk(draft) if not each.members]


def having(draft: Draft, capability: type[Capability]) -> list[Capability]:
    """Return the drafts with this capability."""
    return [each for each in walk(draft) if isinstance(each, capability)]


# --- opening and closing


def expect_closed(draft: Draft) -> None:
    """Raise ValueError where an engine has this draft or one of its members."""
    for each in walk(draft):
        if each.is_open:
            raise ValueError(
                f"Engine: draft ({type(each).__name__}) is open in another engine, "
                "expected one for this engine alone, or the other one closed"
            )


def open_draft(draft: Draft, context: DraftContext) -> None:
    """Open members, then what combines them. Where that fails, all are closed again.

    Raises:
        ValueError: one of them is open already; a model that does not fit the target.
    """
    expect_closed(draft)
    try:
        for each in walk(draft):
            if each.is_open:  # it is there twice
                expect_closed(each)
            each._closed = dict(vars(each))
            each.context = context
            each.open(context)
    except BaseException:
        close_draft(draft)
        raise


def close_draft(draft: Draft) -> None:
    """Put a draft and its members back to how they were before `open_draft`, which frees their memory."""
    for each in walk(draft):
        if each.is_open:
            closed = each._closed
            vars(each).clear()
            vars(each).update(closed)


# --- pools and weights


def pools_of(draft: Draft) -> list[KvPools]:
    """Return the KV pools of all drafts."""
    return [pools for each in having(draft, HasPools) for pools in each.pools]


def resize_pools(draft: Draft, num_pages: int) -> None:
    """Replace all pools by empty ones with another number of pages."""
    for each in having(draft, HasPools):
        each.resize_pools(num_pages)


def sleep(draft: Draft, level: int) -> None:
    """Free the memory of pools and weights, as `HasWeights.sleep`."""
    for each in walk(draft):
        if isinstance(each, HasWeights):
            each.sleep(level)
        elif isinstance(each, HasPools):
            each.resize_pools(0)


def wake(draft: Draft, level: int, num_pages: int) -> None:
    """Undo `sleep`, with empty pools."""
    for each in walk(draft):
        if isinstance(each, HasWeights):
            each.wake(level, num_pages)
        elif isinstance(each, HasPools):
            each.resize_pools(num_pages)


# --- slots


def catch_up(draft: Draft, slots: Tensor, max_kv_len: int | None = None) -> None:
    """Work off the backlog of slots [B] of every draft that can be idle."""
    for each in having(draft, Idleable):
        each.catch_up(slots, max_kv_len)


def save_slot(draft: Draft, slot: int) -> dict[str, Tensor]:
    """Return what all drafts keep of a slot (`Migratable.save`); where there are several, names say whose it is."""
    return {
        f"{prefix}{name}": tensor
        for prefix, each in _prefixes(draft)
        if isinstance(each, Migratable)
        for name, tensor in each.save(slot).items()
    }


def restore_slot(draft: Draft, slot: int, saved: Mapping[str, Tensor]) -> None:
    """Give each draft what `save_slot` returned of it elsewhere."""
    for prefix, each in _prefixes(draft):
        if isinstance(each, Migratable):
            own = {name.removeprefix(prefix): saved[name] for name in saved if name.startswith(prefix)}
            each.restore(slot, own)


def _prefixes(draft: Draft) -> list[tuple[str, Draft]]:
    each = list(walk(draft))
    return [("", draft)] if len(each) == 1 else [(f"{i}.", one) for i, one in enumerate(each)]
