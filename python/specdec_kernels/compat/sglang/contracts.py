"""The parts of SGLang's source that the plugin relies on, by version, and the differences between versions.

`packaging/read_contracts.py` records what the contracts read in a release; `tests/compat/contracts` has the records.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..contracts import Contract, Exactly, Lines, Names, Parameters, Part, Same
from ..version_gate import nearest_tested

__all__ = ["CHANGES", "VERSIONS", "Host", "host_of", "parts_of"]

VERSIONS = ("0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")


@dataclass(frozen=True)
class Host:
    """The differences between versions.

    Attributes:
        tree_kernels: the module of `build_tree_kernel_efficient` and `verify_tree_greedy`.
        tree_calls: where they are called.
        sampling_kernel: the module of `tree_speculative_sampling_target_only`.
        sampling_user: the module that imports it.
        mlp_sync_takes_args: whether `require_mlp_sync` has the parameter `server_args`.
        moves_within_window: whether accepted rows go to the first rows of their tree, where `req_to_token` may already
            belong to another request; otherwise to those that it names.
        head_settings: attributes of the logits processor that ask for more than one GEMM, if they are true.
        width_parameters: those of `resolve_num_tokens_per_req`.
        sample_parameters: those of `eagle_sample`.
        extend_parameters: those of `_draft_extend_for_decode`.
        has_draft_wrapper: whether `attn_backend_wrapper_for_draft_decode` exists.
        has_sparse_drafts: whether the factory of draft attention has a `qsa_profile`.
        translates_kv: whether runners have a `kv_index_translator`.
        declares_arguments: whether arguments are resolved by functions that declare what they decide, instead of by
            methods that assign it.
        argument_steps: where these are called.
        attention_fields: the class of arguments of attention backends.
        speculation_fields: that of arguments of speculation.
    """

    tree_kernels: str = "sgl_kernel"
    tree_calls: tuple[str, str] = (
        "sglang.srt.speculative.eagle_utils:build_tree_kernel_efficient",
        "sglang.srt.speculative.eagle_utils:verify_tree_greedy_func",
    )
    sampling_kernel: str = "sgl_kernel"
    sampling_user: str = "sglang.srt.speculative.eagle_utils"
    mlp_sync_takes_args: bool = True
    moves_within_window: bool = False
    head_settings: tuple[str, ...] = (
        "do_tensor_parallel_all_gather",
        "final_logit_softcapping",
        "use_fp32_lm_head",
    )
    width_parameters: tuple[str, ...] = (
        "phase",
        "server_args",
        "spec_algorithm",
        "is_draft_worker",
        "num_draft_tokens",
    )
    sample_parameters: tuple[str, ...] = ("verify_input", "batch", "logits_output", "grammar_mask")
    extend_parameters: tuple[str, ...] = ("self", "batch", "batch_result")
    has_draft_wrapper: bool = False
    has_sparse_drafts: bool = False
    translates_kv: bool = False
    declares_arguments: bool = False
    argument_steps: str = "sglang.srt.server_args:ServerArgs.__post_init__"
    attention_fields: str = "sglang.srt.server_args:ServerArgs"
    speculation_fields: str = "sglang.srt.server_args:ServerArgs"

    @property
    def model_step(self) -> str:
        """Return the first step of arguments' resolution that reads the model's configuration."""
        if self.declares_arguments:
            return "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments"
        return "sglang.srt.server_args.ServerArgs._handle_model_specific_adjustments"


# The changes of each version. The first has the defaults.
CHANGES: dict[str, dict[str, Any]] = {
    "0.5.18": {
        "width_parameters": ("phase", "spec_algorithm", "is_draft_worker", "num_draft_tokens"),
        "argument_steps": "sglang.srt.server_args:ServerArgs._run_resolution_pipeline",
    },
    "0.5.19": {
        "mlp_sync_takes_args": False,
        "has_draft_wrapper": True,
        "translates_kv": True,
        "declares_arguments": True,
        "argument_steps": "sglang.srt.arg_groups.pipeline:run_resolution_pipeline",
    },
    "0.5.20": {
        "sample_parameters": ("verify_input", "batch", "logits_output", "grammar_mask", "uno_target_max_top_k"),
        "has_sparse_drafts": True,
        "attention_fields": "sglang.srt.arg_groups.fields.exec_:ExecKernel",
        "speculation_fields": "sglang.srt.arg_groups.fields.spec:Spec",
    },
    "0.5.21": {
        "tree_kernels": "sglang.kernels.ops.speculative.tree",
        "sampling_kernel": "sglang.kernels.ops.speculative.sampling",
    },
    "0.5.22": {
        "sample_parameters": (
            *("verify_input", "batch", "logits_output", "grammar_mask", "uno_target_max_top_k"),
            *("watermark_state", "watermark_full_mask"),
        ),
        "extend_parameters": ("self", "batch", "batch_result", "kv_loc_plan"),
    },
    "0.5.23": {
        "tree_calls": (
            "sglang.kernels.ops.speculative.spec_tree:build_tree_kernel_efficient_func",
            "sglang.kernels.ops.speculative.spec_tree:verify_tree_greedy_func",
        ),
        "sampling_user": "sglang.kernels.ops.speculative.verify_sampling",
        "moves_within_window": True,
        "head_settings": (
            *("do_tensor_parallel_all_gather", "final_logit_softcapping", "use_fp32_lm_head"),
            "use_fp32_lm_head_output",
        ),
    },
}

# Functions that a part wraps, repeats or stays out of: their digests, where a version changed them.
DIGESTS: dict[str, dict[str, int]] = {
    "layers.attention.hybrid_linear_attn_backend:HybridLinearAttnBackend.__init__": {
        "0.5.17": 2522446463, "0.5.18": 874857707, "0.5.19": 2881238394, "0.5.22": 3424801483,
    },
    "layers.attention.hybrid_linear_attn_backend:HybridLinearAttnBackend.forward_decode": {"0.5.17": 2097016467},
    "layers.attention.hybrid_linear_attn_backend:HybridLinearAttnBackend.forward_extend": {"0.5.17": 1102413360},
    "layers.attention.hybrid_linear_attn_backend:HybridLinearAttnBackend.init_cuda_graph_state": {
        "0.5.17": 1288688517,
    },
    "layers.attention.hybrid_linear_attn_backend:HybridLinearAttnBackend.init_forward_metadata": {"0.5.17": 749544051},
    "layers.attention.hybrid_linear_attn_backend:HybridLinearAttnBackend.init_forward_metadata_in_graph": {
        "0.5.17": 1074320074,
    },
    "layers.attention.hybrid_linear_attn_backend:HybridLinearAttnBackend.init_forward_metadata_out_graph": {
        "0.5.17": 3701548067,
    },
    "layers.attention.hybrid_linear_attn_backend:HybridLinearAttnBackend.update_verify_buffers_to_fill_after_draft": {
        "0.5.17": 3001298011,
    },
    "layers.attention.hybrid_linear_attn_backend:HybridLinearAttnBackend.verify_mask": {"0.5.17": 2297818737},
    "layers.logits_processor:LogitsProcessor._get_logits": {
        "0.5.17": 3814478522, "0.5.18": 964930804, "0.5.19": 1420920831, "0.5.21": 86872876, "0.5.22": 2212466200,
        "0.5.23": 4166650024,
    },
    "layers.logits_processor:LogitsProcessor._compute_lm_head": {
        "0.5.17": 1700630307, "0.5.18": 511993838, "0.5.23": 231846192,
    },
    "layers.logits_processor:LogitsProcessor._copy_logits_to_buffer": {
        "0.5.17": 1083765609, "0.5.22": 1663572008, "0.5.23": 1891026721,
    },
    "speculative.draft_utils:DraftBackendFactory._create_backend": {
        "0.5.17": 2062192900, "0.5.18": 3277004973, "0.5.19": 3872862977,
    },
    "speculative.eagle_utils:eagle_sample": {
        "0.5.17": 1103941683, "0.5.18": 2825725435, "0.5.19": 2431524287, "0.5.20": 3667627686, "0.5.21": 3404841556,
        "0.5.22": 415780122, "0.5.23": 2135412123,
    },
    "speculative.eagle_worker_common:prepare_for_draft_extend": {"0.5.17": 3622559163, "0.5.22": 569643901},
    "speculative.eagle_worker_v2:EagleDraftWorker._draft_extend_for_decode": {
        "0.5.17": 2225472489, "0.5.20": 1604245831, "0.5.21": 1762018703, "0.5.22": 1870702443, "0.5.23": 3693067922,
    },
    "speculative.spec_utils:move_accept_tokens_to_target_kvcache": {"0.5.17": 4064519944, "0.5.23": 31075666},
    "speculative.spec_utils:renorm_draft_probs": {"0.5.17": 361162416, "0.5.22": 1330143991},
    "speculative.spec_utils:resolve_num_tokens_per_req": {"0.5.17": 1907426675, "0.5.18": 1550656257},
    "mem_cache.memory_pool:HybridLinearKVPool.get_key_buffer": {"0.5.17": 65145882},
    "mem_cache.memory_pool:HybridLinearKVPool.get_value_buffer": {"0.5.17": 2928846601},
    "mem_cache.memory_pool:HybridLinearKVPool.set_kv_buffer": {"0.5.17": 3930958403, "0.5.22": 1323544026},
    "utils.common:fast_topk": {"0.5.17": 1188590315},
}  # fmt: skip


HOOKS: tuple[Contract, ...] = (
    Parameters(
        "sglang.srt.plugins.hook_registry:HookRegistry.register", ("cls", "target", "hook", "hook_type", "source")
    ),
    Exactly("sglang.srt.plugins.hook_registry:HookType", "fields", ("BEFORE", "AFTER", "AROUND", "REPLACE")),
    Names("sglang.srt.plugins.hook_registry", ("HookRegistry", "HookType")),
    Lines("sglang.srt.plugins.hook_registry:_wrap_fn", "return hook(original_fn, *args, **kwargs)"),
    Lines("sglang.srt.plugins.hook_registry:_propagate_patch", "if attr_value is original:"),  # also where imported
)


def host_of(version: str) -> Host:
    """Return what holds for a tested version."""
    host = Host()
    for known in VERSIONS[: VERSIONS.index(version) + 1]:
        host = replace(host, **CHANGES.get(known, {}))
    return host


def parts_of(version: str) -> tuple[Part, ...]:
    """Return the plugin's parts for a tested version, each after those that it needs."""
    host = host_of(version)

    def same(place: str) -> Same:
        digests = DIGESTS[place]
        known = nearest_tested(version, tuple(digests))
        assert known is not None
        return Same(f"sglang.srt.{place}", digests[known])

    hybrid_pool = "sglang.srt.mem_cache.memory_pool:HybridLinearKVPool"
    hybrid_places = ("layers.attention.hybrid_linear_attn_backend:", "mem_cache.memory_pool:HybridLinearKVPool")
    hybrid_models = Part(
        "hybrid models",
        (
            # The functions that it calls of the attention that it holds, and its numbers of layers.
            *(same(place) for place in DIGESTS if place.startswith(hybrid_places)),
            Names(hybrid_pool, ("full_kv_pool", "full_attention_layer_id_mapping")),
            Lines(f"{hybrid_pool}.__init__", "MHATokenToKVPool"),
            Lines(
                "sglang.srt.layers.attention.attention_registry:attn_backend_wrapper",
                "return hybrid_backend_cls(full_attn_backend, linear_attn_backend, full_attn_layers)",
            ),
            Names("sglang.srt.model_executor.model_runner:ModelRunner", ("req_to_token_pool",)),
        ),
        needs=("attention",),
    )
    factory = "sglang.srt.speculative.draft_utils:DraftBackendFactory"
    worker = "sglang.srt.speculative.eagle_worker_v2"
    extend_runner = "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner:EAGLEDraftExtendCudaGraphRunner"
    draft_attention = Part(
        "draft attention",
        (
            *HOOKS,
            Parameters(f"{factory}.create_decode_backend", ("self",)),
            Parameters(f"{factory}.create_draft_extend_backend", ("self",)),
            same("speculative.draft_utils:DraftBackendFactory._create_backend"),
            Names(
                factory,
                (
                    *("draft_model_runner", "topk", "speculative_num_steps", "draft_attn_backend"),
                    *(("qsa_profile",) if host.has_sparse_drafts else ()),
                ),
            ),
            Lines(f"{factory}.create_decode_backend", "if self.speculative_num_steps <= 1:\n        return None"),
            Lines(f"{factory}.create_draft_extend_backend", "get_spec().speculative_attention_mode == 'decode'"),
            Names(
                "sglang.srt.layers.attention.attention_registry",
                (
                    "attn_backend_wrapper_for_draft_extend",
                    *(("attn_backend_wrapper_for_draft_decode",) if host.has_draft_wrapper else ()),
                ),
            ),
            Names("sglang.srt.layers.attention.triton_backend", ("TritonAttnBackend",)),
            Exactly(
                "sglang.srt.layers.attention.triton_backend:TritonMultiStepDraftBackend",
                "methods",
                (
                    *("common_template", "init_forward_metadata", "init_cuda_graph_state"),
                    *("init_forward_metadata_out_graph", "init_forward_metadata_in_graph"),
                ),
            ),
            Lines(
                f"{worker}:EagleDraftWorker._capture_cuda_graphs", "graph_supported_backend_types = [TritonAttnBackend"
            ),
            Lines(f"{worker}:EagleDraftWorker.draft_forward", "attn_backend=self.draft_attn_backend.attn_backends[i]"),
            Lines(
                "sglang.srt.speculative.eagle_draft_cuda_graph_runner:EAGLEDraftCudaGraphRunner.__init__",
                "self.draft_attn_backend.attn_backends[0].get_cuda_graph_seq_len_fill_value()",
            ),
            # Branch b writes step j to position seq_len + b * num_steps + j.
            Lines(
                "sglang.kernels.ops.speculative.cache_locs",
                "seq_len + topk_id * num_steps + tl.arange(0, iter_upper)",
            ),
        ),
        needs=("attention",),
    )
    accepted_rows = Part(
        "accepted rows",
        (
            *HOOKS,
            Parameters("sglang.srt.speculative.spec_utils:resolve_num_tokens_per_req", host.width_parameters),
            same("speculative.spec_utils:resolve_num_tokens_per_req"),
            Parameters(f"{worker}:EagleDraftWorker._draft_extend_for_decode", host.extend_parameters),
            same("speculative.eagle_worker_v2:EagleDraftWorker._draft_extend_for_decode"),
            same("speculative.eagle_worker_common:prepare_for_draft_extend"),
            Lines(
                f"{extend_runner}.__init__",
                "self.captured_req_width = resolve_num_tokens_per_req(",
            ),
            Lines(
                f"{extend_runner}.can_run_graph",
                "spec_info.num_tokens_per_req != self.captured_req_width",
            ),
            Parameters(
                "sglang.srt.utils.common:require_mlp_sync", ("server_args",) if host.mlp_sync_takes_args else ()
            ),
            *context("get_spec", "get_exec", *(("get_server_args",) if host.mlp_sync_takes_args else ())),
        ),
        needs=("draft attention",),
    )
    verification_logits = Part(
        "verification logits",
        (
            *HOOKS,
            Parameters(
                "sglang.srt.layers.logits_processor:LogitsProcessor._get_logits",
                ("self", "hidden_states", "lm_head", "logits_metadata", "embedding_bias", "use_logits_buffer"),
            ),
            *map(
                same,
                (
                    "layers.logits_processor:LogitsProcessor._get_logits",
                    "layers.logits_processor:LogitsProcessor._compute_lm_head",
                    "layers.logits_processor:LogitsProcessor._copy_logits_to_buffer",
                    "speculative.eagle_utils:eagle_sample",
                ),
            ),
            Names(
                "sglang.srt.layers.logits_processor:LogitsProcessor",
                (*host.head_settings, "logit_scale", "rl_on_policy_target", "vocab_size"),
            ),
            Names("sglang.srt.layers.logits_processor", ("should_apply_lm_head_quant_method",)),
            Parameters("sglang.srt.speculative.eagle_utils:eagle_sample", host.sample_parameters),
            # Nothing else reads the logits of trees, but the checks for NaN and infinity, and log-probabilities.
            Lines("sglang.srt.speculative.eagle_worker_common:run_eagle_verify", "next_token_logits", 2),
            Lines("sglang.srt.speculative.eagle_worker_common:run_eagle_verify", "maybe_detect", 2),
            Lines("sglang.srt.speculative.ngram_worker:NGRAMWorker.forward_batch_generation", "next_token_logits", 2),
            Lines("sglang.srt.speculative.ngram_worker:NGRAMWorker.forward_batch_generation", "maybe_detect", 2),
            Lines("sglang.srt.speculative.eagle_worker_common:run_eagle_verify", "eagle_sample(", 1),
            Lines("sglang.srt.speculative.ngram_worker:NGRAMWorker.forward_batch_generation", "eagle_sample(", 1),
            *context("get_spec"),
        ),
    )
    draft_topk = Part(
        "draft top-k",
        (
            *HOOKS,
            Parameters(
                "sglang.srt.speculative.spec_utils:renorm_draft_probs",
                ("next_token_logits", "sampling_info", "use_rejection_sampling"),
            ),
            same("speculative.spec_utils:renorm_draft_probs"),
            Parameters("sglang.srt.utils.common:fast_topk", ("values", "topk", "dim")),
            same("utils.common:fast_topk"),
            # Between the two, nothing reads a probability unless drafts are sampled.
            Lines(worker, "probs = renorm_draft_probs(", 3),
            Lines(worker, "renorm_draft_probs(", 3),
            Lines(worker, "fast_topk(probs, self.topk, dim=-1)", 3),
            *(
                Lines(f"sglang.srt.speculative.{other}", "renorm_draft_probs(", 0)
                for other in ("multi_layer_eagle_worker_v2", "frozen_kv_mtp_worker_v2", "standalone_worker_v2")
            ),
            Lines("sglang.srt.speculative.spec_utils", "renorm_draft_probs(", 1),
        ),
    )
    move_accepted = Part(
        "move_accept_tokens",
        (
            *HOOKS,
            Parameters(
                "sglang.srt.speculative.spec_utils:move_accept_tokens_to_target_kvcache",
                ("batch", "accept_index", "num_correct_drafts", "token_to_kv_pool_allocator"),
            ),
            same("speculative.spec_utils:move_accept_tokens_to_target_kvcache"),
            Names(
                "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool",
                ("data_ptrs", "use_hnd", "use_native_move_kv_cache", "k_buffer", "v_buffer", "move_kv_cache"),
            ),
        ),
    )
    return (
        attention(host),
        attention_choice(host),
        hybrid_models,
        draft_attention,
        *kernels(host),
        draft_topk,
        verification_logits,
        move_accepted,
        accepted_rows,
        ngram(),
    )


