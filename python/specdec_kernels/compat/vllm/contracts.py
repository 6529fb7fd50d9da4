"""The parts of vLLM's sources that the plugin and the proposer rely on, for each tested version."""

from __future__ import annotations

from dataclasses import dataclass

from ..contracts import Contract, Lines, Names, Parameters, Part

__all__ = ["ATTENTION", "NGRAM_PROPOSER", "VERSIONS", "parts_of"]

# Tested versions.
VERSIONS = ("0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")

ATTENTION = "attention"
NGRAM_PROPOSER = "n-gram proposer"

BASE = "vllm.v1.attention.backend"
REGISTRY = "vllm.v1.attention.backends.registry"
TRITON = "vllm.v1.attention.backends.triton_attn"
LAYER = "vllm.model_executor.layers.attention.attention"
RUNNER = "vllm.v1.worker.gpu_model_runner"
PLATFORM = "vllm.platforms.cuda"
SELECTOR = "vllm.v1.attention.selector"

CONTRACTS: dict[str, tuple[Contract, ...]] = {
    ATTENTION: (
        Lines("vllm.plugins", "DEFAULT_PLUGINS_GROUP = 'vllm.general_plugins'"),
        Parameters(f"{REGISTRY}:register_backend", ("backend", "class_path"), more=True),
        # The name of a backend is that of its member.
        Names(f"{REGISTRY}:AttentionBackendEnum", ("CUSTOM", "FLASH_ATTN", "get_class", "get_path", "is_overridden")),
        Lines(LAYER, "AttentionBackendEnum[self.attn_backend.get_name()]"),
        # The choice of a layer's backend, without and with a backend that is asked for, as a path.
        Parameters(
            f"{PLATFORM}:CudaPlatformBase.get_attn_backend_cls",
            ("cls", "selected_backend", "attn_selector_config", "num_heads"),
        ),
        Lines(
            f"{PLATFORM}:CudaPlatformBase.get_attn_backend_cls",
            "backend_class.validate_configuration(device_capability=device_capability, "
            "**attn_selector_config._asdict())",
        ),
        Lines(f"{PLATFORM}:CudaPlatformBase.get_attn_backend_cls", "return _backend_cls_path(selected_backend_class)"),
        Parameters("vllm.platforms.interface:Platform.is_cuda", ("self",)),
        Lines(
            f"{SELECTOR}:_cached_get_attn_backend",
            "current_platform.get_attn_backend_cls(backend, attn_selector_config=attn_selector_config, "
            "num_heads=num_heads)",
        ),
        Lines(f"{SELECTOR}:_cached_get_attn_backend", "backend = resolve_obj_by_qualname(attention_cls)"),
        # The classes that ours extend, and the methods that ours override.
        Names(
            BASE,
            ("AttentionBackend", "AttentionCGSupport", "AttentionImpl", "AttentionMetadataBuilder", "MultipleOf"),
        ),
        Names(f"{BASE}:AttentionCGSupport", ("ALWAYS",)),
        Names(
            f"{BASE}:AttentionBackend",
            ("forward_includes_kv_cache_update", "supported_dtypes", "supported_kv_cache_dtypes"),
        ),
        Parameters(f"{BASE}:AttentionBackend.get_name", ()),
        Parameters(f"{BASE}:AttentionBackend.get_impl_cls", ()),
        Parameters(f"{BASE}:AttentionBackend.get_builder_cls", ()),
        Parameters(f"{BASE}:AttentionBackend.get_supported_head_sizes", ("cls",)),
        Parameters(f"{BASE}:AttentionBackend.supports_sliding_window", ("cls",)),
        Parameters(f"{BASE}:AttentionBackend.supports_compute_capability", ("cls", "capability")),
        Parameters(
            f"{BASE}:AttentionBackend.supports_combination",
            (
                *("cls", "head_size", "dtype", "kv_cache_dtype", "block_size", "use_mla"),
                *("has_sink", "use_sparse", "use_mm_prefix", "device_capability"),
            ),
        ),
        Parameters(
            f"{BASE}:AttentionMetadataBuilder.__init__",
            ("self", "kv_cache_spec", "layer_names", "vllm_config", "device"),
        ),
        Parameters(
            f"{BASE}:AttentionMetadataBuilder.build",
            ("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
        ),
        Parameters(f"{BASE}:AttentionMetadataBuilder.get_cudagraph_support", ("cls", "vllm_config", "kv_cache_spec")),
        Lines(
            LAYER,
            "impl_cls(num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, "
            "logits_soft_cap, attn_type, kv_sharing_target_layer_name, **extra_impl_args)",
        ),
        Parameters(
            f"{BASE}:AttentionImpl.forward",
            (
                *("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata"),
                *("output", "output_scale", "output_block_scale"),
            ),
        ),
        Lines(LAYER, "_k_scale_float = "),
        Lines(LAYER, "_v_scale_float = "),
        # Metadata of a pass, its dtypes, and its bounds in a capture.
        Names(
            f"{BASE}:CommonAttentionMetadata",
            (
                *("block_table_tensor", "causal", "max_seq_len", "num_actual_tokens", "num_reqs"),
                *("query_start_loc", "seq_lens", "slot_mapping"),
            ),
        ),
        Lines(RUNNER, "self.seq_lens = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=self.device)"),
        Lines(
            "vllm.v1.worker.gpu.input_batch",
            "self.seq_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)",
        ),
        Lines(RUNNER, "max_seq_len = self.max_model_len"),
        Lines(
            "vllm.v1.worker.gpu.model_states.default",
            "if for_capture:\n            max_seq_len = self.max_model_len",
        ),
        Lines("vllm.v1.attention.backends.utils", "PAD_SLOT_ID = -1"),
        Lines(RUNNER, "slot_mapping[num_tokens_unpadded:num_tokens_padded].fill_(-1)"),
        Lines("vllm.v1.worker.gpu.block_table", "PAD_ID=PAD_SLOT_ID"),
        Lines("vllm.v1.worker.gpu.model_runner", "query_start_loc_np[num_reqs + 1:] = num_tokens"),
        # Layout of a cache: keys and values side by side. Builder, slots and cache have the same block size.
        Lines(TRITON, "key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)"),
        Lines("vllm.v1.worker.utils", "copy_with_new_block_size(kernel_block_size)"),
        Names("vllm.config.scheduler:SchedulerConfig", ("max_num_batched_tokens", "max_num_seqs")),
        Names("vllm.config.model:ModelConfig", ("max_model_len",)),
        Lines("vllm.config.speculative", "attention_backend: AttentionBackendEnum | None = None"),
    ),
    NGRAM_PROPOSER: (
        Lines("vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer", "user_class(vllm_config)"),
        Lines(
            f"{RUNNER}:GPUModelRunner.propose_draft_token_ids",
            "propose(sampled_token_ids, self.input_batch.num_tokens_no_spec, self.input_batch.token_ids_cpu, "
            "slot_mappings=slot_mappings)",
        ),
        Names("vllm.config.speculative:SpeculativeConfig", ("num_speculative_tokens", "prompt_lookup_min")),
        Names("vllm.config.scheduler:SchedulerConfig", ("async_scheduling", "max_num_seqs")),
        Names("vllm.config.model:ModelConfig", ("max_model_len",)),
    ),
}


@dataclass(frozen=True)
class Change:
    """A contract that not all tested versions have.

    Attributes:
        part: whose it is.
        contract: what the part relies on.
        since: the first version that has it.
        before: the first version that has it no more; None: there is none.
    """

    part: str
    contract: Contract
    since: str = VERSIONS[0]
    before: str | None = None

    def applies(self, version: str) -> bool:
        ended = VERSIONS.index(self.before) if self.before else len(VERSIONS)
        return VERSIONS.index(self.since) <= VERSIONS.index(version) < ended


# The changes between the tested versions.
CHANGES = (
    # The layout of a cache, which vLLM then asked of each backend.
    Change(
        ATTENTION,
        Parameters(
            f"{BASE}:AttentionBackend.get_kv_cache_shape",
            ("num_blocks", "block_size", "num_kv_heads", "head_size", "cache_dtype_str"),
        ),
        before="0.29.0",
    ),
    Change(
        ATTENTION,
        Parameters(f"{BASE}:AttentionBackend.get_kv_cache_stride_order", ("include_num_layers_dimension",)),
        before="0.29.0",
    ),
    Change(
        ATTENTION,
        Lines(
            f"{TRITON}:TritonAttentionBackend.get_kv_cache_shape",
            "return (num_blocks, num_kv_heads, block_size, 2 * head_size)",
        ),
        before="0.29.0",
    ),
    Change(ATTENTION, Names("vllm.v1.attention.backends.utils", ("get_kv_cache_layout",)), before="0.29.0"),
    # Adaptive verification, which shortens chains on the device; draft steps in one graph.
    Change(
        ATTENTION,
        Parameters(f"{BASE}:AttentionBackend.supports_device_cpu_query_lens_mismatch", ("cls",)),
        since="0.28.0",
    ),
    Change(
        ATTENTION,
        Parameters(f"{BASE}:AttentionMetadataBuilder.update_draft_decode_metadata", ("self", "metadata")),
        since="0.28.0",
    ),
    Change(ATTENTION, Parameters(f"{BASE}:AttentionBackend.get_supported_kernel_block_sizes", ()), before="0.31.0"),
    Change(
        ATTENTION,
        Parameters(f"{BASE}:AttentionBackend.get_supported_kernel_block_sizes", ("kv_cache_spec",)),
        since="0.31.0",
    ),
    # A custom proposer turns asynchronous scheduling off.
    Change(
        NGRAM_PROPOSER,
        Lines(
            "vllm.config.vllm",
            "Async scheduling not supported with %s-based speculative decoding and will be disabled.",
        ),
        before="0.33.0",
    ),
    Change(
        NGRAM_PROPOSER,
        Lines("vllm.config.vllm", "v1_async_sched_incompat = f'{spec_config.method}-based speculative decoding'"),
        since="0.33.0",
    ),
)


def parts_of(version: str) -> list[Part]:
    """Return the parts of the plugin, with their contracts in a tested version."""
    changed = [change for change in CHANGES if change.applies(version)]
    return [
        Part(name, (*common, *(change.contract for change in changed if change.part == name)))
        for name, common in CONTRACTS.items()
    ]
