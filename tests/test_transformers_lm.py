"""The general way beside the native one: the same states and features, and what is refused by name."""

from __future__ import annotations

import pytest
import torch

from specdec_kernels.engine import Engine
from specdec_kernels.models.attention import Rows
from specdec_kernels.models.language_model import open_language_model
from tiny_models import NATIVE, tiny_model


def test_states_and_features_are_those_of_the_native_way() -> None:
    model = tiny_model("llama", **NATIVE)
    tokens = torch.randint(5, 150, (1, 17), dtype=torch.int32)
    positions = torch.arange(17, dtype=torch.int32)[None]
    zero = torch.zeros(1, dtype=torch.int32)
    rows = Rows(slots=zero, page_table=torch.arange(4, dtype=torch.int32)[None], prefix_lens=zero, tail_len=17)
    states = []
    for implementation in ("native", "transformers"):
        lm = open_language_model(
            model,
            implementation=implementation,
            max_len=32,
            num_pages=4,
            page_size=8,
            dtype=torch.float32,
            device=torch.device("cpu"),
            feature_layers=(4, 0, 2),
        )
        with torch.inference_mode():
            hidden, features = lm.forward(tokens, positions, rows)
            assert features is not None
            states.append((hidden, features, lm.logits(hidden)))
    for native, general in zip(*states, strict=True):
        assert native.shape == general.shape
        torch.testing.assert_close(general, native, rtol=1e-4, atol=1e-4)


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError) as error:
        Engine(tiny_model("llama", **NATIVE), implementation="magic", device="cpu")
    assert str(error.value) == "Engine: implementation is 'magic', expected one of auto, native, transformers"


def test_what_has_no_attention_is_refused() -> None:
    with pytest.raises(ValueError) as error:
        Engine(tiny_model("rwkv"), max_len=64, device="cpu")
    assert str(error.value) == "model: rwkv has no attention in its layers, expected a model that has"
