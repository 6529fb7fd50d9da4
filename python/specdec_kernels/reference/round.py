"""References of the records between host and device, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import Accepted, SlotState, TokenScores
from ..status import Status


def apply_commands(commands: Tensor, num_applied: Tensor, state: SlotState) -> tuple[Tensor, Tensor]:
    num_slots, max_stops = state.stop_tokens.shape
    record = commands[int(num_applied) % len(commands)]
    num_applied += 1
    record[0] = int(num_applied)
    width = 13 + max_stops
    max_batch = len(record) - 2 - num_slots * (1 + width)
    slots, freed, activations = torch.split(record[2:], [max_batch, num_slots, num_slots * width])
    for slot in freed.tolist():
        if 0 <= slot < num_slots:
            for tensor in (state.seq_lens, state.finish_reasons, state.status):
                tensor[slot] = 0
    for words in activations.view(num_slots, width)[: max(int(record[1]), 0)]:
        slot = int(words[0])
        if not 0 <= slot < num_slots:
            continue
        tensors = (state.seq_lens, state.root_tokens, state.remaining, state.temperature, state.top_k, state.top_p)
        for tensor, word in zip((*tensors, state.min_p), words[1:8], strict=True):
            tensor[slot] = word.view(tensor.dtype)
        low, high = words[8:10].tolist()
        state.seeds[slot] = high * 2**32 + low % 2**32
        state.stops_from[slot], state.num_logprobs[slot], state.max_nodes[slot] = words[10:13]
        state.stop_tokens[slot] = words[13:]
        state.finish_reasons[slot] = 0
        if state.status[slot] & Status.STALLED:
            state.status[slot] |= Status.BAD_PAGE
    return slots.clone(), freed.clone()


def publish_results(
    results: Tensor,
    num_published: Tensor,
    accepted: Accepted,
    num_nodes: Tensor,
    state: SlotState,
    slots: Tensor | None = None,
    scores: TokenScores | None = None,
    level_limits: Tensor | None = None,
    node_scores: Tensor | None = None,
    cuts: Tensor | None = None,
) -> None:
    """Write the record of a round, except for the times (words 2 to 5)."""
    record = results[int(num_published) % len(results)]
    num_published += 1
    record[0] = int(num_published)
    num_levels = 0 if level_limits is None else len(level_limits)
    num_continuing, predicted, observed = 0, torch.zeros(num_levels, dtype=torch.float64), torch.zeros(num_levels)
    for b in range(len(num_nodes)):
        slot = b if slots is None else int(slots[b])
        if not 0 <= slot < len(state.status) or state.finish_reasons[slot] != 0 or accepted.num_valid[b] <= 0:
            continue
        num_continuing += 1
        path = accepted.path[b, 1 : int(accepted.num_valid[b])].tolist()
        for r in range(num_levels):
            assert level_limits is not None
            if node_scores is None or cuts is None:
                observed[r] += sum(0 < node < int(level_limits[r]) for node in path)
                continue
            most = min(node_scores.shape[1], int(level_limits[r]))
            has = [0 < i < most and bool(node_scores[b, i] >= cuts[r]) for i in range(node_scores.shape[1])]
            observed[r] += sum(0 < node < len(has) and has[node] for node in path)
            listed = [i for i, inside in enumerate(has) if inside and i < max(int(state.max_nodes[slot]), 1)]
            predicted[r] += node_scores[b, listed].double().clamp(max=0).exp().sum()
    record[6] = num_continuing
    record[8 : 8 + num_levels] = (observed if node_scores is None else predicted.float()).view(torch.int32)
    record[8 + num_levels : 8 + 2 * num_levels] = observed.int()
    for b in range(len(num_nodes)):
        slot = b if slots is None else int(slots[b])
        inside = 0 <= slot < len(state.status)
        reason, bits = (state.finish_reasons[slot], state.status[slot]) if inside else (0, 0)
        head = torch.tensor([accepted.num_valid[b], reason, bits, num_nodes[b]], dtype=torch.int32)
        words = torch.cat([head, accepted.tokens[b]])
        begin = 8 + 2 * num_levels + b * len(words)
        record[begin : begin + len(words)] = words
        if scores is not None and inside and state.num_logprobs[slot] >= 0:
            row = torch.cat([part[b].flatten().view(torch.int32) for part in scores])
            begin = len(record) - (b + 1) * len(row)
            record[begin : begin + len(row)] = row
