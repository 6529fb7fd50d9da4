"""What `--attention-backend CUSTOM` means for a layer: our attention, or the backend that vLLM would choose itself.

vLLM verifies chains only, and there its FlashAttention is not slower than ours. So it stays where vLLM would choose it,
as any backend does for layers that ours cannot serve. This module does not import vLLM.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

__all__ = ["VARIABLE", "share_layers"]

VARIABLE = "SPECDEC_VLLM_ATTENTION"  # own: our attention wherever it can serve a layer; auto: as said above


def share_layers(platform: Any, custom: Any, flash: Any, logger: logging.Logger) -> None:
    """Let a platform choose between our attention and vLLM's for each layer that asks for `custom`.

    Layers that ask for another backend, or for none, are chosen as before. A second call changes nothing.

    Args:
        platform: class with vLLM's `get_attn_backend_cls`, which is replaced.
        custom: member of vLLM's `AttentionBackendEnum`, registered with our backend.
        flash: its member for FlashAttention.
        logger: gets one line for each kind of layer that keeps a backend of vLLM.
    """
    select = platform.get_attn_backend_cls.__func__
    if hasattr(select, "shares_layers"):
        return
    said: set[str] = set()

    @functools.wraps(select)
    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        chosen = functools.partial(select, cls, attn_selector_config=attn_selector_config, num_heads=num_heads)
        if selected_backend is not custom:
            return str(chosen(selected_backend))
        choice = os.environ.get(VARIABLE, "auto")
        if choice not in ("auto", "own"):
            raise ValueError(f"specdec: {VARIABLE} is {choice!r}, expected 'auto' or 'own'")
        refused = custom.get_class().validate_configuration(
            device_capability=cls.get_device_capability(), **attn_selector_config._asdict()
        )
        if not refused and choice == "own":
            return str(chosen(custom))
        path = str(chosen(None))
        if not refused and path != flash.get_path():
            return str(chosen(custom))
        reason = ", ".join(refused) or f"vLLM verifies chains, where ours is not faster ({VARIABLE}=own selects ours)"
        line = f"layers of head size {attn_selector_config.head_size} have vLLM's {path.rpartition('.')[2]}: {reason}"
        if line not in said:
            said.add(line)
            logger.info("specdec: %s", line)
        return path

    get_attn_backend_cls.shares_layers = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
