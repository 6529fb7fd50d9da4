"""A tree cut by its scores emits what the target would, and when it does not: what a cut may know of a drawn token."""

from __future__ import annotations

import math

import pytest
import torch

import specdec_kernels as sd

INT = torch.int32
BATCH, TURNS = 20000, 6
TARGET = torch.tensor([0.2, 0.3, 0.5])
SURE, UNSURE = torch.tensor([0.8, 0.1, 0.1]), torch.tensor([0.4, 0.35, 0.25])  # what drafts say, request by request


def first_tokens(device: torch.device, cut_by: str) -> torch.Tensor:
    """How often each token comes first, of requests whose one draft has to be among the best half of the batch's."""
    q = torch.stack([SURE, UNSURE]).repeat(BATCH // 2, 1).to(device)
    lens = torch.zeros(BATCH, dtype=INT, device=device)
    temperature = torch.ones(BATCH, device=device)
    logits = TARGET.log().to(device).repeat(2 * BATCH, 1)
    found = torch.zeros(3, dtype=torch.int64)
    for turn in range(TURNS):
        seeds = torch.arange(turn * BATCH, (turn + 1) * BATCH, device=device)
        if cut_by == "chosen":
            drafts = sd.select_topk(q.log(), 1)
        else:
            drafts = sd.sample_draft(q.log(), 1, seeds=seeds, positions=lens + 1, temperature=temperature)
        tokens = torch.cat([lens[:, None], drafts.ids], 1)
        tree = sd.build_tree_from_parents(tokens, torch.tensor([[-1, 0]] * BATCH, dtype=INT, device=device), lens)
        known = {
            "chosen": drafts.logprobs,  # of the token itself
            "the token": drafts.logprobs,
            "the row": q.max(1, keepdim=True).values.log(),  # before anything is drawn from it
        }[cut_by]
        scores = torch.cat([torch.zeros_like(known), known], 1).contiguous()
        rows = BATCH + BATCH // 2
        shares = sd.allocate_nodes(scores, rows)
        assert int(shares.cu_seqlens[-1]) == rows
        sd.pack_trees(tree, scores, shares, rows)
        given = {"temperature": temperature, "seeds": seeds, "cu_seqlens_q": shares.cu_seqlens}
        if cut_by != "chosen":
            given["draft_logits"] = q.log()[:, None]
            given["draft_rows"] = torch.tensor([[-1, 0]] * BATCH, dtype=INT, device=device)
        accepted = sd.verify_tree(logits[:rows], tree, 2, **given)
        assert int(accepted.num_valid.max()) == 2
        found += accepted.tokens[:, 0].cpu().bincount(minlength=3)
    return found


@pytest.mark.parametrize("cut_by", ["chosen", "the row"])
def test_budget_cut_by_scores_is_exact(device: torch.device, cut_by: str) -> None:
    found, want = first_tokens(device, cut_by).double(), TARGET.double() * BATCH * TURNS
    chi_square = float(((found - want) ** 2 / want).sum())
    assert math.exp(-chi_square / 2) > 1e-5  # 2 degrees of freedom


def test_budget_cut_by_drawn_token_is_biased(device: torch.device) -> None:
    found = first_tokens(device, "the token").double() / (BATCH * TURNS)
    assert float((found - TARGET).abs().max()) > 0.02
