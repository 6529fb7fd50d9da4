"""A cache of what is made of source texts, bounded by their number and by their size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


def num_bytes(text: str) -> int:
    """Return the bytes of a text in UTF-8."""
    return len(text.encode(errors="surrogatepass"))


class SourceCache(Generic[T]):
    """Calls a function once for each source, and keeps the most recently used results, no errors. Thread-safe.

    Args:
        make: the function.
        max_count: of results.
        max_bytes: of their sources, and of results that are texts.
    """

    def __init__(self, make: Callable[[str], T], max_count: int, max_bytes: int) -> None:
        self._make, self._max_count, self._max_bytes = make, max_count, max_bytes
        self._entries: OrderedDict[str, tuple[T, int]] = OrderedDict()
        self._lock = Lock()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __call__(self, source: str) -> T:
        if (found := self._find(source)) is not None:
            return found[0]
        made = self._make(source)
        size = num_bytes(source) + (num_bytes(made) if isinstance(made, str) else 0)
        with self._lock:
            if source not in self._entries:
                self._entries[source] = made, size
                self.num_bytes += size
            while len(self._entries) > self._max_count or self.num_bytes > self._max_bytes:
                _, (_, left) = self._entries.popitem(last=False)
                self.num_bytes -= left
        return made

    def _find(self, source: str) -> tuple[T, int] | None:
        with self._lock:
            found = self._entries.get(source)
            if found is not None:
                self._entries.move_to_end(source)
            return found
