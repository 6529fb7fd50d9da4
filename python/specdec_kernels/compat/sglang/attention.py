"""An attention backend for SGLang on `tree_attention`: prefill, decode, tree verification, draft decode, draft-extend.

This module does not import SGLang: `compat.sglang.plugin` combines these classes with SGLang's base class and registers
them. They read SGLang's own KV pools and tables. A request's row of `req_to_token` holds the pool index of each of its
tokens: a page table with pages of one row, whatever SGLang's page size.

Passes in a CUDA graph read tables and lengths from buffers that are filled right before a replay, because SGLang may
give rows of `req_to_token` to other requests while the graph runs. The graph itself packs the tree mask, from the
buffer that SGLang's drafting writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...ops import tree_attention
from ...plans import HEAD_DIMS

__all__ = ["BACKEND", "DraftStepAttention", "TreeAttention", "TreeAttentionSteps"]

BACKEND = "specdec"  # its name in SGLang
WORD = 64
BITS = [1 << i if i < 63 else -(1 << 63) for i in range(WORD)]


@dataclass
class Rows:
    """Query rows of a forward pass and their KV, shared by all layers."""

    table: Tensor  # [bs, places] int32
    prefix_lens: Tensor  # [bs] int32
    per_request: int | None = None  # query rows of each request; None: ragged, by cu_seqlens
    cu_seqlens: Tensor | None = None  # [bs + 1] int32
    tail_len: int | None = None
    mask: Tensor | None = None  # [bs, per_request, words] int64


class TreeAttention:
    """An attention backend of SGLang (`--attention-backend specdec`).

    Args:
        model_runner: SGLang's; its pools, tables and model shapes are read.
        num_draft_tokens: nodes of a verified tree, if this is the target's attention and the engine drafts.

    In a model with recurrent layers, it serves those with attention: SGLang calls it through `HybridLinearAttnBackend`.

    Raises:
        ValueError: `tree_attention` cannot serve the model: latent attention, encoders, a pool for layers with windows,
            or a pool with another layout, dtype or head dimension.
    """

    needs_cpu_seq_lens = False  # lengths are read on the device
    serves_hybrids = False  # set by `compat.sglang.plugin` where SGLang is known to call it as expected

    def __init__(self, model_runner: Any, *, num_draft_tokens: int | None = None) -> None:
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.req_to_token: Tensor = model_runner.req_to_token_pool.req_to_token
        self.max_context_len: int = model_runner.model_config.context_len
        self.num_draft_tokens = num_draft_tokens
        check_model(model_runner, self.serves_hybrids)
        self._rows: Rows
        # Inputs of CUDA graphs, for the largest batch:
        self._tables: Tensor | None = None  # [bs, places] int32
        self._prefix_lens: Tensor | None = None  # [bs] int32
        self._mask_bytes: Tensor | None = None  # [bs * nodes * nodes] bool
        self._bits = torch.tensor(BITS, device=self.req_to_token.device)

    # --- called by SGLang before a pass ---

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        device = self.req_to_token.device
        self._tables = torch.zeros(max_bs, self.req_to_token.shape[1], dtype=torch.int32, device=device)
        self._prefix_lens = torch.zeros(max_bs, dtype=torch.int32, device=device)
        if self.num_draft_tokens:
            size = max_bs * self.num_draft_tokens**2
            self._mask_bytes = torch.zeros(size, dtype=torch.bool, device=device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Describe an eager pass."""
        bs = forward_batch.batch_size
        table = self.req_to_token.index_select(0, forward_batch.req_pool_indices[:bs])
        mode = forward_batch.forward_mode
        if not is_uniform(mode):
            cu_seqlens = pad(forward_batch.extend_seq_lens[:bs].cumsum(0), (1, 0)).int()
            self._rows = Rows(table, forward_batch.extend_prefix_lens[:bs].int(), cu_seqlens=cu_seqlens)
            return
        per_request, before = span(mode, forward_batch.spec_info)
        self._rows = Rows(table, prefix(forward_batch.seq_lens[:bs], before), per_request)
        if mode.is_target_verify():
            self._rows.mask = self._mask_of(forward_batch.spec_info, forward_batch.seq_lens[:bs], bs, per_request)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the inputs of the graph before a replay or a capture.

        Raises:
            RuntimeError: this is captured itself, with addresses that the next replay does not have. SGLang then
                prepares its replays without a graph.
        """
        if is_capturing():
            raise RuntimeError("specdec: replays cannot be prepared in a graph (SGLANG_ENABLE_METADATA_GLUE_GRAPH)")
        assert self._tables is not None and self._prefix_lens is not None
        bs, mode, spec_info = forward_batch.batch_size, forward_batch.forward_mode, forward_batch.spec_info
        if not is_uniform(mode):
            raise NotImplementedError(f"specdec: CUDA graphs are asked for {mode!r}, expected decoding or verification")
        per_request, before = span(mode, spec_info)
        table, prefix_lens = self._tables[:bs], self._prefix_lens[:bs]
        torch.index_select(self.req_to_token, 0, forward_batch.req_pool_indices[:bs], out=table)
        prefix(forward_batch.seq_lens[:bs], before, out=prefix_lens)
        if in_capture:
            self._rows = Rows(table, prefix_lens, per_request)
        elif mode.is_target_verify() and is_tree(spec_info):
            given = spec_info.custom_mask
            assert self._mask_bytes is not None
            if given is not None and given.data_ptr() != self._mask_bytes.data_ptr():
                requests = spec_info.draft_token.numel() // per_request  # without padding requests
                seen = tree_part(given, forward_batch.seq_lens[:requests], per_request)
                self._mask_bytes[: seen.numel()].view(seen.shape).copy_(seen)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Pack the tree mask as a part of the captured graph."""
        if forward_batch.forward_mode.is_target_verify() and is_tree(forward_batch.spec_info):
            assert self._mask_bytes is not None
            bs, per_request = forward_batch.batch_size, self._rows.per_request
            assert per_request is not None
            seen = self._mask_bytes[: bs * per_request**2].view(bs, per_request, per_request)
            self._rows.mask = packed(seen, self._bits)

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Do nothing: the mask is read when the graph runs, or before the first layer of an eager pass."""

    def _mask_of(self, spec_info: Any, seq_lens: Tensor, bs: int, per_request: int) -> Tensor | None:
        given = spec_info.custom_mask
        if given is None or not is_tree(spec_info):
            return None
        if self._mask_bytes is not None and given.data_ptr() == self._mask_bytes.data_ptr():
            given = given[: bs * per_request**2]
        return packed(tree_part(given, seq_lens, per_request), self._bits)

    # --- called by SGLang in each layer ---

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **others: Any,
    ) -> Tensor:
        """Write k and v to the pool, and return attention [rows, heads * D] for q [rows, heads * D].

        Raises:
            ValueError: `check_layer` refuses the layer.
        """
        check_layer(layer, others)
        rows = self._rows
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v, layer.k_scale, layer.v_scale)
        heads, dim = layer.tp_q_head_num, layer.qk_head_dim
        queries = q.reshape(-1, heads, dim)
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        k_pool = self.token_to_kv_pool.get_key_buffer(layer.layer_id).unsqueeze(1)
        v_pool = self.token_to_kv_pool.get_value_buffer(layer.layer_id).unsqueeze(1)
        is_fp8 = k_pool.dtype == torch.float8_e4m3fn
        window = layer.sliding_window_size
        shape: tuple[int, ...] = queries.shape
        if rows.per_request is not None:
            shape = (len(rows.table), rows.per_request, heads, dim)
        tree_attention(
            queries.view(shape),
            k_pool,
            v_pool,
            rows.table,
            rows.prefix_lens,
            cu_seqlens_q=rows.cu_seqlens,
            tail_len=rows.tail_len,
            mask=rows.mask,
            scale=layer.scaling,
            window=window + 1 if window is not None and window >= 0 else None,  # SGLang does not count the row itself
            soft_cap=layer.logit_cap if layer.logit_cap > 0 else None,
            k_scale=(layer.k_scale_float or 1.0) if is_fp8 else 1.0,
            v_scale=(layer.v_scale_float or 1.0) if is_fp8 else 1.0,
            out=out.view(shape),
        )
        return out.view(-1, heads * dim)

    forward_decode = forward_extend


class DraftStepAttention(TreeAttention):
    """Attention of one draft step. `TreeAttentionSteps` sets its rows."""

    def init_step(self, rows: Rows) -> None:
        self._rows = rows


class TreeAttentionSteps:
    """SGLang's multi-step draft backend: attention of every draft step but the last.

    Branch b writes step j to position `seq_len + b * num_steps + j` of its request, and attends to the prefix and its
    own positions. All branches of a request are query rows of one call, which reads the prefix once.

    Args:
        model_runner: the draft's.
        topk: branches.
        num_steps: draft steps.
        step_class: attention class of a step, constructed with model_runner.

    Raises:
        ValueError: topk and the page size are both above 1: SGLang then lays branches out differently.
    """

    needs_cpu_seq_lens = False
    kv_index_translator = None  # `check_model` refuses pools with virtual indices

    def __init__(self, model_runner: Any, topk: int, num_steps: int, step_class: type = DraftStepAttention) -> None:
        page_size = getattr(model_runner.token_to_kv_pool, "page_size", 1)
        if topk > 1 and page_size > 1:
            raise ValueError(
                f"specdec: speculative_eagle_topk is {topk} with page_size {page_size}, expected page_size 1"
            )
        self.topk, self.num_steps = topk, num_steps
        self.attn_backends = [step_class(model_runner) for _ in range(num_steps - 1)]
        self._first: TreeAttention = self.attn_backends[0]
        self._masks = step_masks(topk, num_steps, self._first.req_to_token.device)  # [steps, 1, topk, words]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._first.init_cuda_graph_state(max_bs, max_num_tokens)
        self._masks = self._masks[:, :1].expand(-1, max_bs, -1, -1).contiguous()

    def init_forward_metadata(self, forward_batch: Any) -> None:
        bs = forward_batch.batch_size
        table = self._first.req_to_token.index_select(0, forward_batch.req_pool_indices[:bs])
        self._share(table, prefix(forward_batch.seq_lens[:bs], 0))

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        bs = forward_batch.batch_size
        tables, prefix_lens = self._first._tables, self._first._prefix_lens
        assert tables is not None and prefix_lens is not None
        torch.index_select(self._first.req_to_token, 0, forward_batch.req_pool_indices[:bs], out=tables[:bs])
        prefix(forward_batch.seq_lens[:bs], 0, out=prefix_lens[:bs])
        if in_capture:
            self._share(tables[:bs], prefix_lens[:bs])

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Do nothing: the masks of branches are constant."""

    def _share(self, table: Tensor, prefix_lens: Tensor) -> None:
        for step, backend in enumerate(self.attn_backends):
            if self.topk == 1:
                rows = Rows(table, prefix_lens, 1, tail_len=step + 1)
            else:
                mask = self._masks[step, : len(table)]
                if len(mask) < len(table):  # more requests than any graph has
                    mask = self._masks[step, :1].expand(len(table), -1, -1).contiguous()
                rows = Rows(table, prefix_lens, self.topk, tail_len=self.topk * self.num_steps, mask=mask)
            backend.init_step(rows)