def context(*names: str) -> tuple[Contract, ...]:
    return (Names("sglang.srt.runtime_context", names),)


def attention(host: Host) -> Part:
    backend = "sglang.srt.layers.attention.base_attn_backend:AttentionBackend"
    forward = ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache")
    methods = {
        "init_forward_metadata": ("self", "forward_batch"),
        "init_forward_metadata_out_graph": ("self", "forward_batch", "in_capture"),
        "init_forward_metadata_in_graph": ("self", "forward_batch"),
        "init_cuda_graph_state": ("self", "max_bs", "max_num_tokens"),
        "get_cuda_graph_seq_len_fill_value": ("self",),
        "update_verify_buffers_to_fill_after_draft": ("self", "spec_info", "cuda_graph_bs"),
        "forward_extend": forward,
        "forward_decode": forward,
    }
    pools = "sglang.srt.mem_cache.memory_pool"
    common = "sglang.srt.speculative.eagle_worker_common"
    return Part(
        "attention",
        (
            Parameters("sglang.srt.layers.attention.attention_registry:register_attention_backend", ("name",)),
            Names("sglang.srt.layers.attention.attention_registry", ("register_attention_backend",)),
            Names("sglang.srt.server_args", ("add_attention_backend_choices",)),
            *(Parameters(f"{backend}.{name}", parameters) for name, parameters in methods.items()),
            # Those that the backend lacks belong to passes that it does not serve: of other devices, or by choice.
            Exactly(
                backend,
                "abstract",
                (
                    *("init_cuda_graph_state", "init_forward_metadata_for_breakable_cuda_graph_capture"),
                    *("prepare_forward_metadata_for_breakable_cuda_graph_replay", "get_cuda_graph_seq_len_fill_value"),
                    *("update_verify_buffers_to_fill_after_draft", "forward_decode", "forward_extend", "forward_mixed"),
                ),
            ),
            Names(backend, ("verify_mask", "needs_cpu_seq_lens")),
            Exactly(
                "sglang.srt.model_executor.forward_batch_info:ForwardMode",
                "fields",
                (
                    *("EXTEND", "DECODE", "MIXED", "IDLE", "TARGET_VERIFY", "DRAFT_EXTEND_V2", "PREBUILT"),
                    *("SPLIT_PREFILL", "DLLM_EXTEND"),
                ),
            ),
            Names(
                "sglang.srt.model_executor.forward_batch_info:ForwardMode",
                ("is_decode_or_idle", "is_target_verify", "is_draft_extend_v2"),
            ),
            Names(
                "sglang.srt.model_executor.forward_batch_info:ForwardBatch",
                (
                    *("forward_mode", "batch_size", "req_pool_indices", "seq_lens", "out_cache_loc", "spec_info"),
                    *("extend_seq_lens", "extend_prefix_lens"),
                ),
            ),
            Names(
                "sglang.srt.layers.radix_attention:RadixAttention",
                (
                    *("layer_id", "tp_q_head_num", "qk_head_dim", "scaling", "sliding_window_size", "logit_cap"),
                    *("is_cross_attention", "logit_capping_method", "k_scale", "v_scale", "k_scale_float"),
                    *("v_scale_float", "attn_type", "xai_temperature_len"),
                ),
            ),
            Parameters(
                f"{pools}:MHATokenToKVPool.set_kv_buffer",
                ("self", "layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale"),
                more=True,
            ),
            Lines(f"{pools}:unwrap_write_loc", "return (loc_info, None, None)"),  # of a bare tensor
            Names(f"{pools}:MHATokenToKVPool", ("get_key_buffer", "get_value_buffer", "k_scale_buffer")),
            # Row 0 of req_to_token is unused.
            Lines(f"{pools}:ReqToTokenPool.__init__", "self.free_slots = list(range(1, self._alloc_size))"),
            Names(
                "sglang.srt.model_executor.model_runner:ModelRunner",
                (
                    *("token_to_kv_pool", "req_to_token_pool", "model_config", "is_draft_worker", "use_mla_backend"),
                    *(("kv_index_translator",) if host.translates_kv else ()),
                ),
            ),
            Names(
                "sglang.srt.speculative.eagle_info:EagleVerifyInput", ("tree_topk", "draft_token_num", "custom_mask")
            ),
            Names("sglang.srt.speculative.eagle_info:EagleDraftExtendInput", ("num_tokens_per_req",)),
            Names(
                "sglang.srt.speculative.ngram_info:NgramVerifyInput", ("draft_token_num", "custom_mask", "draft_token")
            ),
            # Draft-extend counts its own rows in seq_lens; verification does not.
            Lines(f"{common}:prepare_for_draft_extend", "forward_batch.seq_lens + num_draft_tokens"),
            Lines(f"{common}:build_eagle_verify_input", "verify_mask.buffer if verify_mask.fits(bs) else None"),
            Exactly(
                "sglang.srt.layers.attention.verify_mask:VerifyMask", "fields", ("buffer", "mode", "max_bs"), more=True
            ),
            Names("sglang.srt.speculative.eagle_utils", ("TreeMaskMode",)),
            Lines(
                "sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner",
                "attn_backend.init_forward_metadata_out_graph(fb_view)",
            ),
            Lines("sglang.srt.runtime_context", "'attn_dcp_size'"),
            Lines("sglang.srt.runtime_context", "'attn_cp_size'"),
            *context("get_parallel", "get_spec"),
        ),
    )


