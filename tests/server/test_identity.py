"""What a client asks about the server and its own requests: the model, the version, ids of requests, the key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

import specdec_kernels
from specdec_kernels import cli
from specdec_kernels.cli.serve import api_key
from specdec_kernels.engine import Engine
from specdec_kernels.tiny import tiny_model
from support.paused_rounds import rounds_held
from support.server_thread import Running, serving

COMPLETE = "/v1/completions"
BODY = {"prompt": "def f", "max_tokens": 2}
NAME = "folder/tiny"  # like a hub id


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engine = Engine(tiny_model("target"), device="cpu", max_len=64, num_slots=2, adaptive=False)
    with serving(engine, model_name=NAME, api_key="secret") as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[OpenAI]:
    with server.client(api_key="secret") as client:
        yield client


def test_model_is_found_by_its_id(server: Running, client: OpenAI) -> None:
    assert client.models.retrieve(NAME) == client.models.list().data[0]
    headers = {"Authorization": "Bearer secret"}
    status, message, param = server.error("/v1/models/other", None, headers)
    assert (status, message, param) == (404, f'model is "other", expected "{NAME}"', "model")
    assert server.error(f"/v1/models/{NAME}", None)[0] == 401


def test_version_is_that_of_the_package(server: Running) -> None:
    status, _, answer = server.ask("/version")
    assert (status, json.loads(answer)) == (200, {"version": specdec_kernels.__version__})


def test_routers_learn_what_is_served_and_how_busy_it_is(server: Running, client: OpenAI) -> None:
    headers = {"Authorization": "Bearer secret"}

    def get(path: str) -> Any:
        assert server.ask(path)[0] == 401
        return json.loads(server.ask(path, headers=headers)[2])

    assert get("/model_info") == get("/get_model_info") == {
        "model_path": NAME, "served_model_name": NAME, "is_generation": True, "model_type": "llama"
    }  # fmt: skip
    info, config = get("/server_info"), server.engine.config
    assert info["max_running_requests"] == config.num_slots
    assert info["max_total_tokens"] == config.num_pages * config.page_size
    idle = [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}]
    assert get("/get_load") == idle
    with (
        rounds_held(server.engine, after=2),
        client.completions.create(model=NAME, prompt=[5, 6, 7], max_tokens=40, stream=True) as stream,
    ):
        next(iter(stream))
        (busy,) = get("/get_load")
        assert (busy["num_reqs"], busy["num_waiting_reqs"]) == (1, 0) and 4 <= busy["num_tokens"] <= 6
    server.wait_until_idle()
    assert get("/get_load") == idle
    pool = f'vllm:cache_config_info{{block_size="{config.page_size}",model_name="{NAME}",num_gpu_blocks="{config.num_pages}"}} 1.0'
    assert pool in server.ask("/metrics")[2].decode().splitlines()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (COMPLETE, BODY, 200),
        (COMPLETE, BODY | {"stream": True}, 200),
        (COMPLETE, BODY | {"n": 0}, 400),
        ("/health", None, 200),
        ("/nowhere", None, 404),
    ],
)
def test_responses_carry_the_id_of_their_request(server: Running, path: str, body: object, status: int) -> None:
    key = {"Authorization": "Bearer secret"}
    got, headers, _ = server.ask(path, body, key | {"X-Request-Id": "mine-1"})
    assert (got, headers.get_all("x-request-id")) == (status, ["mine-1"])
    ids = {server.ask(path, body, key)[1]["x-request-id"] for _ in range(2)}
    assert len(ids) == 2 and all(len(one) == 32 for one in ids)


def test_failed_request_carries_its_id(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyError("a fault of the server")

    monkeypatch.setattr(server.engine.core, "expect_open", fail)
    status, headers, _ = server.ask("/health", headers={"X-Request-Id": "mine-2"})
    assert (status, headers["x-request-id"]) == (500, "mine-2")


def test_server_refuses_long_request_ids(server: Running) -> None:
    status, message, _ = server.error("/health", None, {"X-Request-Id": "a" * 257})
    assert (status, message) == (400, "x-request-id has 257 characters, expected at most 256")


@pytest.mark.parametrize(
    ("flag", "variable", "key"), [(None, None, None), (None, "b", "b"), ("a", "b", "a"), ("a", None, "a")]
)
def test_api_key_comes_from_the_flag_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, flag: str | None, variable: str | None, key: str | None
) -> None:
    monkeypatch.delenv("SPECDEC_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("SPECDEC_API_KEY", variable)
    assert api_key(flag) == key


@pytest.mark.parametrize("source", ["--api-key", "SPECDEC_API_KEY"])
def test_serve_refuses_an_empty_api_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, source: str, tmp_path: Path
) -> None:
    """An empty variable is a secret that was not filled in: without this the server would be open."""
    monkeypatch.setenv("SPECDEC_API_KEY", "")
    flags = [source, ""] if source.startswith("--") else []
    assert cli.main(["serve", "--device", "cpu", "--port", "0", "--model-path", str(tmp_path), *flags]) == 2
    assert capsys.readouterr().err == f"specdec serve: {source} is empty, expected a key\n"
