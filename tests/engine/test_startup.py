"""The start of an engine: what takes long is announced."""

from __future__ import annotations

import pytest

from specdec_kernels.engine import startup
from support.server_thread import wait_for


def test_work_that_takes_long_is_announced(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "SECONDS_OF_SILENCE", 1000)
    with startup.announced("short"):
        pass
    monkeypatch.setattr(startup, "SECONDS_OF_SILENCE", 0)
    with startup.announced("timing rounds"):
        wait_for(lambda: bool(caplog.messages))
    assert caplog.messages == ["specdec_kernels: timing rounds"]
