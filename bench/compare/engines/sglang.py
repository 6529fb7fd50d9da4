"""SGLang through its offline engine or its server, with the settings that its documentation gives.

Written for 0.5.17 to 0.5.23.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from . import BLOCK_DRAFTERS, Algorithm, Generated, Job, kv_tokens, max_batch
from .sglang_server import Server


def version() -> str:
    """Return the version of the package."""
    import sglang

    return str(sglang.__version__)


def settings(job: Job, algorithm: Algorithm, ngram: str = "NGRAM") -> dict[str, Any]:
    """Return the options of its engine; `ngram` is the name of the n-gram algorithm."""
    options: dict[str, Any] = {
        "model_path": job.target,
        "dtype": job.dtype,
        "context_length": job.max_len,
        # SGLang counts a request whose prompt it prefills in chunks twice, and without room for one more the last
        # request would wait until another has ended.
        "max_running_requests": max_batch(job) + 1,
        "log_level": "error",
    }
    if (room := kv_tokens(job)) is not None:
        options["max_total_tokens"] = room
    if algorithm.drafter == "ngram":
        options |= {"speculative_algorithm": ngram, "speculative_num_draft_tokens": algorithm.num_nodes}
    elif algorithm.drafter in BLOCK_DRAFTERS:
        options |= {
            "speculative_algorithm": algorithm.drafter.upper(),
            "speculative_draft_model_path": job.head,
            "speculative_num_draft_tokens": algorithm.num_nodes,
        }
    elif algorithm.num_steps:
        is_mtp = algorithm.drafter == "mtp"
        options |= {
            "speculative_algorithm": "NEXTN" if is_mtp else "EAGLE3",
            "speculative_draft_model_path": job.target if is_mtp else job.head,
            "speculative_num_steps": algorithm.num_steps,
            "speculative_eagle_topk": algorithm.topk,
            "speculative_num_draft_tokens": algorithm.num_nodes,
        }
    return options


class Runner:
    """SGLang without our plugin, even if that is installed."""

    plugin: bool = False
    ngram: str = "NGRAM"
    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, job: Job, algorithm: Algorithm) -> None:
        os.environ["SPECDEC_SGLANG"] = "1" if self.plugin else "0"  # before a process of it starts
        make: Callable[..., Any] = Server
        if not job.served:
            import sglang

            make = sglang.Engine
        self.engine = make(
            skip_tokenizer_init=True,  # prompts and outputs are token ids
            disable_radix_cache=True,  # or repeated prompts would be free in this engine only
            **settings(job, algorithm, self.ngram),
            **self.options,
            **job.options,
        )

    def generate(self, prompts: list[list[int]], count: int) -> Generated:
        sampling = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
        outputs = self.engine.generate(input_ids=prompts, sampling_params=sampling)
        rounds = [output["meta_info"].get("spec_verify_ct") for output in outputs]
        return Generated(
            [list(output["output_ids"]) for output in outputs], None if None in rounds else sum(map(int, rounds))
        )
