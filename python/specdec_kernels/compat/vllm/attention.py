"""vLLM's attention by `tree_attention`: prefill, decoding and verification of chains, in any mix, over its own blocks.

Nothing here imports vLLM: `compat.vllm_backend` joins these classes with its base classes, and vLLM finds those by
`compat.vllm_plugin`.

The rows of a request in a pass are a chain behind what it has in the cache, which is what `tree_attention` sees without
a mask. Where rows begin and how much each request has in front of them is read on the device alone, so that one CUDA
graph serves every batch of its numbers of rows and requests, and nothing waits for the host. What vLLM's buffers do not
say is computed from them once a pass, for all layers. A layer is two launches: one writes keys and values, one attends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ops import tree_attention, tree_attention_workspace, write_kv

__all__ = ["KV_DTYPES", "PagedAttention", "Rows", "RowsBuilder", "Workspace", "refusal"]

KV_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")  # by vLLM's names


class Workspace:
    """Memory for partial results, which layers use one after the other.

    What was handed out stays: CUDA graphs hold its address.
    """

    def __init__(self, device: torch.device) -> None:
        self._held = [torch.empty(16, dtype=torch.uint8, device=device)]

    def of(self, size: int) -> Tensor:
        if self._held[-1].numel() < size:
            self._held.append(torch.empty(size, dtype=torch.uint8, device=self._held[0].device))
        return self._held[-1]


@dataclass
class Rows:
    """The rows that a pass asks about and what they see, for all layers of a builder: vLLM's attention metadata.

    vLLM's buffers, and what `refresh` computes from them.
    """

    num_actual_tokens: int  # T
    page_size: int
    max_kv_len: int | None  # no request has more; None: as many as may be
    query_start_loc: Tensor  # [B + 1] int32
    seq_lens: Tensor  # [B] int32, rows of this pass included
    block_table: Tensor  # [B, blocks] int32
    slot_mapping: Tensor  # [T] int64: block * page_size + row; -1 is written nowhere
    q_lens: Tensor  # [B] int32
    prefix_lens: Tensor  # [B] int32
    write_pages: Tensor  # [T, 1] int32
    write_rows: Tensor  # [T] int32
    workspace: Workspace

    def refresh(self) -> None:
        """Four small launches, which may be part of a CUDA graph."""
        torch.sub(self.query_start_loc[1:], self.query_start_loc[:-1], out=self.q_lens)
        torch.sub(self.seq_lens, self.q_lens, out=self.prefix_lens)
        torch.div(self.slot_mapping, self.page_size, rounding_mode="floor", out=self.write_pages.view(-1))
        torch.remainder(self.slot_mapping, self.page_size, out=self.write_rows)


class RowsBuilder:
    """What vLLM calls a metadata builder: makes the `Rows` of each pass, in buffers that stay where they are.

    Args:
        kv_cache_spec: of its layers' cache; `block_size`, `head_size` and, where it is there, `head_size_v` are read.
        layer_names: of its layers.
        vllm_config: of the engine.
        device: of the model.

    Raises:
        ValueError: an engine that `tree_attention` cannot serve, by name, beyond what vLLM asks the backend itself.
    """

    supports_draft_decode_metadata_update = True  # from vLLM 0.28 on all draft steps are one graph then

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
        """The rows of a pass.

        Args:
            common_prefix_len: 0, since cascades are never asked for.
            common_attn_metadata: vLLM's, of whose host values only `num_reqs`, `num_actual_tokens` and `max_seq_len`,
                which may be an upper bound, are read. A capture is told the longest sequence that there may be, which
                says nothing of those that come.
            fast_build: has no effect.

        Raises:
            ValueError: rows that see what comes behind them.
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
        """Lengths and slots have gone on by a draft step, in their places."""
        metadata.refresh()


class PagedAttention:
    """A layer's attention, as vLLM calls it.

    Args:
        num_heads, head_size, scale, num_kv_heads: of queries, and of keys and values; the factor of scores.
        alibi_slopes: None.
        sliding_window: rows that a row sees, itself among them; None means all.
        kv_cache_dtype: vLLM's name of one; those of `fp8` are float8_e4m3fn.
        logits_soft_cap: of scores; None or 0 means none.
        attn_type: `decoder`.
        kv_sharing_target_layer_name: of the layer whose cache is read, where this one writes none.
        others: None each.

    Raises:
        ValueError: what a layer asks beside what `tree_attention` does.
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
        self._cache: Tensor | None = None  # whose two pools are those
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
        """Writes keys and values to the cache, and attention to `output`.

        Args:
            layer: its scales on the host are read, where the cache has 8 bits.
            query, output: [rows, heads, D], of which the first `num_actual_tokens` count.
            key, value: [rows, kv_heads, D]; None, or in layers that share another one's cache: nothing is written.
            kv_cache: [blocks, kv_heads, block_size, 2 D], any strides but the last: keys, and values behind them.
            attn_metadata: None while vLLM measures memory.
            output_scale, output_block_scale: None, since rounding of the output is not offered.

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
        small = k_pool.dtype == torch.float8_e4m3fn
        k_scale, v_scale = (layer._k_scale_float, layer._v_scale_float) if small else (1.0, 1.0)
        tokens = rows.num_actual_tokens
        if key is not None and value is not None and self.kv_sharing_target_layer_name is None:
            # Slots are places of their own, so each row is a request of one page here.
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
            workspace=rows.workspace.of(size),
        )
        return output

    def _pools_of(self, kv_cache: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
        """[blocks, block_size, kv_heads, D] of keys and of values."""
        want = [self.num_kv_heads, page_size, 2 * self.head_size]
        if list(kv_cache.shape[1:]) != want:
            raise ValueError(
                f"specdec: the KV cache has shape {list(kv_cache.shape)}, "
                f"expected [blocks, {', '.join(map(str, want))}], keys and values side by side"
            )
        if self.kv_cache_dtype.startswith("fp8"):
            kv_cache = kv_cache.view(torch.float8_e4m3fn)  # vLLM has them as bytes
        rows = kv_cache.transpose(1, 2)
        return rows[..., : self.head_size], rows[..., self.head_size :]


def refusal(dtype: torch.dtype, kv_cache_dtype: str | None, cuda_version: str | None) -> str | None:
    """Why a backend cannot serve a combination, for what vLLM has no question of its own; None where it can."""
    if cuda_version is None:
        return "this build of specdec_kernels has no CUDA kernels"
    told = str(dtype).removeprefix("torch.")
    if kv_cache_dtype in ("float16", "bfloat16") and kv_cache_dtype != told:
        return f"kv_cache_dtype {kv_cache_dtype} not supported for {told} queries"
    return None


def check_engine(kv_cache_spec: Any, vllm_config: Any) -> None:
    """ValueError, by name, for an engine that `tree_attention` cannot serve."""
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
    """The first `count` numbers of both rows of a buffer; other memory for passes that no graph is as large as."""
    if count > buffer.shape[1]:
        buffer = torch.empty(2, count, dtype=buffer.dtype, device=buffer.device)
    return buffer[0, :count], buffer[1, :count]