def check_model(model_runner: Any, serves_hybrids: bool) -> None:
    """Raise ValueError, naming the feature, if `tree_attention` cannot serve the model or its pool."""
    config, pool = model_runner.model_config, model_runner.token_to_kv_pool
    if getattr(model_runner, "use_mla_backend", False):
        raise ValueError(
            "specdec: the model has latent attention (MLA), expected heads of keys and values "
            "(sglang: choose another --attention-backend)"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError("specdec: the model has an encoder, expected a decoder alone")
    if hasattr(pool, "swa_kv_pool"):
        raise ValueError(
            "specdec: layers with windows have a pool of their own, expected one pool "
            "(sglang: --disable-hybrid-swa-memory)"
        )
    allocator = getattr(model_runner, "token_to_kv_pool_allocator", None)
    is_known = not hasattr(pool, "full_kv_pool") or (serves_hybrids and is_plain_hybrid(pool))
    if not is_known or getattr(allocator, "translate_kv_loc", None) is not None:
        raise ValueError(
            "specdec: layers of several kinds share the KV pool, expected attention alone "
            "(sglang: choose another --attention-backend)"
        )
    pool = getattr(pool, "full_kv_pool", pool)  # of the layers with attention, numbered from 0
    if getattr(getattr(model_runner, "kv_index_translator", None), "is_translating", False):
        raise ValueError(
            "specdec: the KV pool has virtual indices (--enable-unified-memory), expected those of its rows"
        )
    scales = ("k_scale_buffer", "native_k_scale_buffer")
    if getattr(pool, "is_quantized_kv_cache", False) or any(getattr(pool, name, None) is not None for name in scales):
        raise ValueError("specdec: the KV pool has scales for its rows, expected at most one for each layer")
    if getattr(config, "attention_chunk_size", None):
        raise ValueError(
            f"specdec: layers attend within chunks of {config.attention_chunk_size} tokens, expected windows"
        )
    if getattr(getattr(config, "hf_config", None), "dual_chunk_attention_config", None):
        raise ValueError("specdec: the model has dual chunk attention, expected plain attention")
    key = pool.get_key_buffer(getattr(pool, "start_layer", 0) or 0)
    value = pool.get_value_buffer(getattr(pool, "start_layer", 0) or 0)
    if key.ndim != 3:
        raise ValueError(f"specdec: the KV pool has shape {list(key.shape)}, expected [tokens, heads, dimension]")
    if key.shape[-1] not in HEAD_DIMS or value.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"specdec: keys have dimension {key.shape[-1]} and values {value.shape[-1]}, "
            f"expected one of {HEAD_DIMS} for both"
        )
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn)
    if key.dtype not in floats:
        raise ValueError(
            f"specdec: the KV pool holds {str(key.dtype).removeprefix('torch.')}, "
            "expected float16, bfloat16, float32 or float8_e4m3fn"
        )


