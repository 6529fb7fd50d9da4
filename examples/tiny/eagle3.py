"""An EAGLE-3 draft head: the module, its training loss and an honest evaluation.

EAGLE-3 (Li et al., arXiv 2503.01840) drafts with one decoder layer that reads the
target's hidden states. Parameter names follow the published checkpoints, so that
``state_dict()`` *is* the checkpoint.

Row ``i`` of the head is the pair (embedding of token ``i + 1``, feature of position
``i``). It is rotated at position ``i`` and predicts token ``i + 2``. The feature
comes from the target where the target has run (``fc`` of three hidden states); elsewhere
it is the head's own previous output.
"""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rope_tables(positions: torch.Tensor, head_dim: int, theta: float):
    """Return cosines and sines in the Llama ("rotate half") layout, [..., head_dim]."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions.float()[..., None] * theta**-exponents
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    """Projections only: the mask depends on the use."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(2 * hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    def __init__(self, hidden, intermediate, heads, kv_heads, head_dim, eps):
        super().__init__()
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(hidden, heads, kv_heads, head_dim)
        self.mlp = MLP(hidden, intermediate)


class Eagle3Head(nn.Module):
    """The head. The target's embedding is shared and therefore not a parameter here."""

    def __init__(self, config: dict):
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.config = config
        self.head_dim, self.theta = config["head_dim"], config["rope_theta"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = MidLayer(hidden, config["intermediate_size"], self.heads, self.kv_heads, self.head_dim, eps)
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config["draft_vocab_size"], bias=False)
        self.register_buffer("d2t", torch.zeros(config["draft_vocab_size"], dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config["vocab_size"], dtype=torch.bool))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def set_draft_vocabulary(self, target_ids: torch.Tensor):
        """Set the draft vocabulary to ``target_ids``, increasing. d2t holds offsets, not ids."""
        self.d2t.copy_(target_ids - torch.arange(len(target_ids), device=target_ids.device))
        self.t2d.zero_()
        self.t2d[target_ids] = True

    def draft_ids(self) -> torch.Tensor:
        """Return the target id of each draft id."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def project(self, embedding, feature, cos, sin):
        """Return queries, keys and values of rows [..., hidden], as [..., heads, head_dim]."""
        layer, attn = self.midlayer, self.midlayer.self_attn
        x = torch.cat((layer.input_layernorm(embedding), layer.hidden_norm(feature)), -1)
        q = attn.q_proj(x).unflatten(-1, (self.heads, self.head_dim))
        k = attn.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = attn.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        return rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype), v

    def finish(self, feature, attended):
        """Run the rest of the layer: the residual is the feature, not the embedding."""
        hidden = feature + self.midlayer.self_attn.o_proj(attended)
        return hidden + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden))

    def logits(self, hidden):
        return self.lm_head(self.norm(hidden))

    # ----- training ------------------------------------------------------------

    def unrolled(self, embeddings, aux, steps: int) -> list[torch.Tensor]:
        """Run the training-time test: the hidden states of ``steps`` draft steps, in parallel.

        Everything is indexed by position ``p``, so embeddings, rotations and labels
        are the same at each step: step ``s`` holds, at ``p``, the row that a draft
        begun at row ``p - s`` reaches after ``s`` recursions. Its feature is step
        ``s - 1``'s output at ``p - 1``. It sees the target-feature rows up to
        ``p - s`` and then its own ancestors: step ``m``'s row at ``p - s + m``, one
        key for each ``m``, which is a shifted elementwise product rather than a
        matrix product. Rows ``p < s`` have no such draft and must be ignored.
        """
        rows = embeddings.shape[1]
        cos, sin = rope_tables(torch.arange(rows, device=embeddings.device), self.head_dim, self.theta)
        row = torch.arange(rows, device=embeddings.device)
        group = self.heads // self.kv_heads
        feature, outputs, keys, values = self.fc(aux), [], [], []
        for step in range(steps):
            q, k, v = self.project(embeddings, feature, cos, sin)
            q = q.unflatten(2, (self.kv_heads, group)).permute(0, 2, 3, 1, 4)  # b k g t d
            keys.append(k.transpose(1, 2))  # b k t d
            values.append(v.transpose(1, 2))
            scores = q.flatten(2, 3) @ keys[0].transpose(-1, -2)
            scores = scores.unflatten(2, (group, rows)).float()  # b k g t t
            scores = scores.masked_fill(row[None, :] > row[:, None] - step, float("-inf"))
            own = [
                (q.float() * shift(keys[m], step - m, dim=2)[:, :, None].float()).sum(-1) for m in range(1, step + 1)
            ]
            # One softmax over both kinds of keys, written out so that the large
            # matrix keeps its aligned shape.
            peak = torch.stack([scores.amax(-1), *own], -1).amax(-1).detach()
            scale = self.head_dim**-0.5
            weights = ((scores - peak[..., None]) * scale).exp()
            total = weights.sum(-1)
            attended = weights.to(v.dtype).flatten(2, 3) @ values[0]
            attended = attended.unflatten(2, (group, rows)).float()
            for m, score in enumerate(own, start=1):
                weight = ((score - peak) * scale).exp()
                value = shift(values[m], step - m, dim=2)[:, :, None]
                total = total + weight
                attended = attended + weight[..., None] * value.float()
            attended = (attended / total[..., None]).to(v.dtype)
            attended = attended.permute(0, 3, 1, 2, 4).flatten(2)
            outputs.append(self.finish(feature, attended))
            feature = shift(outputs[-1], 1, dim=1)
        return outputs

    def loss(self, embeddings, aux, target_logits, steps: int, decay: float = 0.8):
        """Return the soft cross-entropy of all steps against the target's distribution.

        ``target_logits[:, p]`` are the target's logits for token ``p + 2``. They are
        restricted to the draft vocabulary and renormalised; each position then
        counts by the probability that the draft vocabulary holds there, since the
        head can win nothing where the target wants another token. Returns the
        weighted sum and each step's agreement with the target's own argmax.
        """
        full = target_logits.float().softmax(-1)
        wanted = full[..., self.draft_ids()]
        best = target_logits.argmax(-1)
        total, weight, agreement = 0.0, 0.0, []
        for step, hidden in enumerate(self.unrolled(embeddings, aux, steps)):
            logits = self.logits(hidden[:, step:]).float()
            cross = -(wanted[:, step:] * logits.log_softmax(-1)).sum(-1)
            total = total + decay**step * cross.mean()
            weight += decay**step
            guess = logits.argmax(-1)
            guess = guess + self.d2t[guess]
            agreement.append((guess == best[:, step:]).float().mean())
        return total / weight, torch.stack(agreement).detach()

    # ----- drafting ------------------------------------------------------------

    def attend(self, q, k, v, mask):
        """Attend: q [p, m, heads, d]; k, v [p, r, kv_heads, d]; mask [p, m, r] -> [p, m, heads * d]."""
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        scores = torch.einsum("pmhd,prhd->phmr", q, k) * self.head_dim**-0.5
        weights = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1)
        return torch.einsum("phmr,prhd->pmhd", weights, v).flatten(2)

    @torch.no_grad()
    def draft(self, embed, tokens, aux, bases, steps: int, topk: int, nodes: int):
        """Draft a tree from each of the rows ``bases`` of one sequence.

        As EAGLE-2/3 do: the ``topk`` best nodes of a level are expanded into ``topk``
        children each, and of all candidates the ``nodes - 1`` best by cumulative
        log-probability are kept (the root, the last known token, is a node too).
        ``topk=1`` is a chain. Returns, for every candidate, the target token, the
        parent (0 is the root, candidate ``c`` is node ``c + 1``), the level and
        whether it was kept; each is [len(bases), candidates].
        """
        device = tokens.device
        rows = torch.arange(len(tokens) - 1, device=device)
        count = len(bases)
        feature = self.fc(aux[:-1])
        tables = rope_tables(rows, self.head_dim, self.theta)
        q, k, v = self.project(embed(tokens[1:]), feature, *tables)
        causal = rows[None, :] <= rows[:, None]
        hidden = self.finish(feature, self.attend(q[None], k[None], v[None], causal[None])[0])

        # One level: what its nodes are drawn from, [count, parents, ...].
        parent_hidden = hidden[bases][:, None]
        parent_node = torch.zeros(count, 1, dtype=torch.int64, device=device)
        parent_score = torch.zeros(count, 1, device=device)
        keys, values = k.expand(count, -1, -1, -1), v.expand(count, -1, -1, -1)
        seen = (rows[None, :] <= bases[:, None])[:, None]  # [count, parents, keys]
        pool_token, pool_parent, pool_score, pool_level = [], [], [], []
        for level in range(1, steps + 1):
            log_probs = self.logits(parent_hidden).float().log_softmax(-1)
            best, draft_id = log_probs.topk(topk, -1)
            token = (draft_id + self.d2t[draft_id]).flatten(1)
            score = (parent_score[..., None] + best).flatten(1)
            parents = torch.arange(best.shape[1], device=device).repeat_interleave(topk)
            offset = 1 + sum(part.shape[1] for part in pool_token)
            pool_token.append(token)
            pool_score.append(score)
            pool_parent.append(parent_node[:, parents])
            pool_level.append(torch.full_like(token, level))
            if level == steps:
                break
            parent_score, chosen = score.topk(topk, -1)
            came_from = parents[chosen]
            parent_node = chosen + offset
            feature = parent_hidden.gather(1, came_from[..., None].expand(-1, -1, hidden.shape[-1]))
            seen = seen.gather(1, came_from[..., None].expand(-1, -1, seen.shape[-1]))
            itself = torch.eye(topk, dtype=torch.bool, device=device).expand(count, -1, -1)
            seen = torch.cat((seen, itself), -1)
            cos, sin = rope_tables(bases[:, None] + level, self.head_dim, self.theta)
            q, k, v = self.project(embed(token.gather(1, chosen)), feature, cos, sin)
            keys, values = torch.cat((keys, k), 1), torch.cat((values, v), 1)
            parent_hidden = self.finish(feature, self.attend(q, keys, values, seen))
        pool = [torch.cat(part, 1) for part in (pool_token, pool_parent, pool_level)]
        scores = torch.cat(pool_score, 1)
        kept = torch.zeros_like(scores, dtype=torch.bool)
        kept.scatter_(1, scores.topk(min(nodes - 1, scores.shape[1]), -1).indices, True)
        return *pool, kept

    def accepted(self, embed, tokens, aux, bases, steps: int, topk: int, nodes: int):
        """Return the number of drafted tokens that greedy verification accepts from each base row.

        ``tokens`` is the target's own greedy text, so verification is comparison.
        """
        token, parent, level, kept = self.draft(embed, tokens, aux, bases, steps, topk, nodes)
        right = kept & (token == tokens[bases[:, None] + 1 + level])
        on_path = torch.ones(len(bases), 1 + token.shape[1], dtype=torch.bool, device=token.device)
        on_path[:, 1:] = right
        for current in range(1, steps + 1):
            with_parent = on_path.gather(1, parent) & right
            on_path[:, 1:] = torch.where(level == current, with_parent, on_path[:, 1:])
        return (on_path[:, 1:] * level).amax(1)


def shift(x: torch.Tensor, by: int, dim: int) -> torch.Tensor:
    """Move x towards higher indices along ``dim``, filling with zeros."""
    if by == 0:
        return x
    return torch.cat((torch.zeros_like(x.narrow(dim, 0, by)), x.narrow(dim, 0, x.shape[dim] - by)), dim)
