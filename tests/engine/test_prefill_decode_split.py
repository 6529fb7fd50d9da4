"""The example that prefills in one process and decodes in another writes what one engine writes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from specdec_kernels.engine import Eagle3, Engine, SamplingParams
from specdec_kernels.tiny import tiny_model
from support.examples import EXAMPLES, load_example

EXAMPLE = EXAMPLES / "prefill_decode_split.py"
PROMPTS = ["import os\n", "def area(", "x = [\n"]


def make_engine(device: str | None = None) -> Engine:
    draft = Eagle3(tiny_model("eagle3"), num_steps=5, topk=8, num_nodes=32)
    return Engine(tiny_model("target"), draft=draft, max_len=256, device=device)


class Queued(SimpleQueue[Any]):
    """A transport within this process."""

    def send(self, rows: torch.Tensor) -> None:
        self.put(rows)

    def receive(self, num_bytes: int) -> torch.Tensor:
        rows: torch.Tensor = self.get()
        assert rows.numel() == num_bytes
        return rows


def test_split_engines_write_what_one_writes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, transport = load_example("prefill_decode_split"), Queued()
    monkeypatch.setattr(module, "tell", transport.put)
    monkeypatch.setattr(module, "hear", transport.get)
    with make_engine() as one, make_engine() as other:
        texts = [output.text for output in one.generate(PROMPTS, SamplingParams(24))]
        module.prefill(one, transport, PROMPTS, SamplingParams(24))
        module.decode(other, transport)
    assert re.findall(r"^decode: (.*) in \d+ rounds$", capsys.readouterr().out, re.MULTILINE) == list(map(repr, texts))


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", ["gloo", "nixl"])
def test_split_processes_write_what_one_engine_writes(transport: str) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl")
    with make_engine("cpu") as engine:  # as the example's processes run
        texts = [output.text for output in engine.generate(PROMPTS, SamplingParams(24))]
    command = [sys.executable, str(EXAMPLE), *PROMPTS, "--max-new-tokens", "24", "--transport", transport]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.findall(r"^decode: (.*) in \d+ rounds$", done.stdout, re.MULTILINE) == list(map(repr, texts))
