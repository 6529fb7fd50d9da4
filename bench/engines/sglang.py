"""SGLang, through its offline engine, with the settings its documentation gives for EAGLE-3 (written for 0.5.17)."""

from __future__ import annotations

import os
from typing import Any

from . import Algorithm, Generated, Job, max_batch


def version() -> str:
    import sglang

    return str(sglang.__version__)


class Runner:
    """SGLang as it is, also where our plugin is installed beside it."""

    plugin: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, job: Job, algorithm: Algorithm) -> None:
        os.environ["SPECDEC_SGLANG"] = "1" if self.plugin else "0"  # before any of its processes starts
        import sglang

        drafting: dict[str, Any] = {}
        if algorithm.num_steps:
            drafting = {
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_model_path": job.head,
                "speculative_num_steps": algorithm.num_steps,
                "speculative_eagle_topk": algorithm.topk,
                "speculative_num_draft_tokens": algorithm.num_nodes,
            }
        self.engine = sglang.Engine(
            model_path=job.target,
            dtype=job.dtype,
            skip_tokenizer_init=True,  # prompts and outputs are token ids
            context_length=job.max_len,
            max_running_requests=max_batch(job),
            disable_radix_cache=True,  # or a repeated prompt would be free, here alone
            log_level="error",
            **drafting,
            **self.options,
        )

    def generate(self, prompts: list[list[int]], count: int) -> Generated:
        sampling = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
        outputs = self.engine.generate(input_ids=prompts, sampling_params=sampling)
        rounds = [output["meta_info"].get("spec_verify_ct") for output in outputs]
        return Generated(
            [list(output["output_ids"]) for output in outputs], None if None in rounds else sum(map(int, rounds))
        )
