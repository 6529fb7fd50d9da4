"""What tests of a server share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from support.leaks import expect_nothing_left
from support.server_thread import Running


@pytest.fixture
def client(server: Running) -> Iterator[OpenAI]:
    """Return a client of the test module's server; after a test, no request may be left there."""
    with server.client() as client:
        yield client
    server.wait_until_idle()
    expect_nothing_left(server.engine)
