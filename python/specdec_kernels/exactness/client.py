"""Requests to a server of OpenAI's API, with the standard library only."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from .answers import Answer, Malformed, StreamParser, parse_whole

Object = dict[str, Any]
BUSY = (429, 503)
MAX_WAITS = 60  # for a server whose queue is full


class Refused(Exception):
    """A server answered a request with a status of 400 to 499."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status, self.message = status, message


class Failed(Exception):
    """A server closed the connection, answered with a status of 500 or more, or sent no valid answer."""


class Unreachable(Exception):
    """No server accepts connections."""


@dataclass(frozen=True)
class Endpoint:
    """A server, and fields that are added to each of its requests.

    Attributes:
        url: its address, with or without `/v1`.
        api_key: sent as a bearer token.
        fields: members of every body, such as a switch of speculation.
        timeout: seconds without a byte after which a request has failed.
    """

    url: str
    api_key: str | None = None
    fields: Object = field(default_factory=dict)
    timeout: float = 120.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url is {self.url}, expected http://HOST:PORT or https://HOST:PORT")

    @property
    def root(self) -> str:
        """Return the path below which `/v1` is."""
        return urlsplit(self.url).path.rstrip("/").removesuffix("/v1")

    def ask(self, path: str, body: Object, leaves_after: int | None = None) -> Answer:
        """Return the answer to a body; leave after that many events of a stream, if given.

        Raises:
            Refused: a status of 400 to 499.
            Failed: no valid answer.
            Unreachable: no connection.
        """
        body = body | self.fields
        for waits in range(MAX_WAITS + 1):
            with _Connection(self) as connection:
                response = connection.send("POST", path, body)
                if response.status in BUSY and waits < MAX_WAITS:
                    time.sleep(min(0.05 * 2**waits, 2.0))
                    continue
                with FailingAsOne():
                    if response.status != 200:
                        raise refusal(response)
                    if not body.get("stream"):
                        return parse_whole(json.loads(response.read()))
                    parser = StreamParser()
                    for event in events_of(response):
                        parser.push(event)
                        if parser.num_events == leaves_after:
                            return parser.partial()
                    return parser.finish()
        raise AssertionError("not reached")

    def get(self, path: str, body: Object | None = None) -> Any:
        """Return the JSON of another path; a body makes it a POST."""
        with _Connection(self) as connection:
            response = connection.send("GET" if body is None else "POST", path, body)
            with FailingAsOne():
                if response.status != 200:
                    raise refusal(response)
                return json.loads(response.read())


class _Connection:
    """A connection for one request."""

    def __init__(self, endpoint: Endpoint) -> None:
        parts = urlsplit(endpoint.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._endpoint = endpoint
        self._connection = kind(str(parts.hostname), parts.port, timeout=endpoint.timeout)

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: Any) -> None:
        self._connection.close()

    def send(self, method: str, path: str, body: Object | None) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if self._endpoint.api_key:
            headers["Authorization"] = f"Bearer {self._endpoint.api_key}"
        try:
            self._connection.connect()
        except OSError as error:
            raise Unreachable(f"{self._endpoint.url}: {error}") from error
        data = None if body is None else json.dumps(body).encode()
        with FailingAsOne():
            self._connection.request(method, self._endpoint.root + path, data, headers)
            return self._connection.getresponse()


class FailingAsOne:
    """Convert what ends a connection or makes an answer invalid to `Failed`."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if isinstance(error, OSError | http.client.HTTPException | ValueError | KeyError | TypeError | Malformed):
            raise Failed(f"{type(error).__name__}: {error}") from error


def refusal(response: http.client.HTTPResponse) -> Exception:
    """Return the error of a response whose status is not 200."""
    text = response.read().decode(errors="replace")
    message = text
    try:
        value = json.loads(text)
        inner = value.get("error", value)
        message = str(inner.get("message", text) if isinstance(inner, dict) else inner)
    except (ValueError, AttributeError):
        pass
    message = " ".join(message.split())[:300]
    is_refused = 400 <= response.status < 500
    return Refused(response.status, message) if is_refused else Failed(f"status {response.status}: {message}")


def events_of(response: http.client.HTTPResponse) -> Iterator[str]:
    """Yield the data of server-sent events."""
    data: list[str] = []
    for line in response:
        text = line.decode().rstrip("\r\n")
        if text.startswith("data:"):
            data.append(text[5:].removeprefix(" "))
        elif not text and data:
            yield "\n".join(data)
            data = []
    if data:
        yield "\n".join(data)
