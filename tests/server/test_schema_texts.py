"""Fifty texts of each schema of the table in docs/json_schemas.md, by each API, with and without speculation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specdec_kernels.engine import Engine, Ngram
from specdec_kernels.tiny import tiny_model
from support.held_schemas import HELD, TOGETHER
from support.schema_requests import Text, by_engine, by_server, check_pairs, requests_for
from support.server_thread import Running, serving

pytest.importorskip("xgrammar")
pytest.importorskip("llguidance")
pytestmark = pytest.mark.exhaustive

OPTIONS: dict[str, Any] = {"adaptive": False, "grammars": True, "device": "cpu", "max_len": 256, "num_slots": 32}
ROWS = HELD | {"together": TOGETHER}
COUNT = 50


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    with Engine(tiny_model("target"), **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def drafting() -> Iterator[Running]:
    with serving(Engine(tiny_model("target"), draft=Ngram(num_nodes=8), **OPTIONS)) as server:
        yield server


@pytest.mark.parametrize("name", ROWS)
def test_fifty_texts_of_each_schema_are_valid_and_the_same(name: str, plain: Engine, drafting: Running) -> None:
    schemas = [schema for schema in ROWS[name] if schema is not True]  # which an API takes only within another
    requests = [one for schema in schemas for one in requests_for(schema, range(COUNT))]
    texts, calls = by_engine(plain, requests), [one.as_call() for one in requests]
    expect_many_complete(texts)
    print(f"\nengine: {check_pairs(requests, texts, by_engine(drafting.engine, requests))}")
    print(f"response_format: {check_pairs(requests, texts, by_server(drafting, requests))}")
    print(f"forced call: {check_pairs(calls, by_engine(plain, calls), by_server(drafting, calls))}")
    drafting.wait_until_idle()


def expect_many_complete(texts: list[Text]) -> None:
    for first in range(0, len(texts), COUNT):
        assert sum(text.json is not None for text in texts[first : first + COUNT]) >= COUNT / 10
