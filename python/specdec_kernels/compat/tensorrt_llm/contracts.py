"""The parts of TensorRT-LLM's sources that the drafter relies on."""

from __future__ import annotations

from ..contracts import Lines, Names, Parameters, Part

__all__ = ["IN_INDEX", "NAME", "NGRAM_DRAFTER", "VERSIONS", "parts_of"]

NAME = "TensorRT-LLM"
# The published sources were read file by file, around this version. None has run: a drafter reads the installed sources
# of any other version first.
VERSIONS = ("1.2.0rc2",)
IN_INDEX = False  # the package index has no wheel

NGRAM_DRAFTER = "n-gram drafter"
SPECULATIVE = "tensorrt_llm._torch.speculative"


def parts_of(version: str) -> list[Part]:
    """Return the parts, with their contracts."""
    own = f"{SPECULATIVE}.ngram:NGramDrafter.prepare_draft_tokens"  # reads requests as ours does
    return [
        Part(
            NGRAM_DRAFTER,
            (
                Parameters(
                    f"{SPECULATIVE}.drafter:Drafter.prepare_draft_tokens",
                    ("self", "scheduled_requests", "resource_manager"),
                ),
                Names("tensorrt_llm.llmapi.llm_args:UserProvidedDecodingConfig", ("drafter", "resource_manager")),
                Lines(f"{SPECULATIVE}.utils", "return spec_config.drafter"),
                Lines(own, "scheduled_requests.generation_requests"),
                Lines(own, "request.get_tokens(0)"),
                Lines(own, "request.request_id"),
                Lines(own, "request.py_orig_prompt_len + request.py_max_new_tokens"),
                Lines(own, "request.py_draft_tokens = draft_tokens"),
            ),
        )
    ]
