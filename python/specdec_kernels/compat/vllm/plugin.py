"""The plugin in vLLM's entry point group `vllm.general_plugins`.

It registers an attention backend under the name that vLLM reserves for external ones (`--attention-backend CUSTOM`).
Layers with that flag where ours cannot serve, or is not faster, keep vLLM's own backend (`compat.vllm.choice`). The
plugin does nothing in a version of vLLM whose sources do not have what the backend relies on, where vLLM does not run
on CUDA, if another backend has that name, or with `SPECDEC_VLLM=0` in the environment. Uninstalling the package, or
leaving it out of VLLM_PLUGINS, removes it.
"""

from __future__ import annotations

import logging

from ..version_gate import Takeover, parts_to_take_over
from .choice import share_layers
from .contracts import ATTENTION, VERSIONS, parts_of

__all__ = ["BACKEND", "PATH", "register", "takeover"]

BACKEND = "CUSTOM"
PATH = "specdec_kernels.compat.vllm.backend.SpecdecBackend"

logger = logging.getLogger("vllm.specdec_kernels")  # vLLM shows logs of children of its own logger


def takeover(log: logging.Logger = logger) -> Takeover:
    """Return what the installed version of vLLM gets, and log what it does not get."""
    return parts_to_take_over("vLLM", VERSIONS, parts_of, log)


def register() -> None:
    """Register the backend. vLLM calls this once in each process, before it loads a model.

    This never raises: what cannot be registered stays vLLM's, with one line in its log.
    """
    try:
        found = takeover()
        if ATTENTION not in found.parts:
            return
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        if not current_platform.is_cuda():
            logger.warning("specdec: vLLM does not run on CUDA here; nothing is changed")
            return
        custom, flash = AttentionBackendEnum[BACKEND], AttentionBackendEnum["FLASH_ATTN"]
        if custom.is_overridden() and custom.get_path() != PATH:
            logger.warning("specdec: the attention backend %s is %s; nothing is changed", BACKEND, custom.get_path())
            return
        register_backend(custom, PATH)
        share_layers(type(current_platform), custom, flash, logger)
        logger.info("specdec: vLLM %s has the attention backend %s, for those who ask for it", found.found, BACKEND)
    except Exception as error:  # vLLM must start
        logger.warning("specdec: %s: %s; nothing is changed", type(error).__name__, error)
