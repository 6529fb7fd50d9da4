"""The plugin in vLLM's entry point group `vllm.general_plugins`.

It registers an attention backend under the name that vLLM reserves for external ones (`--attention-backend CUSTOM`) and
changes nothing else. It does nothing in a version of vLLM that is not in `VERSIONS`, if another backend has that name,
or with `SPECDEC_VLLM=0` in the environment. Uninstalling the package, or leaving it out of VLLM_PLUGINS, removes it.
"""

from __future__ import annotations

import logging

from ..version_gate import version_to_change

__all__ = ["BACKEND", "PATH", "VERSIONS", "register"]

BACKEND = "CUSTOM"
PATH = "specdec_kernels.compat.vllm.backend.SpecdecBackend"
# Tested versions of vLLM.
VERSIONS = ("0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")

logger = logging.getLogger("vllm.specdec_kernels")  # vLLM shows logs of children of its own logger


def register() -> None:
    """Register the backend. vLLM calls this once in each process, before it loads a model."""
    found = version_to_change("vLLM", VERSIONS, logger)
    if found is None:
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum[BACKEND]
    if custom.is_overridden() and custom.get_path() != PATH:
        logger.warning("specdec: the attention backend %s is %s; nothing is changed", BACKEND, custom.get_path())
        return
    register_backend(custom, PATH)
    logger.info("specdec: vLLM %s has the attention backend %s, for those who ask for it", found, BACKEND)
