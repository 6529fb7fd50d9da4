"""The records between host and device in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..status import Status

State = dict[str, Tensor]  # of the slots, by the argument names of `ops.apply_commands`


def apply_commands(commands: Tensor, num_applied: Tensor, state: State) -> tuple[Tensor, Tensor]:
    num_slots, max_stops = state["stop_tokens"].shape
    record = commands[int(num_applied) % len(commands)]
    num_applied += 1
    record[0] = int(num_applied)
    width = 12 + max_stops
    max_batch = len(record) - 2 - num_slots * (1 + width)
    slots, given_back, activations = torch.split(record[2:], [max_batch, num_slots, num_slots * width])
    for slot in given_back.tolist():
        if 0 <= slot < num_slots:
            for name in ("seq_lens", "finish_reasons", "status"):
                state[name][slot] = 0
    for words in activations.view(num_slots, width)[: max(int(record[1]), 0)]:
        slot = int(words[0])
        if not 0 <= slot < num_slots:
            continue
        names = ("seq_lens", "root_tokens", "remaining", "temperature", "top_k", "top_p", "min_p")
        for name, word in zip(names, words[1:8], strict=True):
            state[name][slot] = word.view(state[name].dtype)
        low, high = words[8:10].tolist()
        state["seeds"][slot] = high * 2**32 + low % 2**32
        state["stops_from"][slot], state["num_logprobs"][slot] = words[10:12]
        state["stop_tokens"][slot] = words[12:]
        state["finish_reasons"][slot] = 0
        if state["status"][slot] & Status.STALLED:
            state["status"][slot] |= Status.BAD_PAGE
    return slots.clone(), given_back.clone()


def publish_results(
    results: Tensor,
    num_published: Tensor,
    out_tokens: Tensor,
    out_len: Tensor,
    out_path: Tensor,
    num_nodes: Tensor,
    finish_reasons: Tensor,
    status: Tensor,
    slots: Tensor | None = None,
    logprobs: Tensor | None = None,
    top_ids: Tensor | None = None,
    top_logprobs: Tensor | None = None,
    num_logprobs: Tensor | None = None,
) -> None:
    """But for the times, words 2 to 5."""
    batch = len(out_tokens)
    record = results[int(num_published) % len(results)]
    num_published += 1
    record[0] = int(num_published)
    for b in range(batch):
        slot = b if slots is None else int(slots[b])
        inside = 0 <= slot < len(status)
        reason, bits = (finish_reasons[slot], status[slot]) if inside else (0, 0)
        head = torch.tensor([out_len[b], reason, bits, num_nodes[b]], dtype=torch.int32)
        words = torch.cat([head, out_tokens[b], out_path[b]])
        begin = 8 + b * len(words)
        record[begin : begin + len(words)] = words
        if logprobs is None or top_ids is None or top_logprobs is None or num_logprobs is None:
            continue
        if inside and num_logprobs[slot] >= 0:
            parts = (logprobs, top_ids, top_logprobs)
            scores = torch.cat([part[b].flatten().view(torch.int32) for part in parts])
            begin = len(record) - (b + 1) * len(scores)
            record[begin : begin + len(scores)] = scores
