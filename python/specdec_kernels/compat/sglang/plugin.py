"""The plugin in SGLang's entry point group `sglang.srt.plugins`.

It registers the attention backend `specdec` (`--attention-backend specdec`, `--speculative-draft-attention-backend
specdec`) and the algorithm `SPECDEC_NGRAM` in SGLang's registries. Through SGLang's hooks it replaces the functions
that build and verify trees by those of `compat.sglang`, wraps other functions of a round in those of
`compat.sglang.rounds`, and gives drafts their attention.
Nothing is changed in a version of SGLang that is not in `VERSIONS`, or with `SPECDEC_SGLANG=0` in the environment.
Uninstalling the package, or leaving it out of SGLANG_PLUGINS, removes all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ..version_gate import version_to_change
from . import functions as sglang
from . import rounds as sglang_rounds
from .attention import BACKEND, DraftStepAttention, TreeAttention, TreeAttentionSteps, draft_backend
from .ngram import ALGORITHM, NgramTrees

__all__ = ["ALGORITHM", "BACKEND", "VERSIONS", "register"]

VERSIONS = ("0.5.17",)  # tested versions of SGLang

logger = logging.getLogger(__name__)


def register() -> None:
    """Register everything. SGLang calls this once in each process, before it parses its arguments."""
    found = version_to_change("SGLang", VERSIONS, logger)
    if found is None:
        return
    registered = [register_attention(), register_drafts(), register_functions(), register_ngram()]
    logger.info("specdec: SGLang %s has %s", found, "; ".join(registered))


def register_attention() -> str:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    add_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(make_backend)
    return f"the attention backend {BACKEND}"


def make_backend(model_runner: Any) -> Any:
    """Return the attention backend of the target, or of a draft's prefill.

    Raises:
        ValueError: the engine is one that `tree_attention` cannot serve.
    """
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.attention.verify_mask import VerifyMask
    from sglang.srt.runtime_context import get_parallel, get_spec
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    algorithm = model_runner.server_args.speculative_algorithm
    if algorithm is not None and algorithm not in sglang_rounds.VERIFIED:
        names = ", ".join(sglang_rounds.VERIFIED)
        raise ValueError(f"specdec: speculative_algorithm is {algorithm}, expected none or one of {names}")
    if get_parallel().attn_dcp_size > 1:
        raise ValueError(f"specdec: decode context parallelism is {get_parallel().attn_dcp_size}, expected 1")

    class SpecdecBackend(TreeAttention, AttentionBackend):  # type: ignore[misc]
        @property
        def verify_mask(self) -> Any:
            """The buffer to which SGLang's drafting writes the tree mask."""
            if self._mask_bytes is None or self._tables is None:
                return None
            return VerifyMask(self._mask_bytes, TreeMaskMode.QLEN_ONLY, len(self._tables))

    nodes = None if model_runner.is_draft_worker else get_spec().speculative_num_draft_tokens
    return SpecdecBackend(model_runner, num_draft_tokens=nodes)


def register_drafts() -> str:
    """Wrap the factory of draft attention backends, because SGLang selects those from a closed table."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    factory = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
    HookRegistry.register(f"{factory}.create_decode_backend", draft_decode, HookType.AROUND)
    HookRegistry.register(f"{factory}.create_draft_extend_backend", draft_extend, HookType.AROUND)
    return "the same for drafts"


def draft_decode(original: Callable[[Any], Any], factory: Any) -> Any:
    if draft_backend(factory.server_args, "decode") != BACKEND:
        return original(factory)
    if factory.speculative_num_steps <= 1:
        return None
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    class SpecdecDraftStep(DraftStepAttention, AttentionBackend):  # type: ignore[misc]
        pass

    return TreeAttentionSteps(
        factory.draft_model_runner, factory.topk, factory.speculative_num_steps, step_class=SpecdecDraftStep
    )


def draft_extend(original: Callable[[Any], Any], factory: Any) -> Any:
    if draft_backend(factory.server_args, sglang_rounds.extend_phase()) != BACKEND:
        return original(factory)
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    class SpecdecDraftExtend(TreeAttention, TritonAttnBackend):  # type: ignore[misc]
        """A `TritonAttnBackend` by name only: SGLang captures draft-extend just for a few classes."""

        verify_mask = None

    return SpecdecDraftExtend(factory.draft_model_runner)


def register_functions() -> str:
    """Replace and wrap functions of a round, in a build with CUDA kernels."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from ... import cuda_version

    if cuda_version is None:
        return "its own functions, since this build has no CUDA kernels"
    names = ("build_tree_kernel_efficient", "verify_tree_greedy", "tree_speculative_sampling_target_only")
    for name in names:
        HookRegistry.register(f"sgl_kernel.{name}", getattr(sglang, name), HookType.REPLACE)
    around = {
        "speculative.spec_utils.renorm_draft_probs": sglang_rounds.keep_logits,
        "utils.common.fast_topk": sglang_rounds.best_of,
        "layers.logits_processor.LogitsProcessor._get_logits": sglang_rounds.verify_logits,
        "speculative.eagle_utils.eagle_sample": sglang_rounds.sample,
        "speculative.spec_utils.move_accept_tokens_to_target_kvcache": sglang_rounds.move_accepted,
        "speculative.spec_utils.resolve_num_tokens_per_req": sglang_rounds.accepted_width,
        "speculative.eagle_worker_v2.EagleDraftWorker._draft_extend_for_decode": sglang_rounds.extend_accepted,
    }
    for place, function in around.items():
        HookRegistry.register(f"sglang.srt.{place}", function, HookType.AROUND)
    return ", ".join([*names, *(place.rsplit(".", 1)[-1] for place in around)])


def register_ngram() -> str:
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
    return f"the algorithm {ALGORITHM}"


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
