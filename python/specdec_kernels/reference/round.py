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
    slots, given_back = record[13 + max_stops : -num_slots], record[-num_slots:]
    for slot in given_back.tolist():
        if 0 <= slot < num_slots:
            for name in ("seq_lens", "finish_reasons", "status"):
                state[name][slot] = 0
    slot = int(record[1])
    if 0 <= slot < num_slots:
        words = ("seq_lens", "root_tokens", "remaining", "temperature", "top_k", "top_p", "min_p")
        for name, word in zip(words, record[2:9], strict=True):
            state[name][slot] = word.view(state[name].dtype)
        low, high = record[9:11].tolist()
        state["seeds"][slot] = high * 2**32 + low % 2**32
        state["stops_from"][slot], state["num_logprobs"][slot] = record[11:13]
        state["stop_tokens"][slot] = record[13 : 13 + max_stops]
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
    batch, width = out_tokens.shape
    record = results[int(num_published) % len(results)]
    num_published += 1
    record[0] = int(num_published)
    for b in range(batch):
        slot = b if slots is None else int(slots[b])
        inside = 0 <= slot < len(status)
        reason, bits = (finish_reasons[slot], status[slot]) if inside else (0, 0)
        head = torch.tensor([out_len[b], reason, bits, num_nodes[b]], dtype=torch.int32)
        words, row_words = torch.cat([head, out_tokens[b], out_path[b]]), 4 + 2 * width
        if logprobs is not None and top_ids is not None and top_logprobs is not None:
            scores = (logprobs, top_ids, top_logprobs)
            row_words += sum(part[b].numel() for part in scores)
            if num_logprobs is not None and inside and num_logprobs[slot] >= 0:
                words = torch.cat([words, *(part[b].flatten().view(torch.int32) for part in scores)])
        begin = 8 + b * row_words
        record[begin : begin + len(words)] = words
