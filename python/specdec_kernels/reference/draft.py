"""References of the draft ops."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..ops import Accepted, Calibration, Candidates, DraftExtendInputs, DraftInputs, Frontier, Tree
from .noise import USE_DRAFT, noise


def select_topk(logits: Tensor, k: int, id_map: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sort in descending order, stably: among ties the lower index comes first."""
    x = logits.double().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best, index = torch.sort(x, dim=-1, descending=True, stable=True)
    best, index = best[:, :k], index[:, :k]
    # Entries of +inf share the whole probability: the limit of increasing equal logits.
    certain = (x == torch.inf).sum(-1, keepdim=True)
    finite = torch.where(best > -torch.inf, best - torch.logsumexp(x, -1, keepdim=True), -torch.inf)
    infinite = torch.where(best == torch.inf, -certain.double().log(), -torch.inf)
    logprobs = torch.where(certain > 0, infinite, finite)
    ids = index if id_map is None else id_map[index]
    return ids.to(torch.int32), logprobs.clamp(max=0)


def slot_list(slots: Tensor | None, num_slots: int, batch: int | None = None) -> list[int]:
    """Return the slot of each row, -1 for an empty one."""
    if slots is None:
        return list(range(num_slots if batch is None else batch))
    return [slot if 0 <= slot < num_slots else -1 for slot in slots.tolist()]


