"""The plugin in SGLang's entry point group `sglang.srt.plugins`.

It registers the attention backend `specdec` (`--attention-backend specdec`, `--speculative-draft-attention-backend
specdec`) and the algorithm `SPECDEC_NGRAM` in SGLang's registries. Through SGLang's hooks it replaces the functions
that build and verify trees by those of `compat.sglang`, wraps other functions of a round in those of
`compat.sglang.rounds`, gives drafts their attention, and leaves plain decoding, chains and unknown models to SGLang's
own attention (`compat.sglang.choice`).
In versions of SGLang that are not in `VERSIONS`, only the parts whose contracts hold are registered; with
`SPECDEC_SGLANG=0` in the environment, none. Uninstalling the package, or leaving it out of SGLANG_PLUGINS, removes all
of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from ..version_gate import parts_to_take_over, take_over
from . import functions as sglang
from . import rounds as sglang_rounds
from .attention import BACKEND, DraftStepAttention, TreeAttention, TreeAttentionSteps
from .choice import choose_attention
from .contracts import VERSIONS, Host, host_of, parts_of
from .ngram import ALGORITHM, NgramTrees

__all__ = ["ALGORITHM", "BACKEND", "VERSIONS", "register"]

logger = logging.getLogger(__name__)


def register() -> None:
    """Register everything. SGLang calls this once in each process, before it parses its arguments."""
    found = parts_to_take_over("SGLang", VERSIONS, parts_of, logger)
    if found.base is None:
        return
    host = host_of(found.base)
    registrations = {
        "attention": register_attention,
        "attention choice": lambda: register_choice(host),
        "hybrid models": register_hybrids,
        "draft attention": register_drafts,
        "SPECDEC_NGRAM": register_ngram,
    }

    def register_part(name: str) -> None:
        if name in registrations:
            registrations[name]()
        elif has_kernels():
            register_functions(hooks_of(name, host))

    registered = take_over(found, parts_of(found.base), register_part, "SGLang", logger)
    if found.is_tested:
        names = registered if has_kernels() else [name for name in registered if name in registrations]
        own = "" if has_kernels() else "; its functions stay its own, since this build has no CUDA kernels"
        logger.info("specdec: SGLang %s has %s%s", found.found, ", ".join(names), own)


def has_kernels() -> bool:
    from ... import cuda_version

    return cuda_version is not None


def register_attention() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    add_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(make_backend)


def make_backend(model_runner: Any) -> Any:
    """Return the attention backend of the target, or of a draft's prefill.

    Raises:
        ValueError: the engine is one that `tree_attention` cannot serve.
    """
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.attention.verify_mask import VerifyMask
    from sglang.srt.runtime_context import get_parallel, get_spec
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    algorithm = get_spec().speculative_algorithm
    if algorithm is not None and algorithm not in sglang_rounds.VERIFIED:
        names = ", ".join(sglang_rounds.VERIFIED)
        raise ValueError(f"specdec: speculative_algorithm is {algorithm}, expected none or one of {names}")
    if get_parallel().attn_dcp_size > 1:
        raise ValueError(f"specdec: decode context parallelism is {get_parallel().attn_dcp_size}, expected 1")
    if get_parallel().attn_cp_size > 1:
        raise ValueError(f"specdec: context parallelism of attention is {get_parallel().attn_cp_size}, expected 1")

    class SpecdecBackend(TreeAttention, AttentionBackend):  # type: ignore[misc]
        @property
        def verify_mask(self) -> Any:
            """The buffer to which SGLang's drafting writes the tree mask."""
            if self._mask_bytes is None or self._tables is None:
                return None
            return VerifyMask(self._mask_bytes, TreeMaskMode.QLEN_ONLY, len(self._tables))

    nodes = None if model_runner.is_draft_worker else get_spec().speculative_num_draft_tokens
    backend = SpecdecBackend(model_runner, num_draft_tokens=nodes)
    if hasattr(model_runner.token_to_kv_pool, "full_kv_pool"):
        logger.info("specdec: layers with attention run specdec's, recurrent ones SGLang's")
    return backend


def register_choice(host: Host) -> None:
    register_functions({host.model_step: (partial(choose_attention, declares=host.declares_arguments), "AROUND")})


def register_hybrids() -> None:
    TreeAttention.serves_hybrids = True


def register_drafts() -> None:
    """Wrap the factory of draft attention backends, because SGLang selects those from a closed table."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    factory = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
    HookRegistry.register(f"{factory}.create_decode_backend", draft_decode, HookType.AROUND)
    HookRegistry.register(f"{factory}.create_draft_extend_backend", draft_extend, HookType.AROUND)


def is_ours(factory: Any, phase: str) -> bool:
    """Return whether a factory's drafts have our attention in a phase; those with sparse attention have their own."""
    name = factory.draft_attn_backend or sglang_rounds.draft_backend(phase)
    return name == BACKEND and getattr(factory, "qsa_profile", None) is None


def draft_decode(original: Callable[[Any], Any], factory: Any) -> Any:
    if not is_ours(factory, "decode"):
        return original(factory)
    if factory.speculative_num_steps <= 1:
        return None
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    class SpecdecDraftStep(DraftStepAttention, AttentionBackend):  # type: ignore[misc]
        pass

    steps = TreeAttentionSteps(
        factory.draft_model_runner, factory.topk, factory.speculative_num_steps, step_class=SpecdecDraftStep
    )
    for backend in (steps, *steps.attn_backends):
        stamp(backend)
    return unwrapped("attn_backend_wrapper_for_draft_decode", factory, steps)


