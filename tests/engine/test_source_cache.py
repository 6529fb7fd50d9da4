"""The cache of grammars: most recently used sources, bounded by number and size."""

from __future__ import annotations

import pytest

from specdec_kernels.engine.text.source_cache import SourceCache


def test_cache_keeps_the_most_recently_used_results() -> None:
    made: list[str] = []
    cache = SourceCache(lambda source: made.append(source), max_count=2, max_bytes=100)
    for source in "abacb":
        cache(source)
    assert made == ["a", "b", "c", "b"] and (len(cache), cache.num_bytes) == (2, 2)


def test_cache_counts_bytes_of_sources_and_of_texts() -> None:
    cache = SourceCache(str.upper, max_count=100, max_bytes=10)
    assert [cache("é"), cache("abc")] == ["É", "ABC"] and cache.num_bytes == 10
    assert cache("d") == "D" and (len(cache), cache.num_bytes) == (2, 8)
    assert cache("larger than all") == "LARGER THAN ALL" and (len(cache), cache.num_bytes) == (0, 0)


def test_cache_keeps_no_errors() -> None:
    cache = SourceCache(int, max_count=2, max_bytes=10)
    for _ in range(2):
        with pytest.raises(ValueError):
            cache("a")
    assert len(cache) == 0
