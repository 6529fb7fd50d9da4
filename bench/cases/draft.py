"""Cases of the draft ops."""

from __future__ import annotations

import torch

import specdec_kernels as sd
from specdec_kernels.reference import draft as reference

from ..compare import expect_close, expect_equal, poisoned
from ..harness import Baseline, Case, Params, Work


def select_topk(device: torch.device, p: Params) -> Work:
    batch, vocab, k = p["batch"], p["vocab"], p["k"]
    logits = torch.randn(batch, vocab, device=device).to(getattr(torch, p["dtype"]))
    out_ids = poisoned(batch, k, dtype=torch.int32, device=device)
    out_logprobs = poisoned(batch, k, dtype=torch.float32, device=device)

    def check() -> None:
        want_ids, want_logprobs = reference.select_topk(logits.cpu(), k)
        expect_equal("out_ids", out_ids, want_ids)
        expect_close("out_logprobs", out_logprobs, want_logprobs, atol=2e-5)

    def plain_torch() -> torch.Tensor:
        return torch.log_softmax(logits.float(), -1).topk(k).values

    def check_torch(logprobs: torch.Tensor) -> None:  # torch.topk promises no order among ties, so only the values
        expect_close("values", logprobs, reference.select_topk(logits.cpu(), k)[1], atol=2e-5)

    return Work(
        call=lambda: sd.select_topk(logits, k, out_ids=out_ids, out_logprobs=out_logprobs),
        check=check,
        bytes_moved=logits.nbytes + out_ids.nbytes + out_logprobs.nbytes,
        baseline=Baseline("torch", plain_torch, check_torch),
    )


CASES = [
    Case(
        "select_topk",
        grid={"batch": (1, 8, 64), "vocab": (32000, 128256), "k": (1, 10), "dtype": ("bfloat16", "float32")},
        make=select_topk,
    )
]
