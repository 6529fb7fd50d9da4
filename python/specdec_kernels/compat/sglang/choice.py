"""The attention that runs in an SGLang that is asked for `specdec`: ours, or SGLang's own.

The choice is made while SGLang resolves its arguments, before it reads anything that depends on the name of an
attention backend: page sizes, CUDA graphs, caches and workers then are what the chosen attention gets.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from ...plans import HEAD_DIMS
from .attention import BACKEND
from .rounds import BRANCHING, VERIFIED

__all__ = ["choose_attention"]

logger = logging.getLogger(__name__)

FIELDS = (
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    "speculative_draft_attention_backend",
)
VARIABLE = "SPECDEC_SGLANG_ATTENTION"
FA3 = "fa3"  # FlashAttention 3's name in SGLang


def choose_attention(original: Callable[[Any], Any], server_args: Any, *, declares: bool) -> Any:
    """Wrap the step that adjusts arguments to the model: replace `specdec` where SGLang's own attention shall run.

    SGLang's attention runs models that ours does not know. On Hopper, FlashAttention 3 runs plain decoding and chains,
    because our kernel gains nothing there: each request has one row of queries for each token, and no mask.

    Args:
        original: the step.
        server_args: SGLang's.
        declares: whether steps declare what they decide, instead of assigning it.

    Raises:
        ValueError: the environment variable that chooses has an unknown value.
    """
    choice = os.environ.get(VARIABLE, "auto")
    if choice not in ("auto", "own"):
        raise ValueError(f"specdec: {VARIABLE} is {choice!r}, expected 'auto' or 'own'")
    from sglang.srt.arg_groups.overrides import resolved_view

    view = resolved_view(server_args)
    asked = [name for name in FIELDS if getattr(view, name) == BACKEND]
    if asked and choice == "auto" and not view.model_path.startswith("instance://"):  # has no configuration to read
        replaced = replacement(server_args, view, declares)
        if replaced is not None:
            backend, reason = replaced
            assign(server_args, declares, dict.fromkeys(asked, backend))
            logger.warning("specdec: %s", reason)
    return original(server_args)


def replacement(server_args: Any, view: Any, declares: bool) -> tuple[str | None, str] | None:
    """Return the name of SGLang's own attention to run, and why; None: ours runs.

    Without a name, a phase and a draft have the common backend, and that is what SGLang chooses by model and device.
    """
    config, is_latent = model_of(server_args, declares)
    unknown = unknown_to_ours(config, is_latent, view.speculative_algorithm)
    if unknown is not None:
        return None, f"{unknown}, so SGLang's own attention runs all phases"
    from sglang.srt.utils.common import is_hopper_with_cuda_12_3

    if has_branches(server_args, view, config) or not is_hopper_with_cuda_12_3():
        return None
    is_default = view.attention_backend in (None, BACKEND) and default_of(server_args, declares, config) == FA3
    drafts = "nothing is drafted" if view.speculative_algorithm is None else "drafts are chains"
    reason = f"{drafts}, so SGLang's own attention ({FA3}) runs all phases; {VARIABLE}=own selects specdec's"
    return None if is_default else FA3, reason


def unknown_to_ours(config: Any, is_latent: bool, algorithm: str | None) -> str | None:
    """Return what of a model or an algorithm `tree_attention` does not know; None if nothing."""
    if algorithm is not None and algorithm.upper() not in VERIFIED:
        return f"drafts of {algorithm} are not among those that specdec verifies"
    if is_latent:
        return "the model has latent attention (MLA)"
    if getattr(config, "is_encoder_decoder", False):
        return "the model has an encoder"
    if getattr(config, "has_attention_sinks", False):
        return "the model has attention sinks"
    if getattr(config, "attention_chunk_size", None):
        return f"layers attend within chunks of {config.attention_chunk_size} tokens"
    if getattr(getattr(config, "hf_config", None), "dual_chunk_attention_config", None):
        return "the model has dual chunk attention"
    if getattr(config, "is_hybrid_swa", False):
        return "layers with windows have a KV pool of their own (--disable-hybrid-swa-memory gives them the common one)"
    if config.head_dim not in HEAD_DIMS or config.v_head_dim != config.head_dim:
        return f"keys have dimension {config.head_dim} and values {config.v_head_dim}"
    return None


def has_branches(server_args: Any, view: Any, config: Any) -> bool:
    """Return whether a node of a draft may have several children."""
    algorithm = view.speculative_algorithm
    if algorithm is None:
        return False
    if algorithm.upper() in BRANCHING:
        return True
    topk = view.speculative_eagle_topk
    if topk is None:
        if view.speculative_adaptive:  # drafts chains only
            return False
        from sglang.srt.arg_groups.speculative_hook import _auto_choose_speculative_params

        _, topk, _ = _auto_choose_speculative_params(server_args, config.hf_config.architectures[0])
    return int(topk) > 1


def model_of(server_args: Any, declares: bool) -> tuple[Any, bool]:
    """Return SGLang's configuration of the model, and whether its attention is latent."""
    if not declares:
        return server_args.get_model_config(), server_args.use_mla_backend()
    from sglang.srt.arg_groups.model_override_base import model_config_of, use_mla_backend

    return model_config_of(server_args), use_mla_backend(server_args)


def default_of(server_args: Any, declares: bool, config: Any) -> Any:
    """Return the attention that SGLang would choose for a model with heads of keys and values."""
    if not declares:
        return server_args._get_default_attn_backend(False, config)
    from sglang.srt.arg_groups.model_override_base import get_default_attn_backend

    return get_default_attn_backend(server_args, False, config)


def assign(server_args: Any, declares: bool, values: dict[str, str | None]) -> None:
    if not declares:
        for name, value in values.items():
            setattr(server_args, name, value)
        return
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(server_args, BACKEND, **values)