def draft_extend(original: Callable[[Any], Any], factory: Any) -> Any:
    if not is_ours(factory, sglang_rounds.extend_phase()):
        return original(factory)
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    # A `TritonAttnBackend` by name only, because SGLang captures draft-extend just for a few classes: whatever
    # `TreeAttention` lacks comes from the base of all backends.
    plain = {
        name: value
        for name, value in vars(AttentionBackend).items()
        if not name.startswith(("__", "_abc_")) and not hasattr(TreeAttention, name)
    }
    made = type(TritonAttnBackend)("SpecdecDraftExtend", (TreeAttention, TritonAttnBackend), plain)
    backend = made(factory.draft_model_runner)
    stamp(backend)
    return unwrapped("attn_backend_wrapper_for_draft_extend", factory, backend)


def stamp(backend: Any) -> None:
    """Name a backend as SGLang's own factory names those that it returns."""
    backend.prefill_attention_backend_str = backend.decode_attention_backend_str = BACKEND


def unwrapped(wrapper: str, factory: Any, backend: Any) -> Any:
    """Return the backend.

    Raises:
        ValueError: SGLang would wrap it, for layers of other kinds.
    """
    from sglang.srt.layers.attention import attention_registry

    wrap = getattr(attention_registry, wrapper, None)  # earlier versions have no wrapper for decoding
    if wrap is not None and wrap(factory.draft_model_runner, backend) is not backend:
        raise ValueError("specdec: the draft has layers of several kinds, expected attention alone")
    return backend


def hooks_of(part: str, host: Host) -> dict[str, tuple[Callable[..., Any], str]]:
    """Return what a part hooks: functions of SGLang, each with ours and whether it replaces it or wraps it."""
    srt, takes_args = "sglang.srt", host.mlp_sync_takes_args
    hooks: dict[str, dict[str, tuple[Callable[..., Any], str]]] = {
        "build_tree_kernel_efficient": {
            f"{host.tree_kernels}.build_tree_kernel_efficient": (sglang.build_tree_kernel_efficient, "REPLACE"),
        },
        "verify_tree_greedy": {
            f"{host.tree_kernels}.verify_tree_greedy": (sglang_rounds.verify_greedy, "AROUND"),
        },
        "tree_speculative_sampling_target_only": {
            f"{host.sampling_kernel}.tree_speculative_sampling_target_only": (
                sglang.tree_speculative_sampling_target_only,
                "REPLACE",
            ),
        },
        "draft top-k": {
            f"{srt}.speculative.spec_utils.renorm_draft_probs": (sglang_rounds.keep_logits, "AROUND"),
            f"{srt}.utils.common.fast_topk": (sglang_rounds.best_of, "AROUND"),
        },
        "verification logits": {
            f"{srt}.layers.logits_processor.LogitsProcessor._get_logits": (
                partial(sglang_rounds.verify_logits, head_settings=host.head_settings),
                "AROUND",
            ),
            f"{srt}.speculative.eagle_utils.eagle_sample": (sglang_rounds.sample, "AROUND"),
        },
        "move_accept_tokens": {
            f"{srt}.speculative.spec_utils.move_accept_tokens_to_target_kvcache": (
                partial(sglang_rounds.move_accepted, within_window=host.moves_within_window),
                "AROUND",
            ),
        },
        "accepted rows": {
            f"{srt}.speculative.spec_utils.resolve_num_tokens_per_req": (
                partial(sglang_rounds.accepted_width, mlp_sync_takes_args=takes_args),
                "AROUND",
            ),
            f"{srt}.speculative.eagle_worker_v2.EagleDraftWorker._draft_extend_for_decode": (
                partial(sglang_rounds.extend_accepted, mlp_sync_takes_args=takes_args),
                "AROUND",
            ),
        },
    }
    return hooks[part]


def register_functions(hooks: dict[str, tuple[Callable[..., Any], str]]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for place, (function, kind) in hooks.items():
        HookRegistry.register(place, function, getattr(HookType, kind))


def register_ngram() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class SpecdecNgram(CustomSpecAlgo):  # type: ignore[misc]
        """SGLang's NGRAM with another worker: every query is answered as NGRAM answers it."""

        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        def handle_server_args(self, server_args: Any) -> None:
            SpeculativeAlgorithm.NGRAM.handle_server_args(server_args)

        def __getattr__(self, name: str) -> Any:
            """Forward queries that `CustomSpecAlgo` lacks to SGLang's NGRAM."""
            if name.startswith("_"):  # asked by copy and pickle: about this object
                raise AttributeError(name)
            return getattr(SpeculativeAlgorithm.NGRAM, name)

    SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=SpecdecNgram)(ngram_worker)


def ngram_worker(server_args: Any) -> type:
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    class SpecdecNgramWorker(NGRAMWorker):  # type: ignore[misc]
        def alloc_memory_pool(self, **kwargs: Any) -> None:
            super().alloc_memory_pool(**kwargs)
            context_len = self.model_runner.model_config.context_len
            self._trees = NgramTrees(self.draft_token_num, self.max_batch_size, context_len)

        def _prepare_draft_tokens(self, batch: Any) -> Any:
            return self._trees.draft(batch, overlap=self.enable_overlap and not batch.grammar_needs_sync())

        def _update_ngram_corpus(self, batch: Any) -> None:
            """Do nothing: `NgramTrees.draft` inserts the new text."""

        def clear_cache_pool(self) -> None:
            super().clear_cache_pool()
            self._trees.clear()

    return SpecdecNgramWorker
