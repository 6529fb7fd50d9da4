"""What an operator sees and sets: metrics, lines in the log, names, origins, TLS, and limits of connections."""

from __future__ import annotations

import gzip
import http.client
import http.server
import json
import logging
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from specdec_kernels.engine import Engine
from specdec_kernels.server.metrics import HISTOGRAMS
from specdec_kernels.server.observer import JsonFormatter
from specdec_kernels.tiny import tiny_model
from support.server_thread import NAME, Running, serving, start, wait_for

PATH = "/v1/completions"
BODY = {"prompt": "def f", "max_tokens": 3, "ignore_eos": True, "n": 2}
ORIGIN = "https://app.example.com"


@pytest.fixture
def server() -> Iterator[Running]:
    engine = Engine(tiny_model("target"), device="cpu", max_len=64, num_slots=1, adaptive=False)
    settings = {"other_names": ["second"], "allowed_origins": [ORIGIN], "upload_seconds": 0.3}
    with serving(engine, **settings) as running:
        yield running


def metrics_of(server: Running) -> dict[str, float]:
    lines = server.ask("/metrics")[2].decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def test_metrics_have_the_histograms_of_vllm_and_counts_of_responses(server: Running) -> None:
    assert server.ask(PATH, BODY)[0] == 200
    server.wait_until_idle()
    assert server.ask(PATH, BODY | {"n": 0})[0] == 400 and server.ask("/nothing/here")[0] == 404
    got = metrics_of(server)
    label = f'{{model_name="{NAME}"}}'
    for name in HISTOGRAMS:
        count = {"time_to_first_token_seconds": 1}.get(name, 4 if name.startswith("inter") else 2)
        assert (got[f"vllm:{name}_count{label}"] >= count) and got[f"vllm:{name}_sum{label}"] > 0, name
        assert got[f'vllm:{name}_bucket{{le="+Inf",model_name="{NAME}"}}'] == got[f"vllm:{name}_count{label}"]
    assert got[f"vllm:request_generation_tokens_sum{label}"] == 6
    assert got[f'vllm:request_generation_tokens_bucket{{le="2.0",model_name="{NAME}"}}'] == 0
    assert got[f'vllm:request_generation_tokens_bucket{{le="5.0",model_name="{NAME}"}}'] == 2
    parts = [got[f"vllm:request_{part}_time_seconds_sum{label}"] for part in ("queue", "prefill", "decode")]
    assert sum(parts) <= got[f"vllm:e2e_request_latency_seconds_sum{label}"]
    for handler, method, status in ((PATH, "POST", 200), (PATH, "POST", 400), ("none", "GET", 404)):
        assert got[f'http_requests_total{{handler="{handler}",method="{method}",status="{status}"}}'] == 1
    assert got[f'http_request_duration_seconds_count{{handler="{PATH}",method="POST"}}'] == 2


def test_each_request_has_a_line_in_the_log(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "specdec_kernels.server"):
        server.ask(PATH, BODY, {"x-request-id": "one"})
        server.ask(PATH, BODY | {"stream": True}, {"x-request-id": "two\t2"})
        server.ask(PATH, BODY | {"n": 0}, {"x-request-id": "three"})
        wait_for(lambda: len(caplog.records) == 3)
    first, second, third = caplog.messages
    pattern = (
        rf"id=one method=POST path={PATH} status=200 model={NAME} prompt_tokens=\d+ completion_tokens=6 finish=length "
        r"queue_seconds=\S+ first_token_seconds=\S+ total_seconds=\S+"
    )
    assert re.fullmatch(pattern, first)
    assert re.fullmatch(pattern.replace("id=one", re.escape(r'id="two\t2"')), second)
    assert re.fullmatch(
        rf'id=three method=POST path={PATH} status=400 reason="n is 0, expected 1 to 128" total_seconds=\S+', third
    )
    line = json.loads(JsonFormatter().format(caplog.records[1]))
    assert line["id"] == "two\t2" and line["completion_tokens"] == 6 and line["level"] == "info"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])


