"""Other packages' clients, unmodified, with the server: text, streams, tools and structured output."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import client_sessions
from support.client_sessions import CALL, HELLO, SCRIPTS
from support.request_engines import make_engine
from support.scripted import scripted
from support.server_thread import Running, serving

# An environment with these packages (`pip install specdec-kernels[clients]`), if this one is to stay free of them.
PYTHON = os.environ.get("SPECDEC_CLIENTS", sys.executable)
# A folder after `npm install openai ai @ai-sdk/openai @ai-sdk/openai-compatible zod`.
NODE = os.environ.get("SPECDEC_CLIENTS_NODE")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    pytest.importorskip("xgrammar")
    template = "{{ messages | tojson }}{# <think> #}"
    with serving(make_engine("union", max_len=1024, grammars=True, adaptive=False), chat_template=template) as running:
        yield running


@pytest.mark.clients
@pytest.mark.parametrize("name", SCRIPTS)
def test_client_passes_its_session(server: Running, name: str) -> None:
    package, texts = SCRIPTS[name]
    there = f"import sys, importlib.util; sys.exit(importlib.util.find_spec({package!r}) is None)"
    if subprocess.run([PYTHON, "-c", there], capture_output=True).returncode != 0:
        pytest.skip(f"{package} is not installed for {PYTHON}")
    command = [PYTHON, str(Path(client_sessions.__file__)), name, f"http://127.0.0.1:{server.port}/v1"]
    environment = {**os.environ, "OPENAI_API_KEY": "any", "PYTHONPATH": ""}
    with scripted(server, *texts):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    server.wait_until_idle()


@pytest.mark.clients
def test_clients_of_javascript_pass_their_session(server: Running, tmp_path: Path) -> None:
    if NODE is None or shutil.which("node") is None:
        pytest.skip("node or SPECDEC_CLIENTS_NODE, a folder with the packages, is missing")
    session = tmp_path / "session.mjs"
    session.write_bytes(Path(client_sessions.__file__).with_name("client_session.mjs").read_bytes())
    (tmp_path / "node_modules").symlink_to(Path(NODE) / "node_modules")
    with scripted(server, HELLO, HELLO, *[CALL, HELLO, HELLO] * 3):
        command = ["node", str(session), f"http://127.0.0.1:{server.port}/v1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
