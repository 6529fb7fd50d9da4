"""The start of an engine: what takes long is announced."""

from __future__ import annotations

import time

import pytest

from specdec_kernels.engine import startup


def test_work_that_takes_long_is_announced(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "SECONDS_OF_SILENCE", 0.2)
    with startup.announced("short"):
        pass
    with startup.announced("timing rounds"):
        time.sleep(0.5)
    assert caplog.messages == ["specdec_kernels: timing rounds"]