def test_server_answers_to_all_of_its_names(server: Running) -> None:
    models = json.loads(server.ask("/v1/models")[2])["data"]
    assert [model["id"] for model in models] == [NAME, "second"]
    assert json.loads(server.ask("/v1/models/second")[2])["id"] == "second"
    assert json.loads(server.ask(PATH, BODY | {"model": "second"})[2])["model"] == NAME
    message = 'model is "third", expected "tiny" or "second"'
    assert server.error(PATH, BODY | {"model": "third"})[:2] == (404, message)


def test_pages_of_allowed_origins_may_ask(server: Running) -> None:
    for origin, allowed in ((ORIGIN, ORIGIN), ("https://evil.example.com", None)):
        with server.connection() as connection:
            headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            connection.request("OPTIONS", PATH, headers=headers)
            response = connection.getresponse()
            assert response.headers["access-control-allow-origin"] == allowed
        headers_of_answer = server.ask(PATH, BODY, {"Origin": origin})[1]
        assert headers_of_answer["access-control-allow-origin"] == allowed


def test_body_that_does_not_come_is_refused(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{{".encode())
        answer = client.recv(10000).decode()
    assert answer.startswith("HTTP/1.1 408")
    assert "the body has not come within 0.3 s, expected a faster upload" in answer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drain-seconds", "-1"], "--drain-seconds is -1, expected at least 0"),
        (["--ssl-keyfile", "a"], "--ssl-keyfile is a, expected --ssl-certfile with it"),
        (["--otlp-traces-endpoint", "a"], "--otlp-traces-endpoint is a, expected a URL such as http://localhost:4318/v1/traces"),
        (["--ssl-certfile", "/no/cert"], "--ssl-certfile is /no/cert, expected a certificate in PEM and its key "
         "([Errno 2] No such file or directory)"),
    ],
)  # fmt: skip
def test_flags_are_checked_before_imports_that_take_seconds(arguments: list[str], message: str) -> None:
    code = "import sys; from specdec_kernels.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code, "serve", *arguments], capture_output=True, text=True)
    assert (process.stdout, process.stderr) == ("2 False\n", f"specdec serve: {message}\n")


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for a certificate")
def test_command_serves_tls_logs_json_and_closes_idle_connections(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, *subject]
    subprocess.run(new, check=True, capture_output=True)
    process, line = start(
        *("--ssl-keyfile", str(key), "--ssl-certfile", str(cert), "--served-model-name", "a", "b"),
        *("--log-level", "info", "--log-format", "json", "--keep-alive-seconds", "1"),
    )
    try:
        assert line.startswith("specdec serve: a (NGRAM) at https://127.0.0.1:")
        port = int(line.strip().rsplit(":", 1)[1])
        context = ssl.create_default_context(cafile=str(cert))
        with closing(http.client.HTTPSConnection("localhost", port, context=context, timeout=300)) as connection:
            connection.request("POST", PATH, json.dumps(BODY | {"model": "b"}), {"x-request-id": "mine"})
            assert json.loads(connection.getresponse().read())["model"] == "a"
        raw = socket.create_connection(("localhost", port), timeout=300)
        with context.wrap_socket(raw, server_hostname="localhost") as idle:
            idle.sendall(b"GET / HTTP/1.1\r\n")  # headers that never end
            assert idle.recv(100) == b""
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.communicate()
    lines = [json.loads(one) for one in err.splitlines()]
    assert [(one["status"], one["model"]) for one in lines if one.get("id") == "mine"] == [(200, "a")]


def test_command_sends_a_trace_of_each_request() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    got: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append((self.path, gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        process, line = start("--otlp-traces-endpoint", f"http://127.0.0.1:{collector.server_port}/v1/traces")
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", int(line.strip().rsplit(":", 1)[1]))) as connection:
                connection.request("POST", PATH, json.dumps(BODY))
                assert connection.getresponse().status == 200
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=300)
        finally:
            process.kill()
            process.communicate()
            collector.shutdown()
    spans = b"".join(body for path, body in got if path == "/v1/traces")
    assert f"POST {PATH}".encode() in spans and b"specdec" in spans
