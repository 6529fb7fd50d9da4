"""SGLang, through its offline engine or its server, with the settings its documentation gives for EAGLE-3 and n-grams
(written for 0.5.17)."""

from __future__ import annotations

import os
import sys
from typing import Any

from . import SERVED, Algorithm, Generated, Job, kv_tokens, max_batch


def version() -> str:
    import sglang

    return str(sglang.__version__)


def settings(job: Job, algorithm: Algorithm, ngram: str = "NGRAM") -> dict[str, Any]:
    """What its engine and its server are told alike; `ngram` is the name of what drafts n-grams."""
    told: dict[str, Any] = {
        "model_path": job.target,
        "dtype": job.dtype,
        "context_length": job.max_len,
        # One more than come: SGLang counts a request whose prompt it reads in chunks twice, and the last one would wait
        # until another has ended.
        "max_running_requests": max_batch(job) + 1,
        "log_level": "error",
    }
    if (room := kv_tokens(job)) is not None:
        told["max_total_tokens"] = room
    if algorithm.ngram:
        told |= {"speculative_algorithm": ngram, "speculative_num_draft_tokens": algorithm.num_nodes}
    elif algorithm.num_steps:
        told |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": job.head,
            "speculative_num_steps": algorithm.num_steps,
            "speculative_eagle_topk": algorithm.topk,
            "speculative_num_draft_tokens": algorithm.num_nodes,
        }
    return told


class Runner:
    """SGLang as it is, also where our plugin is installed beside it."""

    plugin: bool = False
    ngram: str = "NGRAM"
    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, job: Job, algorithm: Algorithm) -> None:
        os.environ |= self.environment()  # before any of its processes starts
        import sglang

        self.engine = sglang.Engine(
            skip_tokenizer_init=True,  # prompts and outputs are token ids
            disable_radix_cache=True,  # or a repeated prompt would be free, here alone
            **settings(job, algorithm, self.ngram),
            **self.options,
        )

    @classmethod
    def environment(cls) -> dict[str, str]:
        return {"SPECDEC_SGLANG": "1" if cls.plugin else "0"}

    @classmethod
    def server(cls, job: Job, algorithm: Algorithm, port: int) -> list[str]:
        """What starts its server."""
        told = settings(job, algorithm, cls.ngram) | cls.options | {"port": port, "served_model_name": SERVED}
        flags = (word for name, value in told.items() for word in ("--" + name.replace("_", "-"), str(value)))
        return [sys.executable, "-m", "sglang.launch_server", *flags]

    def generate(self, prompts: list[list[int]], count: int) -> Generated:
        sampling = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
        outputs = self.engine.generate(input_ids=prompts, sampling_params=sampling)
        rounds = [output["meta_info"].get("spec_verify_ct") for output in outputs]
        return Generated(
            [list(output["output_ids"]) for output in outputs], None if None in rounds else sum(map(int, rounds))
        )