def is_plain_hybrid(pool: Any) -> bool:
    """Return whether a pool has plain rows for layers with attention, and elsewhere the states of recurrent layers."""
    return hasattr(pool, "full_attention_layer_id_mapping") and type(pool.full_kv_pool).__name__ == "MHATokenToKVPool"


def check_layer(layer: Any, others: dict[str, Any]) -> None:
    """Raise ValueError, naming the feature, if a layer needs more than `tree_attention` offers."""
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise ValueError(f"specdec: layer {layer.layer_id} has {', '.join(given)}, expected plain attention")
    if layer.is_cross_attention or getattr(layer.attn_type, "value", layer.attn_type) != "decoder":
        raise ValueError(f"specdec: layer {layer.layer_id} attends to more than what came before, expected a decoder")
    if layer.logit_cap > 0 and layer.logit_capping_method != "tanh":
        raise ValueError(
            f"specdec: layer {layer.layer_id} caps scores by {layer.logit_capping_method!r}, expected 'tanh'"
        )
    if getattr(layer, "xai_temperature_len", -1) > 0:
        raise ValueError(f"specdec: layer {layer.layer_id} has a temperature by length, expected none")


def is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def is_tree(spec_info: Any) -> bool:
    """Return whether a verified draft may branch; SGLang's n-gram corpus has tree_topk -1 (any number of branches)."""
    return getattr(spec_info, "tree_topk", 1) != 1


