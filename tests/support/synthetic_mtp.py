"""Synthetic targets with MTP layers, and how often their drafts are accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from specdec_kernels.engine import MTP, Engine, SamplingParams
from specdec_kernels.synthetic.acceptance import mean_accept_length
from specdec_kernels.synthetic.models import SyntheticText, synthetic_causal_lm
from specdec_kernels.synthetic.mtp import mtp_text_length
from specdec_kernels.synthetic.shapes import shape_config


def wide_target(shape: str) -> tuple[Any, SyntheticText]:
    """Return a target of a tiny shape with 512 elements a row, and the text that its MTP layers can draft."""
    config = shape_config(shape)
    config.hidden_size = 512
    text = SyntheticText.of(config.vocab_size, mtp_text_length(config))
    return synthetic_causal_lm(config, text, device=torch.device("cpu"), dtype=torch.float32), text


def expect_accepted_as_published(
    open_engine: Callable[[MTP], Engine], text: SyntheticText, rates: Sequence[float], heads: Any = None
) -> None:
    """Check how many tokens are accepted of chains with a draft for each of these rates, and that trees accept more.

    Args:
        open_engine: returns an engine with the draft.
        text: of the target.
        rates: published for each step.
        heads: of the draft; None: the target's.
    """
    chain, steps = mean_accept_length(rates), len(rates)
    for topk, num_nodes in ((1, steps + 1), (4, 16)):
        with open_engine(MTP(heads, num_steps=steps, topk=topk, num_nodes=num_nodes)) as engine:
            [output] = engine.generate([text.tokens(3, 10)], SamplingParams(max_new_tokens=512))
        assert output.tokens == text.tokens(13, 512)
        if topk == 1:
            assert output.stats.accept_length == pytest.approx(chain, rel=0.05)
        else:
            assert output.stats.accept_length > chain + 0.3
