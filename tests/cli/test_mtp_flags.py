"""`--speculative-algorithm MTP` of the commands, and what `specdec doctor` finds out about an MTP layer."""

from __future__ import annotations

import json
import shutil
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec_kernels import cli
from specdec_kernels.cli import speculative_flags
from specdec_kernels.engine import MTP, DSpark, Ngram
from specdec_kernels.models.weights.mtp_layouts import MIMO
from specdec_kernels.synthetic.acceptance import EvenAcceptance
from specdec_kernels.synthetic.models import SyntheticText, synthetic_causal_lm
from specdec_kernels.synthetic.mtp import save_with_mtp, synthetic_mtp
from specdec_kernels.synthetic.shapes import shape_config
from specdec_kernels.tiny import tiny_model

Capture = pytest.CaptureFixture[str]
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a synthetic target whose MTP layer is always right, with the tiny model's tokenizer."""
    config, folder = shape_config("tiny"), tmp_path_factory.mktemp("mtp") / "target"
    text = SyntheticText.of(config.vocab_size, 64)
    model = synthetic_causal_lm(config, text, device=torch.device("cpu"), dtype=torch.float32)
    save_with_mtp(model, synthetic_mtp(model, text, EvenAcceptance(), MIMO), folder)
    for file in TOKENIZER:
        shutil.copy(tiny_model("target") / file, folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("\n\n".join(f"def function_{i}(x):\n    return" for i in range(6)))
    return file


def diagnosed(target: Path, prompts: Path, capsys: Capture, *options: str) -> tuple[int, dict[str, Any]]:
    given = ["--prompts", str(prompts), "--max-new-tokens", "24", "--speculative-num-steps", "3", "--device", "cpu"]
    code = cli.main(["doctor", str(target), "--speculative-algorithm", "NEXTN", *given, *options, "--json"])
    captured = capsys.readouterr()
    assert code < 2, captured.err
    return code, json.loads(captured.out)


def test_doctor_finds_no_fault_in_a_right_layer(target: Path, prompts: Path, capsys: Capture) -> None:
    code, found = diagnosed(target, prompts, capsys)
    assert (code, found["cause"], found["algorithm"], found["draft"]) == (0, None, "MTP", str(target))
    assert found["as_is"]["accept_length"] == pytest.approx(4, abs=0.1)
    assert {shift["input"] for shift in found["shifts"]} >= {"order", "norm", "state", "position offset"}


def swapped(weight: Tensor) -> Tensor:
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)


@pytest.mark.parametrize(
    ("fault", "cause", "change"),
    [
        (lambda name, t: swapped(t) if "input_proj" in name else t, "order", "the embedding, then the state"),
        (lambda name, t: t - 1 if "norm" in name else t, "norm", "weights were stored less one"),
    ],
    ids=["order", "norm"],
)
def test_doctor_names_the_fault(
    fault: Any, cause: str, change: str, target: Path, prompts: Path, capsys: Capture, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(target, broken)
    file = broken / "mtp.safetensors"
    tensors = {name: fault(name, tensor).contiguous() for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    code, found = diagnosed(target, prompts, capsys, "--speculative-draft-model-path", str(broken))
    assert (code, found["cause"]) == (1, cause)
    assert change in found["shifts"][0]["change"]
    assert found["shifts"][0]["accept_length"] == pytest.approx(4, abs=0.1)


def test_generate_and_tune_draft_with_the_target_s_layer(
    target: Path, prompts: Path, capsys: Capture, tmp_path: Path
) -> None:
    words = ["--model-path", str(target), "--speculative-algorithm", "mtp", "--device", "cpu", "--max-new-tokens", "12"]
    assert cli.main(["generate", "import os", *words, "--speculative-num-steps", "2"]) == 0
    assert "MTP produced the same tokens" in " ".join(capsys.readouterr().out.split())
    out = tmp_path / "tuning.json"
    sizes = ["--batch", "1", "--speculative-num-steps", "2", "--speculative-eagle-topk", "1", "--max-new-tokens", "8"]
    given = ["--speculative-algorithm", "MTP", "--prompts", str(prompts), "--device", "cpu", *sizes]
    assert cli.main(["tune", str(target), *given, "--out", str(out)]) == 0
    facts = json.loads(out.read_text())
    assert (facts["algorithm"], facts["draft"], facts["complete"]) == ("MTP", None, True)
    assert [row["options"]["num_nodes"] for row in facts["measured"]] == [1, 3]


def test_flags_make_the_draft(capsys: Capture) -> None:
    parser = ArgumentParser()
    speculative_flags.add_arguments(parser)
    args = parser.parse_args(["--speculative-algorithm", "nextn", "--speculative-num-steps", "2"])
    assert args.speculative_algorithm == "MTP"
    assert speculative_flags.draft_of(args, "MTP", None, topk=1) == MTP(num_steps=2, topk=1)
    both = speculative_flags.draft_of(args, "MTP+NGRAM", None, topk=1)
    assert both is not None and both.members == (MTP(num_steps=2, topk=1, num_nodes=48), Ngram(num_nodes=48, corpus=[]))
    assert cli.main(["doctor", "anywhere", "--speculative-algorithm", "EAGLE3"]) == 2
    message = "--speculative-draft-model-path is missing, expected a folder or hub id (MTP and DSPARK need none)"
    assert capsys.readouterr().err == f"specdec doctor: {message}\n"


@pytest.mark.parametrize("name", ["DFLASH", "DFLASH2", "DSPARK", "JETSPEC"])
def test_flags_make_unions_of_block_drafters_and_the_index(name: str) -> None:
    parser = ArgumentParser()
    speculative_flags.add_arguments(parser)
    args = parser.parse_args(["--speculative-algorithm", f"{name}+ngram", "--speculative-num-draft-tokens", "24"])
    both = speculative_flags.draft_of(args, args.speculative_algorithm, "folder", topk=8)
    assert both is not None and type(both.members[0]).__name__.upper() == name
    assert both.members == (type(both.members[0])("folder", num_nodes=24), Ngram(num_nodes=24, corpus=[]))


def test_target_s_own_dspark_needs_no_path_and_uno_is_refused(capsys: Capture) -> None:
    parser = ArgumentParser()
    speculative_flags.add_arguments(parser)
    args = parser.parse_args(["--speculative-algorithm", "dspark"])
    assert speculative_flags.draft_of(args, "DSPARK", None, topk=8) == DSpark()
    with pytest.raises(
        ValueError, match="--speculative-draft-model-path is missing, expected a folder or hub id for DFL"
    ):
        speculative_flags.draft_of(args, "DFLASH", None, topk=8)
    with pytest.raises(SystemExit):
        parser.parse_args(["--speculative-algorithm", "uno"])
    assert "'uno' is not supported: it drafts by a forward pass of the target with a LoRA" in capsys.readouterr().err
