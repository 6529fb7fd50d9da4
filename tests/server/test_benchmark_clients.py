"""Third-party benchmarks against the server, where they are installed: `pip install guidellm`, `aiperf` or `vllm`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from specdec_kernels.tiny import tiny_model
from support.request_engines import make_engine
from support.server_thread import NAME, serving

GUIDELLM, AIPERF, VLLM = map(shutil.which, ("guidellm", "aiperf", "vllm"))
TOKENIZER = str(tiny_model("target"))


@pytest.mark.skipif(GUIDELLM is None, reason="guidellm is not installed")
def test_guidellm_benchmark_runs(tmp_path: Path) -> None:
    assert GUIDELLM is not None
    with serving(make_engine("chain", max_len=256)) as running:
        options = {
            "backend": f"kind=openai_http,target=http://127.0.0.1:{running.port}",
            "profile": "kind=concurrent,streams=4",
            "constraint": "kind=max_requests,count=12",
            "tokenizer": f"kind=huggingface_auto,model={TOKENIZER}",
            "data": "kind=synthetic_text,prompt_tokens=24,output_tokens=16",
            "output": f"kind=json,path={tmp_path / 'run.json'}",
        }
        flags = [word for name, value in options.items() for word in (f"--{name}", value)]
        command = [GUIDELLM, "run", *flags, "--disable-console"]
        subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, timeout=300)
        requests = json.loads((tmp_path / "run.json").read_text())["benchmarks"][0]["requests"]
        assert len(requests["successful"]) == 12 and not requests["errored"] and not requests["incomplete"]
        assert b'vllm:generation_tokens_total{model_name="tiny"} 192.0' in running.ask("/metrics")[2]


@pytest.mark.skipif(AIPERF is None, reason="aiperf is not installed")
@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_aiperf_benchmark_runs(kind: str, tmp_path: Path) -> None:
    assert AIPERF is not None
    with serving(make_engine("chain", max_len=256)) as running:
        command = [AIPERF, "profile", "-m", NAME, "-u", f"http://127.0.0.1:{running.port}", "--endpoint-type", kind]
        command += ["--streaming", "--concurrency", "4", "--request-count", "12", "--isl", "24", "--osl", "16"]
        command += ["--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--tokenizer", TOKENIZER]
        command += ["--output-artifact-dir", str(tmp_path), "--ui", "none"]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        found = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
        assert found["request_count"]["avg"] == 12 and not found["error_summary"]
        assert found["output_sequence_length"]["min"] == found["output_sequence_length"]["max"] == 16
        assert b'vllm:generation_tokens_total{model_name="tiny"} 192.0' in running.ask("/metrics")[2]


@pytest.mark.skipif(VLLM is None, reason="vllm is not installed")
@pytest.mark.parametrize(
    ("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")], ids=["text", "chat"]
)
def test_vllm_bench_serve_runs(backend: str, path: str, tmp_path: Path) -> None:
    assert VLLM is not None
    with serving(make_engine("chain", max_len=256, adaptive=False)) as running:
        command = [VLLM, "bench", "serve", "--backend", backend, "--endpoint", path, "--model", NAME]
        command += ["--base-url", f"http://127.0.0.1:{running.port}", "--tokenizer", TOKENIZER]
        command += ["--dataset-name", "random", "--random-input-len", "24", "--random-output-len", "16"]
        command += ["--num-prompts", "12", "--max-concurrency", "4", "--ignore-eos"]
        command += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "run.json"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        subprocess.run(command, check=True, env=environment, capture_output=True, timeout=300)
        found = json.loads((tmp_path / "run.json").read_text())
        assert found["completed"] == 12 and found["total_output_tokens"] == 192
        assert found["spec_decode_draft_tokens"] > 0  # read from /metrics
        assert found["spec_decode_acceptance_length"] > 1
