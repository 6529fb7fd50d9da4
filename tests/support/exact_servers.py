"""Servers of tests, as `specdec_kernels.exactness` compares them."""

from __future__ import annotations

from typing import Any

from specdec_kernels.exactness import Endpoint, Options, Result, Run, Side, lines_of, open_side, verdict_of
from support.server_thread import Running

OFF = {"speculation": "off"}


def side_of(server: Running | str, **fields: Any) -> Side:
    """Return a server, or that of a URL, whose requests carry these fields."""
    url = server if isinstance(server, str) else f"http://127.0.0.1:{server.port}"
    return open_side(Endpoint(url, fields=fields), None, "auto")


def check(ours: Side, theirs: Side, **options: Any) -> Result:
    given = {"max_tokens": 16, "shrink": 1} | options
    return Run(ours, theirs, Options(**given)).run()


def expect_exact(result: Result, ours: Side) -> None:
    """Expect no difference, and few near ties."""
    assert result.is_exact, "\n".join([*lines_of(result, ours), verdict_of(result)])
    assert len(result.findings) <= 1 + result.texts // 200, lines_of(result, ours)
    assert not result.refused and result.complete
