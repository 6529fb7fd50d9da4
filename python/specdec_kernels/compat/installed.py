"""The parts of the installed engines that our plugins would take over. Imports none of them."""

from __future__ import annotations

import importlib
import os
from importlib.metadata import PackageNotFoundError, version

from .version_gate import QUIET, Takeover, numbers, parts_to_take_over

__all__ = ["installed_engines", "installed_version"]

# Engines by their names, with the package of compat that has their contracts.
ENGINES = {"SGLang": "sglang", "vLLM": "vllm", "TensorRT-LLM": "tensorrt_llm"}
ONLY_PLUGINS = {"SGLang": "SGLANG_PLUGINS", "vLLM": "VLLM_PLUGINS"}  # an engine then loads these plugins only
TRANSFORMERS = "5.17"  # the first version with which hf works; those of its major version are supported
TRANSFORMERS_PARTS = ("hf.generate", "hf.assisted")


def installed_engines() -> dict[str, Takeover | None]:
    """Return what each engine would get; None if it is not installed."""
    found = {name: engine_takeover(name, package) for name, package in ENGINES.items()}
    return {**found, "transformers": transformers_takeover()}


def engine_takeover(name: str, package: str) -> Takeover | None:
    installed = installed_version(package)
    if installed is None:
        return None
    only = os.environ.get(ONLY_PLUGINS.get(name, ""))
    if only is not None and "specdec" not in only.split(","):
        return Takeover(installed, reason=f"{ONLY_PLUGINS[name]} is {only!r}, without specdec")
    try:
        contracts = importlib.import_module(f"{__package__}.{package}.contracts")
    except ImportError as error:  # NumPy or torch is broken
        return Takeover(installed, reason=str(error))
    got = parts_to_take_over(name, contracts.VERSIONS, contracts.parts_of, QUIET)
    return got if got.found else Takeover(installed, reason=got.reason)


def transformers_takeover() -> Takeover | None:
    installed = installed_version("transformers")
    if installed is None:
        return None
    if numbers(installed) < numbers(TRANSFORMERS):
        return Takeover(installed, reason=f"hf needs transformers {TRANSFORMERS} or later")
    is_supported = numbers(installed)[0] == numbers(TRANSFORMERS)[0]
    return Takeover(installed, installed.partition("+")[0] if is_supported else TRANSFORMERS, TRANSFORMERS_PARTS)


def installed_version(package: str) -> str | None:
    """Return a package's version; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
