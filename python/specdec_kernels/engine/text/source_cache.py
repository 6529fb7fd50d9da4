"""Caches bounded by the number of their entries and by their size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def num_bytes(text: str) -> int:
    """Return the bytes of a text in UTF-8."""
    return len(text.encode(errors="surrogatepass"))


class BoundedCache(Generic[K, T]):
    """Keeps the most recently used values.

    Attributes:
        num_bytes: of all values.

    Args:
        max_count: of values.
        max_bytes: of all values.
    """

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count, self._max_bytes = max_count, max_bytes
        self._entries: OrderedDict[K, tuple[T, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> list[tuple[K, T]]:
        """Return the values with their keys, the least recently used one first."""
        return [(key, value) for key, (value, _) in self._entries.items()]

    def find(self, key: K) -> tuple[T, int] | None:
        """Return a value and its size, and count it as used; None: it is not kept."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: K, value: T, size: int) -> None:
        """Keep a value of a size in bytes, and remove the least recently used ones for which there is no room."""
        self.num_bytes += size - self._entries.pop(key, (value, 0))[1]
        self._entries[key] = value, size
        while len(self._entries) > self._max_count or self.num_bytes > self._max_bytes:
            _, (_, left) = self._entries.popitem(last=False)
            self.num_bytes -= left


class SourceCache(Generic[T]):
    """Calls a function once for each source, and keeps the most recently used results, no errors. Thread-safe.

    Args:
        make: the function.
        max_count: of results.
        max_bytes: of their sources, and of results that are texts.
    """

    def __init__(self, make: Callable[[str], T], max_count: int, max_bytes: int) -> None:
        self._make = make
        self._kept: BoundedCache[str, T] = BoundedCache(max_count, max_bytes)
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all that is kept."""
        return self._kept.num_bytes

    def __len__(self) -> int:
        return len(self._kept)

    def __call__(self, source: str) -> T:
        with self._lock:
            found = self._kept.find(source)
        if found is not None:
            return found[0]
        made = self._make(source)
        size = num_bytes(source) + (num_bytes(made) if isinstance(made, str) else 0)
        with self._lock:
            self._kept.put(source, made, size)
        return made
