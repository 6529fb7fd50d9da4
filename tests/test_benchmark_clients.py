"""Benchmarks that others wrote run against the server, where they are installed: `pip install guidellm`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from serving import serving
from specdec_kernels.tiny import tiny_model
from test_requests import make_engine

GUIDELLM = shutil.which("guidellm")


@pytest.mark.skipif(GUIDELLM is None, reason="guidellm is not installed")
def test_guidellm(tmp_path: Path) -> None:
    assert GUIDELLM is not None
    with serving(make_engine("chain", max_len=256)) as running:
        options = {
            "backend": f"kind=openai_http,target=http://127.0.0.1:{running.port}",
            "profile": "kind=concurrent,streams=4",
            "constraint": "kind=max_requests,count=12",
            "tokenizer": f"kind=huggingface_auto,model={tiny_model('target')}",
            "data": "kind=synthetic_text,prompt_tokens=24,output_tokens=16",
            "output": f"kind=json,path={tmp_path / 'run.json'}",
        }
        flags = [word for name, value in options.items() for word in (f"--{name}", value)]
        command = [GUIDELLM, "run", *flags, "--disable-console"]
        subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, timeout=300)
        requests = json.loads((tmp_path / "run.json").read_text())["benchmarks"][0]["requests"]
        assert len(requests["successful"]) == 12 and not requests["errored"] and not requests["incomplete"]
        assert b'vllm:generation_tokens_total{model_name="tiny"} 192.0' in running.ask("/metrics")[2]
