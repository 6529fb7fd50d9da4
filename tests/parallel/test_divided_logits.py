"""Best tokens of logits whose columns are divided among ranks: those of the whole, ties included."""

from __future__ import annotations

import pytest
import torch

from specdec_kernels.models.layers.divided_logits import DividedLogits, best_tokens
from specdec_kernels.models.layers.reduction import Columns
from specdec_kernels.ops import TopK, select_topk
from support.thread_reduction import ThreadReduction


@pytest.mark.parametrize(("vocab", "k"), [(203, 7), (203, 64), (20, 9)])
def test_best_tokens_are_those_of_the_whole(vocab: int, k: int) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(5, vocab) * 3).round() / 2  # many ties
    logits[3, 10:] = -torch.inf
    logits[4] = 1.0
    want, reduction, most = select_topk(logits, k), ThreadReduction(3), -(-vocab // 3)

    def best(rank: int) -> TopK:
        own = range(rank * most, min((rank + 1) * most, vocab))
        return best_tokens(DividedLogits(logits[:, own.start : own.stop], Columns(reduction, own, vocab)), k)

    for got in reduction.run(best):
        assert torch.equal(got.ids, want.ids)
        torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-5, atol=1e-5)
