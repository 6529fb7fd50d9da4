"""A proxy in front of a server with one defect in each of some requests, each known by its seed."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Object = dict[str, Any]
PATIENCE_SECONDS = 0.5  # until another request runs, for a defect that needs one


@dataclass(frozen=True)
class Defect:
    """What happens to a request: to its body, to the answer, or to the events of a stream."""

    body: Callable[[Object], Object] = lambda body: body
    answer: Callable[[Object], Object] = lambda answer: answer
    events: Callable[[list[Object]], list[Object]] = lambda events: events
    leaks: bool = False  # the prompt of another request that runs comes before its own


@dataclass
class Proxy:
    """A running proxy; `defects` are by the seed of the request."""

    upstream: int
    port: int = 0
    defects: dict[int, Defect] = field(default_factory=dict)
    running: dict[int, Object] = field(default_factory=dict)  # bodies by thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def forward(self, method: str, path: str, data: bytes | None) -> tuple[int, str, bytes]:
        """Return status, content type and body of the response."""
        body = json.loads(data) if data else {}
        defect = self.defects.get(body.get("seed", -1), Defect())
        me = threading.get_ident()
        self.running[me] = body
        try:
            if defect.leaks:
                body = self._leaked(me, body)
            body = defect.body(body)
            connection = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=60)
            connection.request(method, path, json.dumps(body) if data else None)
            response = connection.getresponse()
            answer = response.read()
            connection.close()
        finally:
            del self.running[me]
        kind = response.headers["content-type"]
        if response.status == 200 and path.startswith("/v1/") and data:
            if "event-stream" in kind:
                *events, done = [line.removeprefix("data: ") for line in answer.decode().split("\n\n") if line]
                parts = defect.events([json.loads(event) for event in events])
                answer = "".join(f"data: {json.dumps(part)}\n\n" for part in parts).encode()
                answer += f"data: {done}\n\n".encode()
            else:
                answer = json.dumps(defect.answer(json.loads(answer))).encode()
        return response.status, kind, answer

    def _leaked(self, me: int, body: Object) -> Object:
        """Put the prompt of another running request before this one's."""
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end:
            for thread, other in list(self.running.items()):
                if thread != me and isinstance(other.get("prompt"), str) and other["prompt"] != body["prompt"]:
                    return body | {"prompt": other["prompt"] + body["prompt"]}
            time.sleep(0.002)
        return body


@contextmanager
def proxied(upstream: int) -> Iterator[Proxy]:
    """Run a proxy in front of a port of this machine."""
    proxy = Proxy(upstream)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(None)

        def do_POST(self) -> None:
            self.answer(self.rfile.read(int(self.headers["content-length"])))

        def answer(self, data: bytes | None) -> None:
            status, kind, answer = proxy.forward(self.command, self.path, data)
            try:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)
            except ConnectionError:
                pass  # the client has left

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        proxy.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join()


def text_of(choice: Object) -> tuple[Object, str]:
    """Return the object that holds a choice's text, and its name there."""
    for holder, name in ((choice, "text"), (choice.get("delta") or choice.get("message") or {}, "content")):
        if holder.get(name):
            return holder, name
    return choice, ""


def swap_token(answer: Object) -> Object:
    holder, name = text_of(answer["choices"][0])
    middle = len(holder[name]) // 2
    holder[name] = holder[name][:middle] + "Q" + holder[name][middle + 1 :]
    return answer


def lose_space(answer: Object) -> Object:
    holder, name = text_of(answer["choices"][0])
    holder[name] = holder[name].replace(" ", "", 1)
    return answer


def lose_last_chunk(events: list[Object]) -> list[Object]:
    for event in reversed(events):
        for choice in event["choices"]:
            holder, name = text_of(choice)
            if name:
                holder[name] = ""
                return events
    return events


def shift_logprob(answer: Object) -> Object:
    logprobs = answer["choices"][0]["logprobs"]
    if "content" in logprobs:
        logprobs["content"][-1]["logprob"] -= 0.05
    else:
        logprobs["token_logprobs"][-1] -= 0.05
    return answer


def change_argument(answer: Object) -> Object:
    for call in answer["choices"][0]["message"].get("tool_calls", []):
        arguments = call["function"]["arguments"]
        for digit in list(filter(str.isdigit, arguments))[:1]:
            call["function"]["arguments"] = arguments.replace(digit, "8", 1)
    return answer


DEFECTS = {
    "swapped token": Defect(answer=swap_token),
    "lost last chunk": Defect(events=lose_last_chunk),
    "lost space": Defect(answer=lose_space),
    "logprob": Defect(answer=shift_logprob),
    "missed stop": Defect(body=lambda body: {key: body[key] for key in body if key != "stop"}),
    "tool argument": Defect(answer=change_argument),
    "wrong seed": Defect(body=lambda body: body | {"seed": body["seed"] + 1}),
    "leaked prefix": Defect(leaks=True),
}