def attention_choice(host: Host) -> Part:
    groups, server_args = "sglang.srt.arg_groups", "sglang.srt.server_args:ServerArgs"
    steps = ("model_specific_adjustments", "deterministic_inference", "attention_backend_compatibility")
    if host.declares_arguments:
        base = f"{groups}.model_override_base"
        default = f"{base}:get_default_attn_backend"
        access: tuple[Contract, ...] = (
            Parameters(f"{groups}.model_hook:handle_model_specific_adjustments", ("server_args",)),
            Parameters(f"{groups}.overrides:declare_resolution", ("server_args", "source")),
            Parameters(f"{base}:model_config_of", ("server_args",)),
            Parameters(f"{base}:use_mla_backend", ("server_args",)),
            Parameters(default, ("server_args", "use_mla_backend", "model_config")),
            Names(f"{groups}.overrides", ("declare_resolution",)),
            Names(base, ("get_default_attn_backend", "model_config_of", "use_mla_backend")),
            *(Lines(host.argument_steps, f"handle_{step}") for step in steps),
        )
    else:
        default = f"{server_args}._get_default_attn_backend"
        access = (
            Parameters(f"{server_args}._handle_model_specific_adjustments", ("self",)),
            Parameters(f"{server_args}.get_model_config", ("self",)),
            Parameters(f"{server_args}.use_mla_backend", ("self",)),
            Parameters(default, ("self", "use_mla_backend", "model_config")),
            *(Lines(host.argument_steps, f"self._handle_{step}()", 1) for step in steps),
        )
    view = f"resolved_view({'server_args' if host.declares_arguments else 'self'})"
    return Part(
        "attention choice",
        (
            *HOOKS,
            *access,
            Names(f"{groups}.overrides", ("resolved_view",)),
            # A backend without a name gets SGLang's default; a phase without one follows the common backend.
            Lines(f"{groups}.overrides:_attention_backend_default", "if view.attention_backend is None:"),
            Lines(
                f"{groups}.{'model_override_base' if host.declares_arguments else 'overrides'}:attention_backends_of",
                "cfg.decode_attention_backend if cfg.decode_attention_backend else cfg.attention_backend",
            ),
            Lines(default, f"is_no_spec_infer_or_topk_one({view}):\n            return 'fa3'"),
            Parameters(f"{groups}.speculative_hook:_auto_choose_speculative_params", ("server_args", "model_arch")),
            Names(f"{groups}.speculative_hook", ("_auto_choose_speculative_params",)),
            Names("sglang.srt.utils.common", ("is_hopper_with_cuda_12_3",)),
            Names(
                "sglang.srt.configs.model_config:ModelConfig",
                (
                    *("hf_config", "head_dim", "v_head_dim", "has_attention_sinks", "attention_chunk_size"),
                    *("is_encoder_decoder", "is_hybrid_swa"),
                ),
            ),
            Names(
                host.attention_fields,
                ("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
            ),
            Names(
                host.speculation_fields,
                (
                    *("speculative_algorithm", "speculative_eagle_topk", "speculative_adaptive"),
                    "speculative_draft_attention_backend",
                ),
            ),
        ),
        needs=("attention",),
    )


def kernels(host: Host) -> tuple[Part, ...]:
    """Return the parts that replace one kernel each. `sgl_kernel` is a package of its own, whose calls are read."""
    build, verify = host.tree_calls
    links = ("retrive_index", "retrive_next_token", "retrive_next_sibling")
    outputs = ("predicts", "accept_index", "accept_token_num", "candidates")
    parameters = {
        "build_tree_kernel_efficient": (
            *("parent_list", "selected_index", "verified_seq_len", "tree_mask", "positions", *links),
            *("topk", "depth", "draft_token_num", "tree_mask_mode"),
        ),
        "verify_tree_greedy": (*outputs, *links, "target_predict"),
        "tree_speculative_sampling_target_only": (
            *(*outputs, *links, "uniform_samples", "uniform_samples_for_final_sampling", "target_probs"),
            *("draft_probs", "threshold_single", "threshold_acc", "deterministic"),
        ),
    }
    given = ", ".join(f"{name}={name}" for name in outputs)
    given_links = ", ".join(f"{name}={name.replace('retrive', 'retrieve')}" for name in links)
    in_input = ", ".join(f"{name}=verify_input.{name.replace('retrive', 'retrieve')}" for name in links)
    calls = {
        "build_tree_kernel_efficient": (
            Lines(
                build.partition(":")[0],
                f"from {host.tree_kernels} import build_tree_kernel_efficient as sgl_build_tree_kernel_efficient",
            ),
            Lines(
                build,
                "sgl_build_tree_kernel_efficient(parent_list, top_scores_index, seq_lens, tree_mask, positions, "
                "retrieve_index, retrieve_next_token, retrieve_next_sibling, topk, spec_steps, num_verify_tokens, "
                "tree_mask_mode)",
            ),
        ),
        "verify_tree_greedy": (
            Lines(verify, f"from {host.tree_kernels} import verify_tree_greedy"),
            Lines(verify, f"verify_tree_greedy({given}, {given_links}, target_predict=target_predict)"),
        ),
        "tree_speculative_sampling_target_only": (
            Lines(host.sampling_user, f"from {host.sampling_kernel} import "),
            Names(host.sampling_user, ("tree_speculative_sampling_target_only",)),
            Lines("sglang.srt.speculative.eagle_utils:eagle_sample", "tree_speculative_sampling_target_only"),
            Lines(
                "sglang.srt.speculative.eagle_utils:eagle_sample",
                "sampling_fn(predicts=predict, accept_index=accept_index, accept_token_num=num_correct_drafts, "
                f"candidates=candidates, {in_input}, uniform_samples=coins, "
                "uniform_samples_for_final_sampling=coins_for_final_sampling, target_probs=target_probs, "
                "draft_probs=draft_probs, threshold_single=",
            ),
        ),
    }
    modules = dict.fromkeys(parameters, host.tree_kernels)
    modules["tree_speculative_sampling_target_only"] = host.sampling_kernel
    return tuple(
        Part(
            name,
            (
                *HOOKS,
                *([Parameters(f"{modules[name]}:{name}", expected)] if modules[name] != "sgl_kernel" else []),
                *calls[name],
            ),
        )
        for name, expected in parameters.items()
    )


def ngram() -> Part:
    worker = "sglang.srt.speculative.ngram_worker:NGRAMWorker"
    return Part(
        "SPECDEC_NGRAM",
        (
            Parameters(f"{worker}._prepare_draft_tokens", ("self", "batch")),
            Parameters(f"{worker}._update_ngram_corpus", ("self", "batch")),
            Parameters(f"{worker}.alloc_memory_pool", ("self",)),
            Parameters(f"{worker}.clear_cache_pool", ("self",)),
            Names(worker, ("draft_token_num", "max_batch_size", "enable_overlap", "model_runner")),
            Lines(f"{worker}._prepare_draft_tokens", "self.enable_overlap and (not batch.grammar_needs_sync())"),
            Lines(
                f"{worker}._prepare_for_speculative_decoding", "req_drafts, mask = self._prepare_draft_tokens(batch)"
            ),
            Lines(f"{worker}._prepare_for_speculative_decoding", "tree_mask.copy_(torch.from_numpy(mask)"),
            Lines(f"{worker}.forward_batch_generation", "accept_tokens[:, 0] = predict"),  # num_nodes for each request
            Names("sglang.srt.managers.schedule_batch:Req", ("rid", "output_ids", "origin_input_ids_unpadded")),
            Names(
                "sglang.srt.speculative.spec_registry:CustomSpecAlgo",
                ("is_ngram", "has_draft_kv", "handle_server_args", "create_worker"),
            ),
            Parameters(
                "sglang.srt.speculative.spec_info:SpeculativeAlgorithm.register",
                ("cls", "name", "supports_overlap", "validate_server_args", "spec_class"),
            ),
            Names("sglang.srt.speculative.spec_info:SpeculativeAlgorithm", ("NGRAM", "handle_server_args")),
        ),
    )
