"""A call of every op with small arguments."""

from __future__ import annotations

from typing import Any

import torch

import specdec_kernels as sd


def calls(op: str, device: torch.device, seed: int = 3) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return arguments of one to three small calls of an op, equal for equal seeds."""
    random = torch.Generator().manual_seed(seed)

    def ints(*shape: int, high: int = 9, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random).int().to(device)

    def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(device, dtype)

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    slots, status = torch.randperm(2, generator=random).int().to(device), zeros(2)
    lens, seeds = ints(2, low=3, high=6), ints(2).long()
    temperature = torch.cat([zeros(1).float(), 0.5 + floats(1).abs()])
    candidates, frontier = sd.expand_root(ints(2, 2), -floats(2, 2).abs(), lens, 3)
    parents = torch.cat([zeros(2, 1) - 1, *(ints(2, 1, high=node) for node in range(1, 4))], 1)
    tree = sd.build_tree_from_parents(ints(2, 4, high=3), parents, lens)
    logits = floats(2, 4, 8)
    logits[..., :3] += 9  # the tokens of the tree
    accepted = sd.verify_tree(logits, tree, 3)
    pool = sd.make_page_pool(12, 2, 5, 4, like=status)
    pools = floats(2, 12, 4, 2, 64), floats(2, 12, 4, 2, 64)
    if op not in ("alloc_pages",):
        sd.alloc_pages(pool, lens, 4)
    ends = torch.tensor([0, 4, 8], dtype=torch.int32, device=device)
    table, both = pool.page_table, {"slots": slots, "status": status}
    if op == "free_pages":
        return [
            ((pool, lens), {}),
            ((), {"pool": pool, "prefix_lens": zeros(2), **both}),
            ((pool, lens), {"window": 1}),
        ]
    if op == "fork_pages":
        sd.free_pages(pool, zeros(2), slots=slots[:1])
        return [((pool, slots[1:], slots[:1], lens), {"status": status})]
    if op == "assign_pages":
        return [((pool, torch.tensor([0, -1], dtype=torch.int32, device=device), slots + 5), {})]
    new_kv = floats(2, 3, 2, 64), floats(2, 3, 2, 64)
    noise = {"seeds": seeds, "positions": ints(2), "temperature": temperature, "slots": slots}
    sampling = {"temperature": temperature, "top_k": ints(2), "top_p": temperature + 0.1, "seeds": seeds}
    mask = tree.mask
    state = sd.make_slot_state(2, 25, 1, like=status)._replace(seq_lens=lens, status=status)
    state = state._replace(stop_tokens=ints(2, 1), remaining=ints(2))
    edits = sd.make_logit_edits(2, 20, like=temperature)._replace(kinds=ints(2, low=1, high=8), counts=ints(2, 20))
    factors = {name: floats(2).abs() for name in ("presence", "frequency", "repetition")}
    edits = edits._replace(bias=floats(2, 20), **factors)
    paths = sd.PendingPaths(accepted.path.clone(), accepted.num_valid.clone(), ints(2, high=2))
    rows_mask = mask.flatten(0, 1)

    def recurrent(*decays: int) -> tuple[Any, ...]:
        """Return the state and the records of a layer: 2 key heads, 4 value heads, dk 8, dv 5; decays [4] or [4, 8]."""
        records = sd.RecurrentRecords(
            floats(2, 2, 4, 2, 8), floats(2, 2, 4, 4, 5), -floats(2, 2, 4, *decays).abs().cumsum(2)
        )
        return floats(2, 4, 5, 8), records

    def recurrence(decays: tuple[int, ...], beta: torch.Tensor | None) -> tuple[Any, ...]:
        rows = floats(8, 2, 8), floats(8, 2, 8), floats(8, 4, 5), -floats(8, *decays).abs(), beta
        return (*rows, *recurrent(*decays), paths, lens, ends)

    conv = floats(2, 3, 6), floats(2, 2, 4, 6)
    depths = (tree.positions - tree.positions[:, :1]).float()
    return {
        "select_topk": lambda: [((floats(3, 20), 4), {}), ((floats(3, 20), 4), {"id_map": ints(20)})],
        "sample_draft": lambda: [((floats(2, 20), 4), noise)],
        "expand_root": lambda: [((ints(2, 2), -floats(2, 2).abs(), lens, 3), {"slots": slots, "position_offset": 1})],
        "expand_tree": lambda: [((ints(2, 2, 2), -floats(2, 2, 2).abs(), 2, candidates, frontier, lens), {})],
        "expand_trellis": lambda: [
            ((ints(2, 3, 4), -floats(2, 3, 4).abs(), 6), {"id_map": ints(9)}),
            (
                (ints(2, 3, 4), -floats(2, 3, 4).abs(), 5),
                {"predecessors": floats(9, 8), "successors": floats(9, 8), "root_tokens": ints(2)},
            ),
            (
                (ints(2, 3, 4), -floats(2, 3, 4).abs(), 5),
                {"predecessors": floats(2, 3, 4, 8), "successors": floats(9, 8)},
            ),
        ],
        "update_calibration": lambda: [((sd.make_calibration(2, like=temperature), tree, -depths, accepted), {})],
        "draft_extend_inputs": lambda: [
            ((accepted.tokens, accepted.path, accepted.num_valid, lens, 4), options)
            for options in ({}, {"slots": slots, "position_offset": 1})
        ],
        "append_draft_backlog": lambda: [
            ((accepted.tokens, accepted.path, accepted.num_valid, ints(2), ints(2, 5)), options)
            for options in (
                {"slots": slots},
                {"features": floats(2, 4, 8), "backlog_features": floats(2, 5, 8)},
                {"features": floats(8, 8), "backlog_features": floats(2, 5, 8), "cu_seqlens_q": ends},
            )
        ],
        "build_tree": lambda: [
            ((candidates, lens, lens, 4), {}),
            ((candidates, lens, lens, 3), {"order": "given", **both}),
        ],
        "build_tree_from_parents": lambda: [((ints(2, 4), parents, lens), {}), ((ints(2, 4), parents, lens), both)],
        "build_tree_from_mask": lambda: [((ints(2, 4), mask, lens), {}), ((ints(2, 4), mask, lens), both)],
        "merge_trees": lambda: [((tree, floats(2, 4), tree, floats(2, 4), 5), {})],
        "allocate_nodes": lambda: [
            ((-floats(2, 4).abs().cumsum(1), 5), options) for options in ({}, {"budget_levels": ints(3)})
        ],
        "pack_trees": lambda: [((tree, floats(2, 4), sd.allocate_nodes(-floats(2, 4).abs().cumsum(1), 5), 6), {})],
        "add_rms_norm": lambda: [
            ((floats(3, 64), floats(64), 1e-5), {}),
            ((floats(3, 64), floats(64), 1e-5), {"residual": floats(3, 64)}),
            ((floats(6, 64), floats(64), 1e-5), {"residual": floats(3, 64), "topk_weights": floats(3, 2)}),
        ],
        "rms_norm_concat": lambda: [
            ((floats(9, 64), ints(3), floats(64), floats(4, 64), floats(64), 1e-5), options)
            for options in ({}, {"feature_rows": ints(3)})
        ],
        "gated_rms_norm": lambda: [
            ((floats(3, 2, 32), floats(3, 2, 32), floats(32), 1e-5), {}),
            ((floats(3, 2, 32), floats(3, 2, 32), floats(64), 1e-5), {"gates_first": True, "activation": "sigmoid"}),
        ],
        "silu_and_mul": lambda: [((floats(3, 64),), {})],
        "small_m_gemm": lambda: [
            ((floats(3, 64, dtype=torch.bfloat16), floats(48, 64, dtype=torch.bfloat16)), options)
            for options in ({}, {"gated": True}, {"bias": floats(48, dtype=torch.bfloat16)})
        ],
        "small_m_bmm": lambda: [
            ((floats(3, 2, 32, dtype=torch.bfloat16), weight), {})
            for weight in (
                floats(2, 32, 48, dtype=torch.bfloat16),
                floats(2, 48, 32, dtype=torch.bfloat16).mT,
            )
        ],
        "dequantize": lambda: [
            ((ints(3, 64, high=256).to(torch.uint8), floats(2, 3)), options) for options in ({}, {"dtype": "float32"})
        ],
        "moe_grouped_gemm": lambda: (
            [
                (
                    (
                        floats(3, 128, dtype=torch.bfloat16),
                        floats(4, 48, 128).to(torch.float8_e4m3fn),
                        torch.randperm(6, generator=random).to(device),
                        torch.cat([ints(3, high=7).sort().values, zeros(1) + 6]),
                    ),
                    {"weight_scales": floats(4, 1, 48)} | options,
                )
                for options in ({}, {"gated": True})
            ]
            + [
                (
                    (
                        floats(3, 64, dtype=torch.bfloat16),
                        floats(2, 32, 64, dtype=torch.bfloat16),
                        torch.randperm(9, generator=random).to(device),
                        torch.cat([ints(3, high=10).sort().values, zeros(1) + 9]),
                    ),
                    {"gated": True, "shared_weight": floats(64, 64, dtype=torch.bfloat16)},
                )
            ]
        ),
        "moe_route": lambda: [
            ((floats(5, 9), 3), options)
            for options in (
                {"renormalize": True},
                {"activation": "sigmoid", "bias": floats(9), "scale": 1.5},
                {"num_shared": 2, "shared_gate": floats(5, 1)},
            )
        ],
        "moe_combine": lambda: [((floats(6, 40), floats(2, 3)), {})],
        "quantize_fp8": lambda: [((floats(3, 200),), {}), ((floats(3, 200),), {"group_size": 128})],
        "rope_qkv_write_kv": lambda: [
            ((floats(2, 3, 8, 64), floats(30, 64), ints(2, 3), pools[0][0], pools[1][0], table, lens), {}),
            ((floats(2, 3, 8, 64), floats(30, 64), ints(2, 3), pools[0][0], pools[1][0], table, lens), both),
        ],
        "tree_attention": lambda: [
            ((floats(2, 3, 4, 64), pools[0][0], pools[1][0], table, lens), options)
            for options in (both, {"mask": tree.mask[:, :3].contiguous()})
        ],
        "write_latent": lambda: [
            ((floats(2, 3, 48), floats(32), floats(12, 4, 48), table, lens), options)
            for options in (
                {},
                {
                    "cos_sin": floats(30, 16),
                    "positions": ints(2, 3),
                    "q": floats(2, 3, 24),
                    "q_norm": floats(24),
                    "q_out": floats(2, 3, 24),
                },
            )
        ],
        "rope_heads": lambda: [
            ((floats(5, 4, 16), floats(30, 16), ints(5)), options) for options in ({}, {"interleaved": True})
        ],
        "mla_tree_attention": lambda: [
            ((floats(2, 3, 4, 48), floats(12, 4, 48), table, lens), {"latent_dim": 32, "scale": 0.2, **options})
            for options in (both, {"mask": tree.mask[:, :3].contiguous()}, {"indices": ints(2, 3, 5, high=4, low=-1)})
        ],
        "verify_tree": lambda: [
            ((floats(2, 4, 8), tree, 3), {}),
            ((floats(2, 4, 8),), {"tree": tree, "accept_width": 3, **sampling, **both}),
            ((floats(8, 8), tree, 3), {"cu_seqlens_q": ends}),
        ],
        "score_tokens": lambda: [((floats(2, 4, 8), accepted), {"top_n": 2})],
        "edit_logits": lambda: [
            ((floats(2, 4, 20), mask, ints(2, 4), edits), {"slots": slots, "vocab_mask": ints(2, 4, 1, high=1 << 20)}),
            ((floats(8, 20), mask.flatten(0, 1), ints(2, 4), edits), {"cu_seqlens_q": ends}),
        ],
        "mask_stops": lambda: [
            ((floats(2, 4, 20), ints(2, 4), ints(2, 1), lens), {"slots": slots}),
            ((floats(8, 20), ints(8), ints(2, 1), lens), {"cu_seqlens_q": ends}),
        ],
        "commit_tokens": lambda: [
            ((accepted, state), {}),
            ((accepted,), {"state": state, "slots": slots, "counts": ints(2, 20)}),
        ],
        "alloc_pages": lambda: [((pool, lens, 4), {}), ((pool, lens), {"reserve": 2, **both})],
        "write_kv": lambda: [((*new_kv, pools[0][0], pools[1][0], table, lens), {"num_valid": lens - 2, **both})],
        "move_kv": lambda: [((*pools, table, accepted.path, accepted.num_valid, lens), both)],
        "set_pending_paths": lambda: [((paths, accepted.path, accepted.num_valid), both)],
        "compute_gates": lambda: [
            ((floats(8, 4), floats(8, 4), -floats(4).abs(), floats(4)), {}),
            ((floats(8, 4, 8), floats(8, 4), -floats(4).abs(), floats(4, 8)), {}),
            ((floats(8, 4), None, -floats(4).abs(), floats(4)), {"dt_min": 0.1, "dt_max": 0.9}),
        ],
        "tree_recurrence": lambda: [
            (recurrence((4,), floats(8, 4).sigmoid()), {"mask": rows_mask, "scale": 0.4, "l2norm_eps": 1e-6, **both}),
            (recurrence((4, 8), floats(8, 4).sigmoid()), {"mask": rows_mask, "l2norm_eps": 1e-6}),
            (recurrence((4,), None), {"slots": slots}),
            (recurrence((4,), floats(8, 4).sigmoid()), {"mask": rows_mask, "delta_rule": False}),
        ],
        "commit_recurrence": lambda: [((*recurrent(4), paths), {}), ((*recurrent(4, 8), paths), both)],
        "tree_conv1d": lambda: [
            ((floats(8, 6), floats(6, 4), floats(6), *conv, paths, lens, ends), {"mask": rows_mask, **both}),
            ((floats(8, 6), floats(6, 4), None, *conv, paths, lens, ends), {"activation": "silu"}),
        ],
        "commit_conv1d": lambda: [((*conv, paths), both)],
        "copy_kv": lambda: [((*pools, table, slots[:1], slots[1:], lens, lens[:1] * 0 + 2), {"status": status})],
    }[op]()
