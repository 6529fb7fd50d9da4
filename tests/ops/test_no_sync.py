"""Check that captured rounds read no device value on the host.

A CPU has no capture to break, so the tests look for every operation that would, in rounds and prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_kernels.engine import Eagle3, Engine, Ngram, SamplingParams, Standalone, Union
from specdec_kernels.engine.device.prefill_graphs import Passes
from specdec_kernels.engine.device.round import Round
from specdec_kernels.tiny import tiny_model

WAITING = {
    "_local_scalar_dense",
    "is_nonzero",
    "item",
    "nonzero",
    "masked_select",
    "_unique2",
    "repeat_interleave.Tensor",
}


class NoSync(TorchDispatchMode):
    """Fails at an operation that waits for the device: one that returns a number, or a shape that depends on data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        overload = f"{name}.{func._schema.overload_name}"
        kwargs = kwargs or {}
        waits = (
            bool({name, overload} & WAITING) and "output_size" not in kwargs
        )  # whose value the host would have to read
        if name in ("index", "index_put", "index_put_"):  # by a mask, whose indices need a sync
            waits = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if waits:
            raise AssertionError(f"{overload} waits for the device")
        return func(*args, **kwargs)


def within_no_sync(method: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append(method.__name__)
        with NoSync():
            return method(*args, **kwargs)

    return watched


@pytest.mark.parametrize("draft", ["none", "chain", "tree", "standalone", "ngram", "union"])
def test_round_and_prefill_never_sync(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for owner, name in ((Round, "forward"), (Round, "finish"), (Passes, "launch")):
        monkeypatch.setattr(owner, name, within_no_sync(getattr(owner, name), calls))
    head = tiny_model("eagle3")
    drafts = {
        "none": None,
        "chain": Eagle3(head, num_steps=3, topk=1, num_nodes=4),
        "tree": Eagle3(head, num_steps=3, topk=4, num_nodes=12),
        "standalone": Standalone(tiny_model("target"), num_steps=3, topk=1, num_nodes=4),
        "ngram": Ngram(num_nodes=6),
        "union": Union(Eagle3(head, num_steps=3, topk=4, num_nodes=8), Ngram(num_nodes=6)),
    }
    params = [
        SamplingParams(max_new_tokens=24),
        SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.9, seed=1, logprobs=2, presence_penalty=0.5),
    ]
    with Engine(tiny_model("target"), draft=drafts[draft], max_len=256, num_slots=2) as engine:
        outputs = engine.generate(["def quicksort(items):\n", "import os\n"], params)
    assert all(output.tokens for output in outputs)
    assert {"forward", "finish", "launch"} <= set(calls)


def test_no_sync_detects_syncs() -> None:
    with NoSync():
        for wait in (
            lambda x: x.sum().item(),
            lambda x: bool(x.any()),
            lambda x: x[x > 0],
            torch.nonzero,
            torch.unique,
        ):
            with pytest.raises(AssertionError, match="waits for the device"):
                wait(torch.ones(3))