def draft_noise(seed: int, position: int, branch: int, vocab: int) -> Tensor:
    """Return the noise, float64 [vocab], added to log2 of each probability: -log2(E) with E = -log2(1 - v)."""
    words = noise(seed, USE_DRAFT, position, branch, torch.arange(-(-vocab // 4)))
    v = (torch.stack(words, 1).flatten()[:vocab].double() + 0.5) / 2**32
    return -(-torch.log1p(-v) / math.log(2)).log2()


def sample_draft(
    logits: Tensor,
    k: int,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    slots: Tensor | None = None,
    id_map: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add noise to log2 of each row's probabilities and sort."""
    requests = slot_list(slots, len(seeds))
    ids = torch.zeros(len(logits), k, dtype=torch.int32)
    logprobs = torch.full((len(logits), k), -torch.inf, dtype=torch.float64)
    for r in range(len(logits)):
        request, branch = divmod(r, len(logits) // len(requests))
        slot = requests[request]
        if slot < 0:
            continue
        vocab = logits.shape[1]
        t = float(temperature[slot])
        scaled = (logits[r].double() / t if t > 0 else logits[r].double())[None]
        order, sorted_logprobs = select_topk(scaled, vocab)
        log_p = torch.empty(vocab, dtype=torch.float64).scatter_(0, order[0].long(), sorted_logprobs[0])
        scores = log_p / math.log(2) + draft_noise(int(seeds[slot]), int(positions[r]), branch, vocab)
        best = order[0].long() if not t > 0 else torch.sort(scores, descending=True, stable=True).indices
        best = best[:k]
        ids[r] = best if id_map is None else id_map[best]
        logprobs[r] = log_p[best]
    return ids, logprobs


def mask_words(bits: int, words: int) -> list[int]:
    """Return the low 64 * words bits of `bits` as signed 64-bit words."""
    patterns = [(bits >> 64 * w) & (2**64 - 1) for w in range(words)]
    return [p - 2**64 if p >= 2**63 else p for p in patterns]


def mask_bits(words: list[int]) -> int:
    return sum((word % 2**64) << 64 * w for w, word in enumerate(words))


def expand_root(
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    seq_lens: Tensor,
    num_steps: int,
    slots: Tensor | None = None,
    position_offset: int = 0,
) -> tuple[Candidates, Frontier]:
    rows = slot_list(slots, len(topk_ids))
    k = topk_ids.shape[1]
    batch, columns, words = len(rows), k + (num_steps - 1) * k * k, max(1, -(-k * (num_steps - 1) // 64))
    candidates = Candidates(
        torch.zeros(batch, columns, dtype=torch.int32),
        torch.full((batch, columns), -1, dtype=torch.int32),
        torch.full((batch, columns), -torch.inf),
    )
    positions = torch.zeros(batch, k, dtype=torch.int32)
    for b, slot in enumerate(rows):
        if slot >= 0:
            candidates.tokens[b, :k] = topk_ids[slot]
            candidates.scores[b, :k] = topk_logprobs[slot].nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=0)
            positions[b] = seq_lens[slot] + position_offset
    nodes = torch.arange(k, dtype=torch.int32).repeat(batch, 1)
    own = torch.tensor([mask_words(1 << j, words) for j in range(k)], dtype=torch.int64)
    return candidates, Frontier(nodes, candidates.tokens[:, :k].clone(), positions, own.repeat(batch, 1, 1))


def child_score(parent: Tensor, logprob: Tensor) -> Tensor:
    """Add in float32, since ties between scores are part of the contract. NaN counts as -inf."""
    if parent.isnan() or logprob.isnan() or parent == -torch.inf:
        return torch.tensor(-torch.inf)
    return torch.minimum(parent + logprob, parent)


def calibrated(table: Tensor, depth: int, logprobs: Tensor) -> Tensor:
    """Apply Platt scaling in float64; probabilities are clamped to e^-24 .. 1 - 6e-6."""
    slope, offset = table[min(depth, len(table)) - 1].double()
    if slope == 1 and offset == 0:
        return logprobs.double()
    y = torch.nn.functional.logsigmoid(slope * logits_of(logprobs) + offset)
    return torch.where(logprobs > -torch.inf, y, logprobs.double())


def logits_of(logprobs: Tensor) -> Tensor:
    x = logprobs.double().clamp(-24, -6e-6)
    return x - torch.log(-torch.expm1(x))


def trellis_logprobs(
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    predecessors: Tensor | None = None,
    successors: Tensor | None = None,
    gates: Tensor | None = None,
    root_tokens: Tensor | None = None,
    id_map: Tensor | None = None,
) -> Tensor:
    """Return log p of each candidate after each of the position before, float64 [B, D, K, K]; row 0 is the root's."""
    unary = topk_logprobs.double().nan_to_num(nan=-torch.inf, posinf=0, neginf=-torch.inf).clamp(max=0)
    k = topk_ids.shape[-1]
    if predecessors is None or successors is None:
        return unary[:, :, None].expand(-1, -1, k, -1)
    tokens = topk_ids if id_map is None else id_map[topk_ids]
    if predecessors.dim() == 4:
        factors = predecessors.clone()
        factors[:, :1] = factors[:, :1, :1]
    else:
        assert root_tokens is not None
        before = torch.cat([root_tokens[:, None, None].expand(-1, 1, k), tokens[:, :-1]], 1)
        factors = rows_of(predecessors, before)
        factors = factors if gates is None else factors * gates[:, :, None]
    transitions = torch.einsum("bdpr,bdcr->bdpc", factors.double(), rows_of(successors, topk_ids).double())
    rest = (1 - unary.exp().sum(-1)).clamp(min=0).log()
    moved = unary[:, :, None] + transitions
    total = torch.logaddexp(torch.logsumexp(moved, -1), rest[:, :, None])
    return torch.where(moved > -torch.inf, moved - total[..., None], -torch.inf).clamp(max=0)


def rows_of(table: Tensor, ids: Tensor) -> Tensor:
    """Return the rows of a table; zeros where there is none."""
    there = (ids >= 0) & (ids < len(table))
    return torch.where(there[..., None], table[ids.long().clamp(0, len(table) - 1)], 0)


def expand_trellis(
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    num_candidates: int,
    predecessors: Tensor | None = None,
    successors: Tensor | None = None,
    gates: Tensor | None = None,
    root_tokens: Tensor | None = None,
    id_map: Tensor | None = None,
    calibration: Tensor | None = None,
    width: int = 256,
) -> Candidates:
    """Keep the best nodes of each depth, and sort what was kept."""
    logprobs = trellis_logprobs(topk_ids, topk_logprobs, predecessors, successors, gates, root_tokens, id_map)
    batch, depth, k = topk_ids.shape
    shape = batch, num_candidates
    out = Candidates(
        torch.zeros(shape, dtype=torch.int32),
        torch.full(shape, -1, dtype=torch.int32),
        torch.full(shape, -torch.inf),
    )
    for b in range(batch):
        kept: list[tuple[float, int, int, int]] = []  # score, place of the parent in `kept`, depth, candidate
        beam = [(0.0, -1, 0, 0)]
        begin = -1
        for d in range(min(depth, num_candidates)):
            of_depth = logprobs[b, d] if calibration is None else calibrated(calibration, d + 1, logprobs[b, d])
            children = []
            for rank, (score, _, _, last) in enumerate(beam):
                row = of_depth[last].float()
                for c in range(k):
                    child = float(child_score(torch.tensor(score), row[c]))
                    if child > -math.inf:
                        children.append((child, begin + rank, d, c))
            children.sort(key=lambda node: -node[0])  # stable
            beam, begin = children[: min(num_candidates - d, width)], len(kept)
            kept += beam
        order = sorted(range(len(kept)), key=lambda i: -kept[i][0])[:num_candidates]  # stable
        place = {node: i for i, node in enumerate(order)} | {-1: -1}
        for i, node in enumerate(order):
            score, parent, d, c = kept[node]
            token = topk_ids[b, d, c]
            out.tokens[b, i] = token if id_map is None else id_map[token]
            out.parents[b, i], out.scores[b, i] = place[parent], score
    return out


def update_calibration(calibration: Calibration, tree: Tree, scores: Tensor, accepted: Accepted) -> None:
    """Count node by node; iterate the fit until it converges."""
    table, counts = calibration
    depths = len(table)
    new = torch.zeros_like(counts)
    for b in range(len(scores)):
        emitted = accepted.tokens[b, : int(accepted.num_valid[b])].tolist()
        paths: list[list[int]] = [[]]  # the tokens from the root to each node
        for i in range(1, int(tree.num_nodes[b])):
            parent, token = int(tree.parents[b, i]), int(tree.tokens[b, i])
            above = paths[parent]
            paths.append([*above, token])
            score, parents_score = float(scores[b, i]), float(scores[b, parent]) if parent else 0.0
            if emitted[: len(above)] != above or len(emitted) == len(above) or not -math.inf < score <= parents_score:
                continue
            depth = min(len(above) + 1, depths)
            slope, offset = table[depth - 1].tolist()
            logit = (float(logits_of(torch.tensor(score - parents_score))) - offset) / slope
            logit = min(max(logit, -24), 24)
            hit = int(emitted[len(above)] == token)
            bin = int(min(max(logit + 8, 0), 15))
            new[depth - 1, bin] += torch.tensor([1, hit, int(logit * 65536)])
    for d in range(depths):
        if not new[d, :, 0].any():
            continue
        counts[d] += new[d]
        while int(counts[d, :, 0].sum()) > 1 << 14:
            counts[d] = torch.div(counts[d], 2, rounding_mode="trunc")
        table[d] = fit_platt(counts[d])


def fit_platt(counts: Tensor) -> Tensor:
    """Fit slope and offset to one depth's counts [16, 3] by Newton's method, starting at the prior."""
    used = counts[counts[:, 0] > 0].double()
    nodes, hits, logits = used[:, 0], used[:, 1], used[:, 2] / used[:, 0] / 65536
    inputs = torch.stack([logits, torch.ones_like(logits)], 1)
    prior = torch.tensor([1.0, 0.0], dtype=torch.float64)
    found = prior.clone()
    for _ in range(200):
        p = torch.sigmoid(inputs @ found)
        gradient = inputs.T @ (nodes * p - hits) + 2 * (found - prior)
        curvature = inputs.T @ (inputs * (nodes * p * (1 - p))[:, None]) + 2 * torch.eye(2)
        slope = (found[0] - torch.linalg.solve(curvature, gradient)[0].clamp(-0.5, 0.5)).clamp(0.125, 8)
        step = (gradient[1] - curvature[0, 1] * (found[0] - slope)) / curvature[1, 1]  # at the new slope
        found = torch.stack([slope, (found[1] - step.clamp(-0.5, 0.5)).clamp(-8, 8)])
    return found


def expand_tree(
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    step: int,
    candidates: Candidates,
    frontier: Frontier,
    seq_lens: Tensor,
    slots: Tensor | None = None,
    position_offset: int = 0,
) -> tuple[Candidates, Tensor, Tensor, DraftInputs]:
    """Return the new candidates, frontier nodes and mask, and the draft's inputs. Arguments stay unchanged."""
    mask = frontier.mask
    batch, k, words = mask.shape
    first = k + (step - 2) * k * k
    candidates = Candidates(*(t.clone() for t in candidates))
    nodes, new_mask = torch.zeros_like(frontier.nodes), torch.zeros_like(mask)
    inputs = DraftInputs(*(torch.zeros(batch, k, dtype=torch.int32) for _ in DraftInputs._fields))
    for b, slot in enumerate(slot_list(slots, len(seq_lens), batch)):
        for j in range(k):
            parent = int(frontier.nodes[b, j])
            known = slot >= 0 and 0 <= parent < first
            for i in range(k):
                c = first + j * k + i
                candidates.scores[b, c] = -torch.inf
                if known:
                    candidates.scores[b, c] = child_score(candidates.scores[b, parent], topk_logprobs[b, j, i])
                candidates.tokens[b, c] = topk_ids[b, j, i] if slot >= 0 else 0
                candidates.parents[b, c] = parent if known else -1
        appended = candidates.scores[b, first : first + k * k].tolist()
        best = sorted(range(k * k), key=lambda i: (-appended[i], i))[:k]
        for j, i in enumerate(best):
            row = i // k
            nodes[b, j] = first + i
            bits = mask_bits(mask[b, row].tolist()) | 1 << ((step - 1) * k + j)
            new_mask[b, j] = torch.tensor(mask_words(bits, words))
            inputs.tokens[b, j] = candidates.tokens[b, first + i]
            inputs.parent_rows[b, j] = b * k + row
            inputs.positions[b, j] = int(seq_lens[slot]) + step - 1 + position_offset if slot >= 0 else 0
    return candidates, nodes, new_mask, inputs


def draft_extend_inputs(
    tokens: Tensor,
    path: Tensor,
    num_valid: Tensor,
    prefix_lens: Tensor,
    num_nodes: int,
    slots: Tensor | None = None,
    position_offset: int = 0,
) -> DraftExtendInputs:
    """Write row by row. Nodes outside the tree are clamped to the nearest one."""
    batch, num_slots = len(tokens), len(prefix_lens)
    width = min(tokens.shape[1], num_nodes)
    out_tokens, positions = (torch.zeros(batch, width, dtype=torch.int32) for _ in range(2))
    node_rows = torch.zeros(batch, width, dtype=torch.int64)
    last_rows, kept_slots = torch.zeros(batch, dtype=torch.int64), torch.full((batch,), num_slots)
    for b, slot in enumerate(slot_list(slots, num_slots, batch)):
        length = int(prefix_lens[slot]) if slot >= 0 else 0
        for j in range(width):
            out_tokens[b, j] = max(int(tokens[b, j]), 0)
            positions[b, j] = length + position_offset + j
            node_rows[b, j] = b * num_nodes + min(max(int(path[b, j]), 0), num_nodes - 1)
        count = min(int(num_valid[b]), width)
        last_rows[b] = b * width + max(count - 1, 0)
        if slot >= 0 and count > 0:
            kept_slots[b] = slot
    return DraftExtendInputs(out_tokens, positions, node_rows, last_rows, kept_slots)


def append_draft_backlog(
    tokens: Tensor,
    path: Tensor,
    num_valid: Tensor,
    backlog_lens: Tensor,
    backlog_tokens: Tensor,
    features: Tensor | None = None,
    backlog_features: Tensor | None = None,
    slots: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
) -> None:
    """Append accepted rows one by one to the slot's ring, overwriting the oldest."""
    for b, slot in enumerate(slot_list(slots, len(backlog_lens), len(tokens))):
        nodes = None
        if features is not None:
            nodes = features[b] if cu_seqlens_q is None else features[int(cu_seqlens_q[b]) : int(cu_seqlens_q[b + 1])]
        if slot < 0 or (nodes is not None and len(nodes) == 0):
            continue
        for j in range(min(int(num_valid[b]), tokens.shape[1])):
            at = int(backlog_lens[slot]) % backlog_tokens.shape[1]
            backlog_tokens[slot, at] = max(int(tokens[b, j]), 0)
            if nodes is not None and backlog_features is not None:
                backlog_features[slot, at] = nodes[min(max(int(path[b, j]), 0), len(nodes) - 1)]
            backlog_lens[slot] += 1
