"""An attention backend for vLLM on `tree_attention`: prefill, decode and chain verification, in any mix.

This module does not import vLLM: `compat.vllm.backend` combines these classes with vLLM's base classes, and
`compat.vllm.plugin` registers the result.

The rows of a request in a pass are a chain after its cached tokens, which `tree_attention` assumes without a mask. Row
offsets and prefix lengths are read on the device only, so that one CUDA graph serves every batch with its numbers of
rows and requests, and nothing waits for the host. Values that vLLM's buffers lack are computed from them once for each
pass, for all layers. A layer is two launches: one writes keys and values, one attends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ops import tree_attention, tree_attention_workspace, write_kv

__all__ = ["KV_DTYPES", "PagedAttention", "Rows", "RowsBuilder", "Workspace", "refusal"]

KV_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")  # vLLM's names


class Workspace:
    """Memory for partial results, which all layers share.

    A tensor that was handed out is never freed: CUDA graphs hold its address.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffers = [torch.empty(16, dtype=torch.uint8, device=device)]

    def get(self, size: int) -> Tensor:
        """Return a tensor of at least `size` bytes."""
        if self._buffers[-1].numel() < size:
            self._buffers.append(torch.empty(size, dtype=torch.uint8, device=self._buffers[0].device))
        return self._buffers[-1]


@dataclass
class Rows:
    """Query rows of a pass and their KV, shared by a builder's layers: vLLM's attention metadata.

    Its tensors are vLLM's buffers, and what `refresh` computes from them.
    """

    num_actual_tokens: int  # T
    page_size: int
    max_kv_len: int | None  # upper bound for every request; None: the model's limit
    query_start_loc: Tensor  # [B + 1] int32
    seq_lens: Tensor  # [B] int32, including the rows of this pass
    block_table: Tensor  # [B, blocks] int32
    slot_mapping: Tensor  # [T] int64: block * page_size + row; -1: not written
    q_lens: Tensor  # [B] int32
    prefix_lens: Tensor  # [B] int32
    write_pages: Tensor  # [T, 1] int32
    write_rows: Tensor  # [T] int32
    workspace: Workspace

    def refresh(self) -> None:
        """Compute the derived tensors in four small launches, which a CUDA graph may capture."""
        torch.sub(self.query_start_loc[1:], self.query_start_loc[:-1], out=self.q_lens)
        torch.sub(self.seq_lens, self.q_lens, out=self.prefix_lens)
        torch.div(self.slot_mapping, self.page_size, rounding_mode="floor", out=self.write_pages.view(-1))
        torch.remainder(self.slot_mapping, self.page_size, out=self.write_rows)


