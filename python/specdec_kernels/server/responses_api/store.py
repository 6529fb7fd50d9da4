"""Responses that clients can refer to later, in bounded memory."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass

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


class ResponseStore:
    """The least recently used responses go first. A conversation counts as used from its first response on.

    Args:
        max_count: number of responses.
        max_bytes: their size as JSON, input included.
    """

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count, self._max_bytes = max_count, max_bytes
        self._stored: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._holders: dict[str, str] = {}  # the response of each item
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, stored: StoredResponse) -> None:
        """Add a response, and remove the least recently used ones for which there is no room."""
        size = len(json.dumps([stored.response, stored.items]))
        self._stored[stored.id] = stored, size
        self.num_bytes += size
        for item in [*stored.items, *stored.response["output"]]:
            self._holders.setdefault(item["id"], stored.id)
        while len(self._stored) > self._max_count or self.num_bytes > self._max_bytes:
            self.delete(next(iter(self._stored)))

    def get(self, name: str, response_id: str) -> StoredResponse:
        """Return a response; `name` is what errors call the id.

        Raises:
            RequestError: it is not stored, or not any more.
        """
        chain: list[str] = []
        at: str | None = response_id
        while at is not None and at in self._stored and at not in chain:
            chain.append(at)
            at = self._stored[at][0].previous
        for one in reversed(chain):  # the last response of a conversation is the most recently used one
            self._stored.move_to_end(one)
        if not chain:
            raise RequestError(f"{name} is {shown(response_id)}, expected that of a stored response", name, status=404)
        return self._stored[response_id][0]

    def conversation(self, response_id: str) -> list[Object]:
        """Return the items of all turns up to a response, its output included."""
        turns: list[StoredResponse] = []
        at: str | None = response_id
        while at is not None:
            turns.append(self.get("previous_response_id", at))
            at = turns[-1].previous
        return [item for turn in reversed(turns) for item in [*turn.items, *turn.response["output"]]]

    def item(self, item_id: str) -> Object | None:
        """Return an item of a stored response; None: there is none with this id."""
        holder = self._stored.get(self._holders.get(item_id, ""))
        if holder is None:
            return None
        items = [*holder[0].items, *holder[0].response["output"]]
        return next((item for item in items if item["id"] == item_id), None)

    def delete(self, response_id: str) -> bool:
        """Remove a response; return whether it was there."""
        stored, size = self._stored.pop(response_id, (None, 0))
        if stored is None:
            return False
        self.num_bytes -= size
        for item in [*stored.items, *stored.response["output"]]:
            if self._holders.get(item["id"]) == response_id:
                del self._holders[item["id"]]
        return True
