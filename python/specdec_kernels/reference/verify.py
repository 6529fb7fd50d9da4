"""References of the verify ops: one request at a time, on lists."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..ops import Accepted, LogitEdits, SlotState, TokenScores, Tree
from ..status import Edit, FinishReason, Status
from .draft import select_topk
from .noise import philox


def target_token(logits: Tensor) -> int | None:
    """Return the lowest id with the largest logit; None if no logit is above -inf. NaN counts as -inf."""
    x = logits.double().nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    largest = x.max()
    return int((x == largest).nonzero()[0]) if largest > -math.inf else None


def filtered(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Return the distribution [V] of a sampled request: temperature, top-k, top-p, min-p in this order; ties stay."""
    x = logits.double().nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    p = (x == math.inf).double() if x.max() == math.inf else torch.softmax(x / temperature, -1)
    kept = torch.ones_like(p, dtype=torch.bool)
    if 0 < top_k < len(p):
        kept &= x >= torch.sort(x, descending=True)[0][top_k - 1]
    if top_p < 1:
        order = torch.argsort(x, descending=True)
        sums = torch.cat([p.new_zeros(1), torch.where(kept, p, 0.0)[order].cumsum(0)])
        before = sums[torch.searchsorted(-x[order], -x)]  # the probability of larger logits, without equal ones
        kept &= before < max(top_p, 0.0) * p[kept].sum()
        kept |= x == x.max()
    if min_p > 0:
        kept &= p >= min(min_p, 1.0) * p.max()
    return torch.where(kept, p, 0.0) / p[kept].sum()


def uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) that draws the token at an absolute position."""
    words = philox(seed, (position, 0, 0, 0))
    return (words[0] << 32 | words[1]) / 2**64


def drawn(p: Tensor, u: float) -> int:
    """Return the first id whose cumulative probability exceeds u."""
    return int(torch.searchsorted(torch.cumsum(p, 0), torch.tensor(u * float(p.sum()), dtype=p.dtype), right=True))


def rejection(p: Tensor, q: Tensor, drafts: list[int]) -> tuple[list[float], Tensor]:
    """Apply recursive rejection sampling to a node whose children were drawn from q [V] without replacement, in order.

    Return the probability that each child is the accepted one, and that each token [V] is the bonus token. One child:
    the rejection sampling of Leviathan et al. 2023 and Chen et al. 2023; several: Jeon et al. 2024 (arXiv 2402.14160).
    """
    p, q, reached = p.double(), q.double(), 1.0
    chances = []
    for d in drafts:
        if q[d] == 0:  # cannot have been drawn
            chances.append(0.0)
            continue
        residual = (p - q).clamp(min=0)
        accepts = min(1.0, float(p[d] / q[d])) if residual.sum() > 0 else 1.0
        chances.append(reached * accepts)
        reached *= 1 - accepts
        p = residual / residual.sum() if residual.sum() > 0 else p
        q = q.index_fill(0, torch.tensor([d]), 0.0)
        q = q / q.sum() if q.sum() > 0 else q
    return chances, reached * p


def block_rejection(p: Tensor, q: Tensor, drafts: list[int]) -> tuple[list[float], Tensor]:
    """Apply block verification (Sun et al., arXiv 2403.10444, algorithm 2) to a chain of drafts.

    The chain was drawn from q [gamma, V]; p [gamma + 1, V] is the target's along it.

    Return the probability that exactly the first 0, 1, ..., gamma drafts are accepted, and the distributions
    [gamma + 1, V] of the token after them.
    """
    gamma = len(drafts)
    ratio, bonus, ends = 1.0, [], []
    for i in range(gamma + 1):
        residual = (ratio * p[i] - q[i]).clamp(min=0) if i < gamma else ratio * p[i]
        total = float(residual.sum())
        bonus.append(residual / total if total > 0 else p[i])
        ends.append(1.0 if i == 0 else ratio if i == gamma else total / (total + 1 - ratio) if total > 0 else 0.0)
        if i < gamma:
            ratio = min(ratio * float(p[i, drafts[i]] / q[i, drafts[i]]), 1.0)
    chances = []
    later = 1.0  # probability that no longer prefix is accepted
    for end in reversed(ends):
        chances.append(later * end)
        later *= 1 - end
    return chances[::-1], torch.stack(bonus)


def verify_tree(
    logits: Tensor, tree: Tree, accept_width: int, slots: Tensor | None = None, status: Tensor | None = None
) -> Accepted:
    """Verify well-formed trees greedily. Set BAD_LOGITS in `status`."""
    batch = logits.shape[0]
    tokens = torch.full((batch, accept_width), -1, dtype=torch.int32)
    path = torch.zeros((batch, accept_width), dtype=torch.int32)
    num_valid = torch.zeros(batch, dtype=torch.int32)
    for b in range(batch):
        slot = b if slots is None else int(slots[b])
        if slot < 0 or tree.num_nodes[b] <= 0:
            continue
        emitted: list[int] = []
        visited: list[int] = []
        node: int | None = 0
        while node is not None and len(emitted) < accept_width:
            y = target_token(logits[b, node])
            if y is None:
                if status is not None:
                    status[slot] |= int(Status.BAD_LOGITS)
                break
            emitted.append(y)
            visited.append(node)
            children = [c for c in range(1, int(tree.num_nodes[b])) if tree.parents[b, c] == node]
            node = next((c for c in children if tree.tokens[b, c] == y), None)
        num_valid[b] = len(emitted)
        tokens[b, : len(emitted)] = torch.tensor(emitted, dtype=torch.int32)
        path[b] = visited[-1] if visited else 0
        path[b, : len(visited)] = torch.tensor(visited, dtype=torch.int32)
    return Accepted(tokens, num_valid, path)


def edit_logits(
    logits: Tensor,
    mask: Tensor,
    tokens: Tensor,
    edits: LogitEdits,
    vocab_mask: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """Edit node by node from the tokens on its path, with the op's float32 arithmetic, operation by operation."""
    batch, num_nodes, vocab = logits.shape
    for b in range(batch):
        slot = b if slots is None else int(slots[b])
        kinds = Edit(int(edits.kinds[slot])) if 0 <= slot < len(edits.kinds) else Edit(0)
        for node in range(num_nodes if kinds else 0):
            x = logits[b, node].float()
            if Edit.BIAS in kinds:
                x += edits.bias[slot]
            if Edit.PENALTIES in kinds:
                on_path = [i for i in range(1, tokens.shape[1]) if int(mask[b, node, i // 64]) >> i % 64 & 1]
                drafted = [token for token in tokens[b, on_path].tolist() if 0 <= token < vocab]
                times = (edits.counts[slot] >> 1) + torch.bincount(
                    torch.tensor(drafted, dtype=torch.int64), minlength=vocab
                )
                seen = (times > 0) | (edits.counts[slot] != 0)
                repeated = torch.where(x > 0, x / edits.repetition[slot], x * edits.repetition[slot])
                x = torch.where(seen, repeated, x)
                penalized = x - edits.frequency[slot] * times.float() - edits.presence[slot]
                x = torch.where(times > 0, penalized, x)
            if Edit.MASK in kinds and vocab_mask is not None:
                words = vocab_mask[b, node].long()
                ids = torch.arange(vocab)
                x[(words[ids // 32] >> ids % 32 & 1) == 0] = -torch.inf
            logits[b, node] = x.to(logits.dtype)


def mask_stops(
    logits: Tensor, positions: Tensor, stop_tokens: Tensor, stops_from: Tensor, slots: Tensor | None = None
) -> None:
    batch, num_nodes, vocab = logits.shape
    for b in range(batch):
        slot = b if slots is None else int(slots[b])
        if not 0 <= slot < len(stops_from) or stops_from[slot] <= 0:
            continue
        stops = [token for token in stop_tokens[slot].tolist() if 0 <= token < vocab]
        for node in range(num_nodes):
            if positions[b, node].long() + 1 < stops_from[slot]:
                logits[b, node, stops] = -torch.inf


def score_tokens(
    logits: Tensor,
    accepted: Accepted,
    top_n: int = 0,
    slots: Tensor | None = None,
    num_logprobs: Tensor | None = None,
) -> TokenScores:
    tokens, num_valid, path = accepted
    batch, width = path.shape
    logprobs = torch.full((batch, width), -torch.inf, dtype=torch.float64)
    top_ids = torch.full((batch, width, top_n), -1, dtype=torch.int32)
    top_logprobs = torch.full((batch, width, top_n), -torch.inf, dtype=torch.float64)
    num_nodes, vocab = logits.shape[1:]
    for b in range(batch):
        wanted = top_n
        if num_logprobs is not None:
            slot = b if slots is None else int(slots[b])
            wanted = min(int(num_logprobs[slot]), top_n) if 0 <= slot < len(num_logprobs) else -1
        for j in range(min(width, int(num_valid[b]))):
            node, token = int(path[b, j]), int(tokens[b, j])
            if wanted >= 0 and 0 <= node < num_nodes and 0 <= token < vocab:
                ids, values = select_topk(logits[b, node][None], vocab)
                logprobs[b, j] = values[ids == token].item()
                top_ids[b, j, :wanted], top_logprobs[b, j, :wanted] = ids[0, :wanted], values[0, :wanted]
    return TokenScores(logprobs, top_ids, top_logprobs)


def commit_tokens(
    accepted: Accepted, state: SlotState, slots: Tensor | None = None, counts: Tensor | None = None
) -> Tensor:
    """Commit token by token, as if each were emitted alone; in place like the op."""
    batch = accepted.tokens.shape[0]
    continuing = torch.zeros(batch, dtype=torch.int32)
    for b in range(batch):
        slot = b if slots is None else int(slots[b])
        proposed = accepted.tokens[b, : int(accepted.num_valid[b])].tolist()
        accepted.tokens[b], accepted.num_valid[b] = -1, 0
        if not 0 <= slot < len(state.seq_lens):
            continue
        before = int(state.seq_lens[slot])
        state.prefix_lens[slot] = before
        if state.finish_reasons[slot] != FinishReason.RUNNING or int(state.status[slot]) & Status.STALLED:
            continue
        reason = FinishReason.RUNNING
        kept: list[int] = []
        for token in proposed:
            sequence = before + 1 + len(kept)
            if int(state.remaining[slot]) <= len(kept):
                reason = FinishReason.LENGTH
                break
            if sequence >= int(state.max_seq_lens[slot]):
                reason = FinishReason.CONTEXT
                break
            kept.append(token)
            if counts is not None and 0 <= token < counts.shape[1]:
                counts[slot, token] += 2
            if token in state.stop_tokens[slot].tolist():
                reason = FinishReason.STOP
                break
            if int(state.remaining[slot]) == len(kept):
                reason = FinishReason.LENGTH
                break
            if sequence + 1 == int(state.max_seq_lens[slot]):
                reason = FinishReason.CONTEXT
                break
        accepted.tokens[b, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
        accepted.num_valid[b] = len(kept)
        state.seq_lens[slot] += len(kept)
        state.remaining[slot] -= len(kept)
        if kept:
            state.root_tokens[slot] = kept[-1]
        state.finish_reasons[slot] = reason
        if reason == FinishReason.RUNNING:
            continuing[b] = len(kept)
    return continuing