def is_uniform(mode: Any) -> bool:
    """Return whether every request of a pass has the same number of query rows."""
    return bool(mode.is_decode_or_idle() or mode.is_target_verify() or mode.is_draft_extend_v2())


def span(mode: Any, spec_info: Any) -> tuple[int, int]:
    """Return the query rows of each request, and how many of them `seq_lens` already counts."""
    if mode.is_target_verify():
        return int(spec_info.draft_token_num), 0
    if mode.is_draft_extend_v2():
        return int(spec_info.num_tokens_per_req), int(spec_info.num_tokens_per_req)
    return 1, 1


def prefix(seq_lens: Tensor, before: int, out: Tensor | None = None) -> Tensor:
    """Return [bs] int32 lengths before the pass's own rows; 0 for padding requests."""
    if out is None:
        out = torch.empty(len(seq_lens), dtype=torch.int32, device=seq_lens.device)
    torch.sub(seq_lens, before, out=out)
    return out.clamp_(min=0) if before > 1 else out


def tree_part(mask: Tensor, seq_lens: Tensor, nodes: int) -> Tensor:
    """Return which of a tree's nodes attend to which: [bs, nodes, nodes], for `seq_lens` [bs] int64.

    `mask` is flat, bool or uint8: either [bs * nodes * nodes], or for each request `nodes` rows of seq_len + nodes
    columns, followed by unused entries.
    """
    bs, device = len(seq_lens), mask.device
    if mask.numel() == bs * nodes * nodes:
        return mask.view(bs, nodes, nodes)
    lens = seq_lens.long()
    node = torch.arange(nodes, device=device)
    first = nodes * (lens.cumsum(0) - lens) + nodes * nodes * torch.arange(bs, device=device)
    row = first[:, None] + node * (lens + nodes)[:, None] + lens[:, None]
    return mask.view(-1)[row[:, :, None] + node]


def packed(seen: Tensor, bits: Tensor) -> Tensor:
    """Pack [bs, nodes, nodes] into [bs, nodes, words] int64: bit j of word w is set if node 64 w + j is visible."""
    bs, nodes, columns = seen.shape
    words = -(-columns // WORD)
    if words == 1:
        return (seen.long() * bits[:columns]).sum(-1, keepdim=True)
    padded = pad(seen.long(), (0, words * WORD - columns))
    return (padded.view(bs, nodes, words, WORD) * bits).sum(-1)


def step_masks(topk: int, num_steps: int, device: torch.device) -> Tensor:
    """Return [num_steps - 1, 1, topk, words] int64: at each step a branch sees its own positions up to that step."""
    branch = torch.arange(topk)[:, None]
    place = torch.arange(topk * num_steps)[None, :]
    seen = torch.stack([(place // num_steps == branch) & (place % num_steps <= step) for step in range(num_steps - 1)])
    return packed(seen, torch.tensor(BITS))[:, None].to(device)
