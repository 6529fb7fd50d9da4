"""SGLang's attention by `tree_attention`: prefill, decode, tree verification, draft decoding and draft-extend.

Nothing here imports SGLang: `compat.sglang_plugin` joins these classes with its base class and registers them. They
read SGLang's own pools and tables. A request's row of `req_to_token` names the place of each of its tokens, which is a
page table with pages of one row, whatever SGLang's page size.

What runs in a CUDA graph reads tables and lengths from buffers that are filled right before a replay, since SGLang may
give rows of `req_to_token` to other requests while the graph runs. The mask of a tree is packed within the graph,
from the buffer that SGLang's drafting writes it to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...ops import tree_attention
from ...plans import HEAD_DIMS

__all__ = ["BACKEND", "DraftStepAttention", "TreeAttention", "TreeAttentionSteps", "draft_backend"]

BACKEND = "specdec"  # its name in SGLang
WORD = 64
BITS = [1 << i if i < 63 else -(1 << 63) for i in range(WORD)]


@dataclass
class Rows:
    """The rows that a forward pass asks about, and what they see, for all layers of it."""

    table: Tensor  # [bs, places] int32
    prefix_lens: Tensor  # [bs] int32
    per_request: int | None = None  # query rows of each request; None: packed, by cu_seqlens
    cu_seqlens: Tensor | None = None  # [bs + 1] int32
    tail_len: int | None = None
    mask: Tensor | None = None  # [bs, per_request, words] int64


class TreeAttention:
    """An attention backend of SGLang (`--attention-backend specdec`).

    Args:
        model_runner: SGLang's; its pools, its tables and the shapes of its model are read.
        num_draft_tokens: nodes of a tree that is verified, where the engine drafts and this is the target's attention.

    Raises:
        ValueError: what tree_attention cannot do: latent attention, encoders, a pool per kind of layer, pools laid out
            in another way, of other floats or of other head dimensions.
    """

    needs_cpu_seq_lens = False  # lengths are read on the device

    def __init__(self, model_runner: Any, *, num_draft_tokens: int | None = None) -> None:
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token: Tensor = model_runner.req_to_token_pool.req_to_token
        self.max_context_len: int = model_runner.model_config.context_len
        self.num_draft_tokens = num_draft_tokens
        check_model(model_runner)
        self._rows: Rows
        self._tables: Tensor | None = None  # what graphs read, for the largest batch: [bs, places] int32,
        self._prefix_lens: Tensor | None = None  # [bs] int32,
        self._mask_bytes: Tensor | None = None  # [bs * nodes * nodes] bool
        self._bits = torch.tensor(BITS, device=self.req_to_token.device)

    # --- what SGLang calls before a pass ---

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        device = self.req_to_token.device
        self._tables = torch.zeros(max_bs, self.req_to_token.shape[1], dtype=torch.int32, device=device)
        self._prefix_lens = torch.zeros(max_bs, dtype=torch.int32, device=device)
        if self.num_draft_tokens:
            numbers = max_bs * self.num_draft_tokens**2
            self._mask_bytes = torch.zeros(numbers, dtype=torch.bool, device=device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Before a pass that is not replayed."""
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
        """Before a replay, or a capture: fills what the graph reads."""
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
                requests = spec_info.draft_token.numel() // per_request  # without those that fill the batch up
                seen = tree_part(given, forward_batch.seq_lens[:requests], per_request)
                self._mask_bytes[: seen.numel()].view(seen.shape).copy_(seen)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Within a capture."""
        if forward_batch.forward_mode.is_target_verify() and is_tree(forward_batch.spec_info):
            assert self._mask_bytes is not None
            bs, per_request = forward_batch.batch_size, self._rows.per_request
            assert per_request is not None
            seen = self._mask_bytes[: bs * per_request**2].view(bs, per_request, per_request)
            self._rows.mask = packed(seen, self._bits)

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Nothing: the mask is read when the graph runs; without one, before the first layer does."""

    def _mask_of(self, spec_info: Any, seq_lens: Tensor, bs: int, per_request: int) -> Tensor | None:
        given = spec_info.custom_mask
        if given is None or not is_tree(spec_info):
            return None
        if self._mask_bytes is not None and given.data_ptr() == self._mask_bytes.data_ptr():
            given = given[: bs * per_request**2]
        return packed(tree_part(given, seq_lens, per_request), self._bits)

    # --- what it calls in each layer ---

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
        """[rows, heads * D] of q [rows, heads * D], once k and v are written to the pool.

        Raises:
            ValueError: what `check_layer` refuses.
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
        small = k_pool.dtype == torch.float8_e4m3fn
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
            window=window + 1 if window is not None and window >= 0 else None,  # SGLang leaves a row itself out
            soft_cap=layer.logit_cap if layer.logit_cap > 0 else None,
            k_scale=(layer.k_scale_float or 1.0) if small else 1.0,
            v_scale=(layer.v_scale_float or 1.0) if small else 1.0,
            out=out.view(shape),
        )
        return out.view(-1, heads * dim)

    forward_decode = forward_extend


class DraftStepAttention(TreeAttention):
    """Attention of one step of drafting, whose rows all steps share."""

    def init_step(self, rows: Rows) -> None:
        self._rows = rows


class TreeAttentionSteps:
    """What SGLang calls a multi-step draft backend: attention of every step of drafting but the last.

    A branch b writes step j to place `seq_len + b * num_steps + j` of its request, and sees the prefix and its own
    places. So all branches of a request are the query rows of one call, which reads its prefix once.

    Args:
        model_runner: of the draft.
        topk: branches.
        num_steps: of drafting.
        step_class: of the steps' attention, made from model_runner.

    Raises:
        ValueError: several branches with pages of several tokens, whose places SGLang lays out in another way.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any, topk: int, num_steps: int, step_class: type = DraftStepAttention) -> None:
        page_size = model_runner.server_args.page_size or 1
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
        """Nothing: what a branch sees is known beforehand."""

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


