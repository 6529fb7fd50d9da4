"""With batch_invariant, a request's logits have the same bits whatever else runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from specdec_kernels.engine import Draft, Eagle3, Engine, Ngram, SamplingParams, Standalone
from specdec_kernels.engine.device.round import Drafted
from specdec_kernels.tiny import tiny_model
from support.exhaustive import thinned
from support.tiny_checkpoint import held_out

HEAD = tiny_model("eagle3")
DRAFTS: dict[str, Callable[[], Draft | None]] = {
    "none": lambda: None,
    "chain": lambda: Eagle3(HEAD, num_steps=3, topk=1),
    "drawn": lambda: Eagle3(HEAD, num_steps=3, topk=1, sampled=True),
    "tree": lambda: Eagle3(HEAD, num_steps=4, topk=4, num_nodes=16),
    "standalone": lambda: Standalone(tiny_model("target"), num_steps=2, topk=2, num_nodes=6),
}
NUM_SLOTS, NEW_TOKENS = 5, 24

Logits = dict[tuple[int, int], torch.Tensor]  # by request and length: of all nodes of that round's tree


def make_engine(name: str, device: torch.device, **options: Any) -> Engine:
    return Engine(
        tiny_model("target"),
        draft=DRAFTS[name](),
        max_len=160,
        num_slots=NUM_SLOTS,
        prefill_chunk=24,
        batch_invariant=True,
        dtype=torch.float32 if device.type == "cpu" else torch.bfloat16,
        device=device,
        **options,
    )


def logits_of(
    engine: Engine, requests: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[Logits, list[list[int]]]:
    """Of each round of these requests (numbers of held-out prompts), run together, and what they generated."""
    prompts = {n: held_out("code")[n][: 15 + 9 * n] for n in requests}
    kept: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    target, round = engine.target, engine.core.executor.round
    logits, commit = target.logits, round.commit

    def keep(hidden: torch.Tensor) -> torch.Tensor:
        kept.append(logits(hidden))
        return kept[-1]

    def commit_and_look(drafted: Drafted) -> object:
        kept.clear()
        result, slots = commit(drafted), drafted.slots
        live = [(row, slot) for row, slot in enumerate(slots.tolist()) if slot >= 0]
        for row, slot in live:
            text = (int(engine.state.prefix_lens[slot]), slot)
            rounds.append((text, kept[0].unflatten(0, (len(slots), -1))[row].clone()))
        return result

    rounds: list[tuple[tuple[int, int], torch.Tensor]] = []
    monkeypatch.setattr(target, "logits", keep)
    monkeypatch.setattr(round, "commit", commit_and_look)
    params = [SamplingParams(NEW_TOKENS, ignore_eos=True, temperature=0.7 * (n % 2), seed=n) for n in requests]
    outputs = engine.generate([prompts[n] for n in requests], params)
    monkeypatch.undo()
    # Requests get slots in order, each its own.
    return {(requests[slot], length): x for (length, slot), x in rounds}, [out.tokens for out in outputs]


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [*thinned(((name, None) for name in DRAFTS), lambda case: case[0] not in ("chain", "tree")), ("tree", "fp8_e4m3")],
)
def test_batch_invariant_logits_equal_in_any_batch(
    name: str, kv_dtype: str | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Call by call, so that the logits of a round can be looked at.
    engine = make_engine(name, device, cuda_graph=False, rounds_in_flight=1, kv_dtype=kv_dtype)
    together, texts = logits_of(engine, [0, 1, 2, 3, 4], monkeypatch)
    for batch_mates in ([2], [4, 2, 0], [3, 1]):
        some, some_texts = logits_of(engine, batch_mates, monkeypatch)
        assert some_texts == [texts[n] for n in batch_mates]
        assert len(some) > 3 * len(batch_mates)
        for key, logits in some.items():
            assert torch.equal(logits, together[key]), key


# The logits of a tree are compared above.
@pytest.mark.parametrize("name", thinned(DRAFTS, ("drawn", "standalone").__contains__))
def test_batch_invariant_texts_equal_in_any_batch(name: str, device: torch.device) -> None:
    """Greedy and sampled; on a GPU captured and overlapped; with more requests than slots, in other orders."""
    engine = make_engine(name, device)
    prompts = [prompt[: 5 + 7 * n] for n, prompt in enumerate(held_out("code")[:6])]
    params = [
        SamplingParams(NEW_TOKENS, ignore_eos=True, temperature=0.9 * (n % 2), seed=n, logprobs=2) for n in range(6)
    ]
    alone = [engine.generate(prompt, sampling)[0] for prompt, sampling in zip(prompts, params, strict=True)]
    for order in (range(6), torch.randperm(6).tolist()[:5]):
        for n, output in zip(
            order, engine.generate([prompts[n] for n in order], [params[n] for n in order]), strict=True
        ):
            assert (output.tokens, output.logprobs) == (alone[n].tokens, alone[n].logprobs), n


def test_batch_invariant_refuses_other_options() -> None:
    def refusal(**options: object) -> str:
        with pytest.raises(ValueError) as error:
            Engine(tiny_model("target"), num_slots=4, batch_invariant=True, device="cpu", **options)  # type: ignore[arg-type]
        return str(error.value)

    assert refusal(draft=Ngram()) == (
        "Engine: batch_invariant is set, expected not with Ngram, whose drafts depend on what other requests said"
    )
    assert refusal(batch_sizes=[2, 4]) == "Engine: batch_sizes is [2, 4], expected one size with batch_invariant"
