"""Headless Chromium over its debugging pipe, for tests of pages; skips where there is no Chromium."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
SWITCHES = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio")


class Page:
    """One page of a browser, in the protocol of its developer tools."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._ids = count(1)
        self._unread = b""
        self._session: str | None = None
        self.errors: list[str] = []  # errors raised by scripts or logged to the console
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def resize(self, width: int, height: int) -> None:
        """Show the page on a screen of these CSS pixels; a narrow one is a phone's."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **screen)

    def screenshot(self, file: Path) -> None:
        """Write the visible part of the page as PNG."""
        file.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def value(self, expression: str) -> Any:
        """Return the value of an expression; wait for it if it is a promise."""
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 60) -> None:
        turn = f"new Promise((done, fail) => {{ const end = Date.now() + {1000 * seconds}; const look = () => "
        turn += f"({condition}) ? done(true) : Date.now() > end ? fail('too long') : setTimeout(look, 20); look(); }})"
        assert self.value(turn)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(answer["params"]["exceptionDetails"]))
            elif answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.errors.append(answer["params"]["entry"]["text"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            part = os.read(self._from, 1 << 16)
            assert part, "Chromium has ended"
            self._unread += part
        message, _, self._unread = self._unread.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


@contextmanager
def browsing(folder: Path) -> Iterator[Page]:
    """Yield a page of a Chromium that keeps its files in a folder."""
    assert CHROMIUM is not None
    (read, to_browser), (from_browser, write) = os.pipe(), os.pipe()
    # Chromium reads from descriptor 3 and writes to 4.
    command = f'exec "$0" "$@" 3<&{read} 4>&{write}'
    switches = [*SWITCHES, "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
    browser = subprocess.Popen(
        ["bash", "-c", command, CHROMIUM, *switches],
        pass_fds=(read, write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read)
    os.close(write)
    try:
        yield Page(to_browser, from_browser)
    finally:
        browser.kill()
        browser.wait()
        os.close(to_browser)
        os.close(from_browser)
