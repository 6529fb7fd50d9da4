"""Configs of Step-3.5 that ask for what neither implementation computes, or that cannot be read, are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from specdec_kernels.engine import MTP
from specdec_kernels.models.backends.select import IMPLEMENTATIONS, implementation_of
from specdec_kernels.models.weights.model_config import config_of
from support.step_cases import FULL, LIMITS, MTP_TYPES, SLIDING, STEP, TYPES, of_layers


def write_config(folder: Path, **changes: Any) -> Path:
    """Write the config of a target with two MTP layers."""
    values = STEP | of_layers(TYPES + MTP_TYPES[:2], LIMITS + [(0.0, 0.0)] * 2) | {"num_nextn_predict_layers": 2}
    (folder / "config.json").write_text(json.dumps(values | changes))
    return folder


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_expert_weight": False}, "norm_expert_weight is False, expected True"),
        ({"moe_router_activation": "softmax"}, "moe_router_activation is 'softmax', expected 'sigmoid'"),
        ({"zero_centered": False}, "zero_centered is False, expected True"),
        ({"use_rope_layers": [True, False]}, "use_rope_layers leaves layers out, expected all of them"),
        ({"yarn_only_types": [SLIDING]}, "yarn_only_types is ['sliding_attention'], expected ['full_attention']"),
    ],
)
def test_entries_that_nothing_computes_are_refused_by_name(
    changes: dict[str, Any], message: str, implementation: str, tmp_path: Path
) -> None:
    """Transformers' modules leave these entries out, and would compute another model."""
    with pytest.raises(ValueError) as error:
        implementation_of(config_of(write_config(tmp_path, **changes)), 64, implementation)
    assert str(error.value) == f"model: {message}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_groups": {}}, "num_key_value_heads {}, expected an integer from 1 to 2147483647"),
        ({"partial_rotary_factors": [0.5, 1.5, 1.0, 1.0]}, "partial_rotary_factor 1.5, expected a number above 0, at most 1"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps -1e-05, expected a number above 0, below 2**63"),
        ({"dtype": 3}, "dtype 3, expected the name of a dtype of torch"),
    ],
)  # fmt: skip
def test_entries_that_transformers_does_not_check_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as error:
        config_of(write_config(tmp_path, **changes))
    assert str(error.value) == f"model: {tmp_path} has {message}"


def test_mtp_layer_of_a_type_that_the_target_lacks_is_refused_by_name(tmp_path: Path) -> None:
    parts = ("enorm", "hnorm", "eh_proj", "transformer.shared_head.norm", "transformer.shared_head.output")
    names = [f"model.layers.{layer}.{part}.weight" for layer in (2, 3) for part in parts]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "a")}))
    write_config(tmp_path, layer_types=[FULL, FULL, SLIDING, FULL])
    with pytest.raises(ValueError) as error:
        MTP(num_steps=1).needs(AutoConfig.from_pretrained(tmp_path))
    message = "layer_types has 'sliding_attention' for an MTP layer, expected a type of the target's"
    assert str(error.value) == f"MTP head: {message}"
