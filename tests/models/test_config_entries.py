"""Entries of a config.json with values of all kinds: an error that names the entry, or a model that runs."""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from specdec_kernels.engine import Engine, SamplingParams
from specdec_kernels.models.backends.select import implementation_of
from specdec_kernels.models.families import known_families
from specdec_kernels.models.weights.model_config import config_of
from support.tiny_random_models import NATIVE, NATIVE_OF, tiny_config, tiny_model

VALUES: list[Any] = [None, "abc", [7, 7], {"a": 1}, -3, 0, 10**20, 1e20, float("nan"), True]
UNREAD = ("architectures", "transformers_version", "model_type", "dtype")
# What an error may name in place of the entry: what the entry contradicts, or makes of the model.
NAMED = (
    r" mamba_| taps, |no attention in its layers|has a sliding_window|rope_type 'llama3'|has a config that cannot be read|"
    r" of shape | lacks | unknown to |num_slots is |gives other logits|is not made as our layers read it|does not run |"
    r"rows that follow their place|attends to tokens that come later|does not use the attention interface"
)


def family_config(family: str) -> Any:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    return tiny_config(family, **NATIVE | NATIVE_OF.get(family, {}))


def changes(values: dict[str, Any]) -> list[tuple[tuple[Any, ...], Any]]:
    """Return the entries of a config.json, those of dicts and the first of lists too, each with each other value."""
    paths: list[tuple[Any, ...]] = []
    for key, value in values.items():
        if key not in UNREAD:
            paths += [(key,), *((key, inner) for inner in value)] if isinstance(value, dict) else [(key,)]
            paths += [(key, 0)] if isinstance(value, list) and value else []
    return [(path, value) for path in paths for value in VALUES]


def changed(values: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    values = copy.deepcopy(values)
    part: Any = values
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return values


def names_entry(error: ValueError, kind: Any, path: tuple[Any, ...]) -> bool:
    """Return whether an error names the entry, by one of its names."""
    names = [key for key in path if isinstance(key, str)]
    names += [each for pair in kind.attribute_map.items() if set(pair) & set(names) for each in pair]
    return any(name in str(error) for name in names)


@pytest.mark.parametrize("family", known_families())
def test_config_is_read_or_the_entry_named(family: str, tmp_path: Path) -> None:
    config = family_config(family)
    config.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    for path, value in random.sample(changes(values), 12):
        (tmp_path / "config.json").write_text(json.dumps(changed(values, path, value)))
        try:
            implementation_of(config_of(tmp_path), 64)
        except ValueError as error:
            assert names_entry(error, type(config), path) or re.search(NAMED, str(error)), (path, value, str(error))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Engine.* its modules run, which is slower:RuntimeWarning")
@pytest.mark.parametrize("family", known_families())
def test_engine_runs_or_names_the_entry(family: str, tmp_path: Path) -> None:
    config = family_config(family)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        pytest.skip("the text part of multimodal models alone")
    tiny_model(family, **NATIVE | NATIVE_OF.get(family, {})).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    for path, value in random.sample(changes(values), 40):
        (tmp_path / "config.json").write_text(json.dumps(changed(values, path, value)))
        try:
            with Engine(tmp_path, max_len=64, num_slots=1, device="cpu", dtype=torch.float32) as engine:
                (output,) = engine.generate([[3, 5, 7]], SamplingParams(max_new_tokens=3, ignore_eos=True))
                assert len(output.tokens) == 3
        except ValueError as error:
            assert names_entry(error, type(config), path) or re.search(NAMED, str(error)), (path, value, str(error))