def draft_backend(server_args: Any, phase: str) -> str | None:
    """The name of a draft's attention backend in a phase, as SGLang resolves it."""
    own, of_phase = server_args.speculative_draft_attention_backend, getattr(server_args, f"{phase}_attention_backend")
    name: str | None = own or of_phase or server_args.attention_backend
    return name


def check_model(model_runner: Any) -> None:
    """ValueError, by name, for a model or a pool that `tree_attention` cannot serve."""
    config, pool = model_runner.model_config, model_runner.token_to_kv_pool
    if getattr(model_runner, "use_mla_backend", False):
        raise ValueError("specdec: the model has latent attention (MLA), expected heads of keys and values")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError("specdec: the model has an encoder, expected a decoder alone")
    if hasattr(pool, "swa_kv_pool"):
        raise ValueError(
            "specdec: layers with windows have a pool of their own, expected one pool "
            "(sglang: --disable-hybrid-swa-memory)"
        )
    allocator = getattr(model_runner, "token_to_kv_pool_allocator", None)
    if hasattr(pool, "full_kv_pool") or getattr(allocator, "translate_kv_loc", None) is not None:
        raise ValueError("specdec: layers of several kinds share the KV pool, expected attention alone")
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


def check_layer(layer: Any, others: dict[str, Any]) -> None:
    """ValueError, by name, for what a layer asks beside what `tree_attention` does."""
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


def is_tree(spec_info: Any) -> bool:
    """Whether what is verified may be other than a chain; the n-gram corpus has -1 branches, as many as there are."""
    return getattr(spec_info, "tree_topk", 1) != 1


def is_uniform(mode: Any) -> bool:
    """Whether every request of a pass has as many query rows."""
    return bool(mode.is_decode_or_idle() or mode.is_target_verify() or mode.is_draft_extend_v2())


def span(mode: Any, spec_info: Any) -> tuple[int, int]:
    """Query rows of each request, and how many of them its sequence length counts already."""
    if mode.is_target_verify():
        return int(spec_info.draft_token_num), 0
    if mode.is_draft_extend_v2():
        return int(spec_info.num_tokens_per_req), int(spec_info.num_tokens_per_req)
    return 1, 1


def prefix(seq_lens: Tensor, before: int, out: Tensor | None = None) -> Tensor:
    """[bs] int32: lengths in front of a pass's own rows; 0 for requests that only fill a batch up."""
    if out is None:
        out = torch.empty(len(seq_lens), dtype=torch.int32, device=seq_lens.device)
    torch.sub(seq_lens, before, out=out)
    return out.clamp_(min=0) if before > 1 else out


def tree_part(mask: Tensor, seq_lens: Tensor, nodes: int) -> Tensor:
    """[bs, nodes, nodes]: what nodes see of one another.

    Args:
        mask: flat, bool or uint8. [bs * nodes * nodes], or rows of each request over its sequence and then its nodes,
            with whatever behind all of them.
        seq_lens: [bs] int64.
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
    """[bs, nodes, words] int64 of [bs, nodes, nodes]: bit j of word w says whether node 64 w + j is seen."""
    bs, nodes, columns = seen.shape
    words = -(-columns // WORD)
    if words == 1:
        return (seen.long() * bits[:columns]).sum(-1, keepdim=True)
    padded = pad(seen.long(), (0, words * WORD - columns))
    return (padded.view(bs, nodes, words, WORD) * bits).sum(-1)


def step_masks(topk: int, num_steps: int, device: torch.device) -> Tensor:
    """[num_steps - 1, 1, topk, words] int64: at each step a branch sees its own places up to that step's."""
    branch = torch.arange(topk)[:, None]
    place = torch.arange(topk * num_steps)[None, :]
    seen = torch.stack([(place // num_steps == branch) & (place % num_steps <= step) for step in range(num_steps - 1)])
    return packed(seen, torch.tensor(BITS))[:, None].to(device)
