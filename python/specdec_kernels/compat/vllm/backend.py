"""The attention backend class that vLLM loads by the path which `compat.vllm.plugin` registers. Imports vLLM.

vLLM asks a backend for its capabilities before it serves, and names what is missing. Capabilities that are not declared
here (latent and sparse attention, sinks, encoders, non-causal attention, per-head scales, batch invariance, context
parallelism) are refused by vLLM's defaults.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    MultipleOf,
)

from ... import cuda_version
from ...plans import HEAD_DIMS
from .attention import KV_DTYPES, PagedAttention, RowsBuilder, refusal

__all__ = ["SpecdecBackend", "SpecdecBuilder", "SpecdecImpl"]


class SpecdecImpl(PagedAttention, AttentionImpl):  # type: ignore[misc]
    """A layer's attention."""


class SpecdecBuilder(RowsBuilder, AttentionMetadataBuilder):  # type: ignore[misc]
    """The metadata builder."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS


class SpecdecBackend(AttentionBackend):  # type: ignore[misc]
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(KV_DTYPES)
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks the backend up by this name

    @staticmethod
    def get_impl_cls() -> type:
        return SpecdecImpl

    @staticmethod
    def get_builder_cls() -> type:
        return SpecdecBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return multiples of 16: the kernels accept any, but vLLM gives sliding-window layers the smallest listed."""
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_DIMS)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Return True: rows are read on the device only, so adaptive verification may shorten chains there."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        return refusal(dtype, kv_cache_dtype, cuda_version)

    # --- cache layout, asked by vLLM up to 0.28; the kernels serve both ---

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        if get_kv_cache_layout() == "HND":
            return (1, 2, 0, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)
        return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)
