"""The Ray Serve application: two replicas on the CPU, one of them killed under load, then replaced one by one."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import pytest

from specdec_kernels.engine import Engine, SamplingParams
from specdec_kernels.server.protocol import RequestError
from specdec_kernels.tiny import tiny_model

pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore")]

PROMPTS = ("import os\n", "def area(", "class Node:\n", "x = [\n")


class Cluster:
    """The application at a port of this machine."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, path: str, body: Any = None, session: str = "") -> tuple[int, str]:
        """Return the status and the body of a response."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"x-session-id": session} if session else {}
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text

    def metric(self, name: str) -> dict[str, float]:
        """Return the value of a metric by replica, summed over other labels."""
        values: dict[str, float] = {}
        for replica, value in re.findall(
            rf'^{name}{{replica="(\w+)".*}} (\S+)$', self.ask("/metrics")[1], re.MULTILINE
        ):
            values[replica] = values.get(replica, 0) + float(value)
        return values

    def replica_of(self, body: Any, session: str = "") -> str:
        """Return the replica that answers a request; no other one may run."""
        before = self.metric("http_requests_total")
        assert self.ask("/v1/completions", body, session)[0] == 200
        after = self.metric("http_requests_total")
        (replica,) = (name for name in after if after[name] > before.get(name, 0))
        return replica

    def stream(self, prompt: str, session: str) -> tuple[str, bool]:
        """Return the text of a stream, and whether it came to its end."""
        status, text = self.ask("/v1/completions", completion(prompt, 300, stream=True), session)
        assert status == 200, text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        texts = [one["choices"][0]["text"] for one in events if "choices" in one]
        if "error" in events[-1]:
            assert events[-1]["error"]["message"].startswith("the replica of this request is lost")
        return "".join(texts), "data: [DONE]" in text


def completion(prompt: str, max_tokens: int = 1, **others: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **others}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    ray = pytest.importorskip("ray")
    serve = pytest.importorskip("ray.serve")
    from specdec_kernels.serve_ray import app

    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    try:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        serve.start(http_options={"port": port})
        serve.run(app({"replicas": "2", "gpus": "0"}), name="tiny")
        yield Cluster(port)
    finally:
        serve.shutdown()
        ray.shutdown()


def test_requests_of_a_session_stay_on_one_replica(cluster: Cluster) -> None:
    sessions = {name: cluster.replica_of(completion("a"), name) for name in map(str, range(12))}
    assert len(set(sessions.values())) == 2
    for name in ("0", "5"):
        assert cluster.replica_of(completion("b", user="another"), name) == sessions[name]
        assert cluster.replica_of(completion("c", prompt_cache_key=name)) == sessions[name]
        assert cluster.replica_of(completion("c", user=name)) == sessions[name]


def test_turns_of_a_conversation_without_a_session_stay_on_one_replica() -> None:
    pytest.importorskip("ray")
    from specdec_kernels.serve_ray import session_of

    def key(**fields: Any) -> str:
        return session_of([], json.dumps(fields).encode())

    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    later = [*turns, {"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}]
    assert key(messages=turns) == key(messages=later) == key(input=later)
    assert key(messages=turns) != key(messages=[turns[0], later[3]])
    assert key(prompt="x" * 2000) == key(prompt="x" * 2000 + "y") != key(prompt="y")
    assert key() == session_of([], b"no JSON") == session_of([], b"[]") == ""


def test_replica_is_unhealthy_once_its_engine_is_closed() -> None:
    pytest.importorskip("ray")
    from specdec_kernels.serve_ray import Replica

    async def check() -> None:
        replica = Replica.__new__(Replica)
        await replica.__init__("--grammar-backend none")  # type: ignore[misc]
        replica.check_health()
        replica.server.engine.close()
        with pytest.raises(RequestError, match="closed"):
            replica.check_health()

    asyncio.run(check())


def test_flags_that_serve_refuses_are_refused_before_a_replica_starts() -> None:
    pytest.importorskip("ray")
    from specdec_kernels.serve_ray import app

    with pytest.raises(ValueError, match=r"--max-n is 0, expected at least 1"):
        app({"flags": "--max-n 0"})


def test_client_that_leaves_frees_its_slot(cluster: Cluster) -> None:
    connection = HTTPConnection("127.0.0.1", cluster.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(completion(PROMPTS[0], 2000, stream=True)))
    assert connection.getresponse().readline().startswith(b"data: ")
    assert sum(cluster.metric("vllm:num_requests_running").values()) == 1
    connection.close()
    end = time.monotonic() + 60
    while sum(cluster.metric("vllm:num_requests_running").values()):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert sum(cluster.metric("vllm:generation_tokens_total").values()) < 2000


def test_killed_replica_loses_only_streams_that_it_had_begun(cluster: Cluster) -> None:
    import ray

    with Engine(tiny_model("target")) as engine:
        outputs = engine.generate(list(PROMPTS), SamplingParams(max_new_tokens=300, ignore_eos=True))
        expected = {prompt: output.text for prompt, output in zip(PROMPTS, outputs, strict=True)}
    homes = {name: cluster.replica_of(completion("a"), name) for name in map(str, range(12))}
    killed = homes["0"]
    assert cluster.ask("/flush_cache", {})[0] == 200
    with ThreadPoolExecutor(24) as threads:
        streams = {name: threads.submit(cluster.stream, PROMPTS[int(name) % 4], name) for name in homes}
        answers = {
            name: threads.submit(cluster.ask, "/v1/completions", completion(PROMPTS[int(name) % 4], 300), name)
            for name in homes
        }
        while not all(cluster.metric("vllm:num_requests_running").values()):
            pass
        ray.kill(ray.get_actor(f"SERVE_REPLICA::tiny#Replica#{killed}", namespace="serve"))
        lost = 0
        for name, stream in streams.items():
            text, whole = stream.result()
            want = expected[PROMPTS[int(name) % 4]]
            assert whole or homes[name] == killed
            assert text == want if whole else want.startswith(text)
            lost += not whole
        for name, answer in answers.items():
            status, body = answer.result()
            assert (status, json.loads(body)["choices"][0]["text"]) == (200, expected[PROMPTS[int(name) % 4]])
    print(f"{lost} of {list(homes.values()).count(killed)} streams were lost with their replica")
    end = time.monotonic() + 120
    while len(names := cluster.metric("vllm:num_requests_running")) < 2 or killed in names:
        assert time.monotonic() < end
        time.sleep(0.5)


def test_rolling_update_loses_no_request(cluster: Cluster) -> None:
    from ray import serve

    from specdec_kernels.serve_ray import app

    before = cluster.metric("vllm:num_requests_running")
    with ThreadPoolExecutor(8) as threads:
        updated = threads.submit(
            serve.run, app({"replicas": "2", "gpus": "0", "flags": "--served-model-name new"}), name="tiny"
        )
        rounds = 0
        while not updated.done():
            texts = list(threads.map(cluster.stream, PROMPTS, map(str, range(rounds, rounds + 4))))
            assert all(whole for _, whole in texts)
            rounds += 1
        updated.result()
    assert json.loads(cluster.ask("/v1/models")[1])["data"][0]["id"] == "new"
    assert not set(before) & set(cluster.metric("vllm:num_requests_running"))
