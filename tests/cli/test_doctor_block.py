"""`specdec doctor` names each fault that a test puts into a block drafter, and none if there is none.

The texts are what the whole drafter drafts, round after round, so it is always right, and with a fault hardly ever.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from specdec_kernels import cli
from specdec_kernels.cli import doctor_examine
from specdec_kernels.cli.doctor_block import block_shifts
from specdec_kernels.cli.doctor_shifts import Head
from specdec_kernels.engine import DSpark
from specdec_kernels.engine.drafts.block import BlockDraft
from specdec_kernels.models.weights.model_config import config_of
from specdec_kernels.tiny import tiny_model
from support.block_drafters import CASES, MASK, Drafter, write_drafter, write_target

Capture = pytest.CaptureFixture[str]
STEPS, ROUNDS = 3, 5


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random target with the tiny model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("target"))
    folder = write_target(tmp_path_factory.mktemp("doctor") / "target", vocab_size=len(tokenizer))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model("target") / file, folder)
    return folder


def drafter(target: Path, folder: Path, name: str) -> Path:
    """Write a drafter whose serial head, if it has one, does not outweigh the logits."""
    changes = {"vocab_size": json.loads((target / "config.json").read_text())["vocab_size"]}
    write_drafter(folder, name, **changes)
    return rewritten(folder, lambda t: {k: v / 2 if "markov_w" in k else v for k, v in t.items()})


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    file = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}, file, {"format": "pt"})
    return folder


def configured(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def diagnosed(
    target: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Return a function that examines `broken`, on texts of the drafter `whole`."""
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(f"def function_{i}(x):\n    return" for i in range(6)))

    def examine(whole: Path, broken: Path, *options: str) -> dict[str, Any]:
        formula = Drafter(target, whole)

        def write(engine: Any, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
            texts = []
            for index, prompt in enumerate(prompts):
                text = [*prompt, 7 + index]
                for bonus in range(ROUNDS):
                    text += [*formula.chain(text)[:STEPS], 31 + bonus]
                texts.append(text + [5] * STEPS)
            return texts

        monkeypatch.setattr(doctor_examine, "write_texts", write)
        given = ["--prompts", str(file), "--speculative-num-steps", str(STEPS), "--device", "cpu", "--json"]
        draft = [] if broken == target else ["--speculative-draft-model-path", str(broken)]
        code = cli.main(["doctor", str(target), *draft, *given, *options])
        captured = capsys.readouterr()
        assert code < 2, captured.err
        found: dict[str, Any] = json.loads(captured.out)
        assert code == (found["cause"] is not None)
        return found

    return examine


def test_changes_are_configs_that_load(target: Path, tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    inputs = {"mask", "feature layers", "block size", "anchor", "mask token", "position offset", "RoPE", "norm"}
    for name, more in (("dspark", {"Markov head"}), ("jetspec", set[str]()), ("dflash2", set[str]())):
        folder = drafter(target, tmp_path / name, name)
        config = config_of(target)
        shifts = list(block_shifts(Head(folder, CASES[name].kind.upper(), STEPS, tmp_path / "copies"), config, None))
        assert {shift.input for shift in shifts} == inputs | more
        for shift in shifts:
            if shift.draft is not None:
                draft = shift.draft()
                assert isinstance(draft, BlockDraft) and draft.needs(config).feature_layers


@pytest.mark.exhaustive
def test_doctor_finds_nothing_in_a_whole_drafter(diagnosed: Any, target: Path, tmp_path: Path) -> None:
    folder = drafter(target, tmp_path / "whole", "dspark")
    found = diagnosed(folder, folder)
    assert (found["algorithm"], found["cause"]) == ("DSPARK", None)
    assert found["as_is"]["accept_length"] > STEPS + 0.4
    assert {shift["input"] for shift in found["shifts"]} >= {
        "mask", "feature layers", "block size", "anchor", "mask token", "position offset", "Markov head", "norm"
    }  # fmt: skip


FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "mask": ("dflash", {"is_causal": True}, "full within the block"),
    "mask of JetSpec": (
        "jetspec",
        {"dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": MASK, "causal_head": False}},
        "causal within the block",
    ),
    "feature layers": ("dspark", {"target_layer_ids": [-1, 0, 1]}, "0, 1, 2 (one higher)"),
    "block size": ("dspark", {"block_size": 4}, "5 rows"),
    "RoPE": ("dspark neighbors", {"rope_is_neox_style": True}, "interleaved pairs"),
    "mask token": ("dspark", {"mask_token_id": MASK - 1}, f"{MASK} (a neighbor)"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS)
def test_doctor_names_a_wrong_entry(fault: str, diagnosed: Any, target: Path, tmp_path: Path) -> None:
    name, changes, change = FAULTS[fault]
    whole, broken = (drafter(target, tmp_path / folder, name) for folder in ("whole", "broken"))
    configured(broken, **changes)
    found = diagnosed(whole, broken)
    assert (found["cause"], found["shifts"][0]["change"]) == (fault.removesuffix(" of JetSpec"), change)
    assert found["as_is"]["accept_length"] < found["shifts"][0]["accept_length"] > STEPS + 0.4


def without_effect(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(t) if "markov_w2" in name else t for name, t in tensors.items()}


def exchanged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    first, second = (f"markov_head.markov_w{i}.weight" for i in (1, 2))
    return tensors | {first: tensors[second], second: tensors[first]}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("of_whole", "of_broken", "change"),
    [(dict, exchanged, "its factors exchanged"), (without_effect, dict, "without effect")],
    ids=["exchanged", "of another drafter"],
)
def test_doctor_names_a_wrong_markov_head(
    of_whole: Any, of_broken: Any, change: str, diagnosed: Any, target: Path, tmp_path: Path
) -> None:
    whole, broken = (drafter(target, tmp_path / folder, "dspark") for folder in ("whole", "broken"))
    found = diagnosed(rewritten(whole, of_whole), rewritten(broken, of_broken))
    assert (found["cause"], found["shifts"][0]["change"]) == ("Markov head", change)


@pytest.mark.exhaustive
def test_doctor_names_shifted_positions(
    diagnosed: Any, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DSpark, "position_offset", 1)
    folder = drafter(target, tmp_path / "whole", "dspark")
    found = diagnosed(folder, folder)
    assert found["cause"] == "position offset"
    assert found["shifts"][0]["change"] == "drafted rows one position earlier than the text's"


def test_a_drafter_without_its_markov_head_is_refused_by_name(target: Path, tmp_path: Path) -> None:
    folder = drafter(target, tmp_path / "whole", "dspark")
    rewritten(folder, lambda t: {name: tensor for name, tensor in t.items() if "markov" not in name})
    with pytest.raises(ValueError, match=r"is a DFlash drafter, expected a DSpark drafter .DFlash drafts with it"):
        DSpark(folder).block_of(4)