class RowsBuilder:
    """vLLM's metadata builder: makes the `Rows` of each pass, in buffers with fixed addresses.

    Args:
        kv_cache_spec: cache of the layers; `block_size`, `head_size` and, if present, `head_size_v` are read.
        layer_names: names of the layers.
        vllm_config: the engine's configuration.
        device: the model's device.

    Raises:
        ValueError: `tree_attention` cannot serve the engine, for a reason that vLLM does not ask the backend about.
    """

    supports_draft_decode_metadata_update = True  # since vLLM 0.28, this puts all draft steps in one graph

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        check_engine(kv_cache_spec, vllm_config)
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device
        self.workspace = Workspace(device)
        scheduler = vllm_config.scheduler_config
        self._requests = torch.empty(2, scheduler.max_num_seqs, dtype=torch.int32, device=device)
        self._tokens = torch.empty(2, scheduler.max_num_batched_tokens, dtype=torch.int32, device=device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Rows:
        """Return the rows of a pass.

        Args:
            common_prefix_len: 0, because cascade attention is not offered.
            common_attn_metadata: vLLM's; of its host values, only `num_reqs`, `num_actual_tokens` and `max_seq_len` (an
                upper bound) are read. In a capture, `max_seq_len` is the model's limit, so it bounds no later batch.
            fast_build: ignored.

        Raises:
            ValueError: attention is not causal.
        """
        common = common_attn_metadata
        if common.causal is not True:
            raise ValueError("specdec: attention is not causal, expected rows that see what is before them")
        batch, tokens = int(common.num_reqs), int(common.num_actual_tokens)
        q_lens, prefix_lens = rows_of(self._requests, batch)
        longest = max(int(common.max_seq_len), 1)
        write_pages, write_rows = rows_of(self._tokens, tokens)
        rows = Rows(
            num_actual_tokens=tokens,
            page_size=self.kv_cache_spec.block_size,
            max_kv_len=longest if longest < self.vllm_config.model_config.max_model_len else None,
            query_start_loc=common.query_start_loc[: batch + 1],
            seq_lens=common.seq_lens[:batch],
            block_table=common.block_table_tensor[:batch],
            slot_mapping=common.slot_mapping[:tokens],
            q_lens=q_lens,
            prefix_lens=prefix_lens,
            write_pages=write_pages.view(tokens, 1),
            write_rows=write_rows,
            workspace=self.workspace,
        )
        rows.refresh()
        return rows

    def update_draft_decode_metadata(self, metadata: Rows) -> None:
        """Refresh the metadata after vLLM has advanced lengths and slots in place by a draft step."""
        metadata.refresh()


class PagedAttention:
    """A layer's attention, with vLLM's interface.

    Args:
        num_heads: query heads.
        head_size: elements of a head.
        scale: factor of the scores.
        num_kv_heads: KV heads. None: num_heads.
        alibi_slopes: must be None.
        sliding_window: rows that a row attends to, itself included. None: all.
        kv_cache_dtype: vLLM's name; those with `fp8` are float8_e4m3fn.
        logits_soft_cap: soft cap of the scores; None or 0 means none.
        attn_type: must be `decoder`.
        kv_sharing_target_layer_name: layer whose cache is read; this layer then writes no KV.
        others: must be None.

    Raises:
        ValueError: the layer needs more than `tree_attention` offers.
    """

    supports_dcp = False
    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        given = [name for name, value in others.items() if value is not None]
        if alibi_slopes is not None:
            given.append("alibi_slopes")
        if given:
            raise ValueError(f"specdec: a layer has {', '.join(given)}, expected plain attention")
        if getattr(attn_type, "value", attn_type) != "decoder":
            raise ValueError("specdec: a layer attends to more than what came before, expected a decoder")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.soft_cap = logits_soft_cap or None
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._cache: Tensor | None = None  # the cache that _pools are views of
        self._pools: tuple[Tensor, Tensor]

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Rows | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write keys and values to the cache, and attention to `output`.

        Args:
            layer: its scales on the host are read if the cache is FP8.
            query: [rows, heads, D]; only the first `num_actual_tokens` rows count, here and below.
            key: [rows, kv_heads, D]; not written if None, or if the layer shares another layer's cache.
            value: like key.
            kv_cache: [blocks, kv_heads, block_size, 2 D], contiguous in the last dimension: keys, then values.
            attn_metadata: None while vLLM profiles memory.
            output: [rows, heads, D].
            output_scale: must be None: quantized output is not offered.
            output_block_scale: must be None.

        Returns:
            output.
        """
        rows = attn_metadata
        if rows is None:
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("specdec: output_scale is given, expected None")
        if kv_cache is not self._cache:
            self._pools, self._cache = self._pools_of(kv_cache, rows.page_size), kv_cache
        k_pool, v_pool = self._pools
        is_fp8 = k_pool.dtype == torch.float8_e4m3fn
        k_scale, v_scale = (layer._k_scale_float, layer._v_scale_float) if is_fp8 else (1.0, 1.0)
        tokens = rows.num_actual_tokens
        if key is not None and value is not None and self.kv_sharing_target_layer_name is None:
            # A slot names its block and row, so that each row is passed as a request with one page.
            write_kv(
                key[:tokens].unsqueeze(1),
                value[:tokens].unsqueeze(1),
                k_pool,
                v_pool,
                rows.write_pages,
                rows.write_rows,
                k_scale=k_scale,
                v_scale=v_scale,
            )
        q, out = query[:tokens], output[:tokens]
        starts = rows.query_start_loc
        size = tree_attention_workspace(q, k_pool, rows.block_table, cu_seqlens_q=starts, max_kv_len=rows.max_kv_len)
        tree_attention(
            q,
            k_pool,
            v_pool,
            rows.block_table,
            rows.prefix_lens,
            cu_seqlens_q=starts,
            scale=self.scale,
            window=self.sliding_window,
            soft_cap=self.soft_cap,
            k_scale=k_scale,
            v_scale=v_scale,
            max_kv_len=rows.max_kv_len,
            out=out,
            workspace=rows.workspace.get(size),
        )
        return output

    def _pools_of(self, kv_cache: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
        """Return views [blocks, block_size, kv_heads, D] of keys and of values."""
        want = [self.num_kv_heads, page_size, 2 * self.head_size]
        if list(kv_cache.shape[1:]) != want:
            raise ValueError(
                f"specdec: the KV cache has shape {list(kv_cache.shape)}, "
                f"expected [blocks, {', '.join(map(str, want))}], keys and values side by side"
            )
        if self.kv_cache_dtype.startswith("fp8"):
            kv_cache = kv_cache.view(torch.float8_e4m3fn)  # vLLM allocates bytes
        rows = kv_cache.transpose(1, 2)
        return rows[..., : self.head_size], rows[..., self.head_size :]


def refusal(dtype: torch.dtype, kv_cache_dtype: str | None, cuda_version: str | None) -> str | None:
    """Return why the backend cannot serve a combination that vLLM does not check itself; None if it can."""
    if cuda_version is None:
        return "this build of specdec_kernels has no CUDA kernels"
    name = str(dtype).removeprefix("torch.")
    if kv_cache_dtype in ("float16", "bfloat16") and kv_cache_dtype != name:
        return f"kv_cache_dtype {kv_cache_dtype} not supported for {name} queries"
    return None


def check_engine(kv_cache_spec: Any, vllm_config: Any) -> None:
    """Raise ValueError, naming the feature, if `tree_attention` cannot serve the engine."""
    key_dim, value_dim = kv_cache_spec.head_size, getattr(kv_cache_spec, "head_size_v", None)
    if value_dim is not None and value_dim != key_dim:
        raise ValueError(f"specdec: keys have dimension {key_dim} and values {value_dim}, expected one for both")
    for name in ("decode", "prefill"):
        size = getattr(vllm_config.parallel_config, f"{name}_context_parallel_size", 1)
        if size > 1:
            raise ValueError(f"specdec: {name}_context_parallel_size is {size}, expected 1")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ValueError(
            "specdec: calculate_kv_scales is True, expected False: graphs keep the scales that they were captured with"
        )
    if getattr(vllm_config.model_config, "rswa_window", None) is not None:
        raise ValueError("specdec: the model has a reference sliding window (R-SWA), expected plain windows")


def rows_of(buffer: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the first `count` elements of both rows of a buffer, or of new memory if it is too small."""
    if count > buffer.shape[1]:
        buffer = torch.empty(2, count, dtype=buffer.dtype, device=buffer.device)
    return buffer[0, :count], buffer[1, :count]
