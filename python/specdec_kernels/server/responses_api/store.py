"""Responses that clients can refer to later, in bounded memory."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..protocol import Object, RequestError
from ..protocol.errors import shown


@dataclass(frozen=True)
class StoredResponse:
    """A response and the items that it answers.

    Attributes:
        response: the response object.
        items: the input items, without those of earlier responses.
        previous: id of the response that it continues.
    """

    response: Object
    items: list[Object]
    previous: str | None

    @property
    def id(self) -> str:
        """The id of the response."""
        return str(self.response["id"])


ITEM_BYTES = 256  # of an item in the index


class Entry(NamedTuple):
    """A stored response as JSON, so that its size is known."""

    text: bytes  # of the response and its input
    previous: str | None
    items: list[str]  # their ids

    @property
    def size(self) -> int:
        """Its bytes, those of the index of its items included."""
        return len(self.text) + ITEM_BYTES * len(self.items)


class ResponseStore:
    """The least recently used responses go first. A conversation counts as used from its first response on.

    Args:
        max_count: number of responses.
        max_bytes: their size as JSON, input included.
    """

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count, self._max_bytes = max_count, max_bytes
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._holders: dict[str, str] = {}  # the response of each item
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, stored: StoredResponse) -> None:
        """Add a response, and remove the least recently used ones for which there is no room."""
        ids = [item["id"] for item in [*stored.items, *stored.response["output"]]]
        entry = Entry(json.dumps([stored.response, stored.items]).encode(), stored.previous, ids)
        self._entries[stored.id] = entry
        self.num_bytes += entry.size
        for item in ids:
            self._holders.setdefault(item, stored.id)
        while len(self._entries) > self._max_count or self.num_bytes > self._max_bytes:
            self.delete(next(iter(self._entries)))

    def get(self, name: str, response_id: str) -> StoredResponse:
        """Return a response; `name` is what errors call the id.

        Raises:
            RequestError: it is not stored, or not any more.
        """
        if response_id not in self._entries:
            raise not_stored(name, response_id)
        for one in self._chain(response_id):  # a response is used more recently than those that it continues
            self._entries.move_to_end(one)
        entry = self._entries[response_id]
        response, items = json.loads(entry.text)
        return StoredResponse(response, items, entry.previous)

    def conversation(self, response_id: str) -> list[bytes]:
        """Return all turns up to a response, as JSON for `items_of`, which may take a while."""
        chain = self._chain(response_id)
        missing = self._entries[chain[0]].previous if chain else response_id
        if missing is not None:
            raise not_stored("previous_response_id", missing)
        for one in chain:
            self._entries.move_to_end(one)
        return [self._entries[one].text for one in chain]

    def _chain(self, response_id: str) -> list[str]:
        """Return the stored responses of a conversation, the first one first."""
        chain: list[str] = []
        at: str | None = response_id
        while at is not None and at in self._entries:
            chain.append(at)
            at = self._entries[at].previous
        return chain[::-1]

    def holder(self, item_id: str) -> bytes | None:
        """Return the stored response that has an item, as JSON for `items_of`; None: there is none. Thread-safe."""
        entry = self._entries.get(self._holders.get(item_id, ""))
        return None if entry is None else entry.text

    def delete(self, response_id: str) -> bool:
        """Remove a response; return whether it was there."""
        entry = self._entries.pop(response_id, None)
        if entry is None:
            return False
        self.num_bytes -= entry.size
        for item in entry.items:
            if self._holders.get(item) == response_id:
                del self._holders[item]
        return True


def items_of(turns: Iterable[bytes]) -> list[Object]:
    """Return the items of turns, input and output."""
    found: list[Object] = []
    for turn in turns:
        response, items = json.loads(turn)
        found += [*items, *response["output"]]
    return found


class References:
    """Items of stored responses. Each response is decoded once.

    Args:
        store: that has them.
    """

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._known: dict[str, Object] = {}

    def find(self, item_id: str) -> Object | None:
        """Return an item; None: there is none with this id."""
        if item_id not in self._known and (holder := self._store.holder(item_id)) is not None:
            self._known |= {item["id"]: item for item in items_of([holder])}
        return self._known.get(item_id)


def not_stored(name: str, response_id: str) -> RequestError:
    """Return the error of an id that is not, or no longer, that of a stored response."""
    return RequestError(f"{name} is {shown(response_id)}, expected that of a stored response", name, status=404)
