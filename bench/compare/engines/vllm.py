"""vLLM through its offline `LLM`; its EAGLE-3 drafts are chains. Written for 0.26 to 0.33."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from . import BLOCK_DRAFTERS, Algorithm, Generated, Job, kv_tokens, max_batch

DRAFTS = "vllm:spec_decode_num_drafts"  # counter of rounds with drafts
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"  # counter of accepted drafts


def version() -> str:
    """Return the version of the package."""
    import vllm

    return str(vllm.__version__)


def cache_bytes(job: Job, algorithm: Algorithm, kv_tokens: int) -> int:
    """Return the bytes of `kv_tokens` tokens in the target and a head of one layer or a block drafter as wide.

    Gated delta nets have states instead, one more than drafts for each request.
    """
    config = json.loads((Path(job.target) / "config.json").read_text())
    layers = 1
    if algorithm.drafter in BLOCK_DRAFTERS:
        layers = json.loads((Path(job.head) / "config.json").read_text())["num_hidden_layers"]
    recurrent = config.get("layer_types", []).count("linear_attention")
    layers += config["num_hidden_layers"] - recurrent
    states = 0
    if recurrent:
        keys, values = (config[f"linear_{of}_head_dim"] for of in ("key", "value"))
        wide = 2 * keys * config["linear_num_key_heads"] + values * config["linear_num_value_heads"]
        state = 4 * keys * values * config["linear_num_value_heads"] + 2 * wide * (config["linear_conv_kernel_dim"] - 1)
        states = max_batch(job) * (1 + algorithm.num_steps) * recurrent * state
    kv: int = kv_tokens * 4 * config["num_key_value_heads"] * config["head_dim"] * layers
    return kv + states * 5 // 4


class Runner:
    """vLLM without our plugin, even if that is installed."""

    plugin: bool = False
    # Match n-grams from two tokens on instead of five, its default: it drafts more often then.
    ngram: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}  # noqa: RUF012
    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, job: Job, algorithm: Algorithm) -> None:
        os.environ["SPECDEC_VLLM"] = "1" if self.plugin else "0"  # before a process of it starts
        import vllm

        shared, drafting = {}, {}
        if (room := kv_tokens(job)) is not None:  # the first sets the size; the second must be free at the start
            shared = {"kv_cache_memory_bytes": cache_bytes(job, algorithm, room), "gpu_memory_utilization": 0.2}
        is_ngram = algorithm.drafter == "ngram"
        if is_ngram:
            drafting = {"speculative_config": self.ngram | {"num_speculative_tokens": algorithm.num_steps}}
        elif algorithm.num_steps:
            config: dict[str, Any] = {"method": algorithm.drafter, "num_speculative_tokens": algorithm.num_steps}
            if algorithm.drafter != "mtp":
                config["model"] = job.head
            if algorithm.adaptive:  # vLLM's adaptive verification, since 0.28
                config["enable_adaptive_verification"] = True
            drafting = {"speculative_config": config | self.options}  # the options of the target do not apply to drafts
        self.llm = vllm.LLM(
            job.target,
            dtype=job.dtype,
            skip_tokenizer_init=True,  # prompts and outputs are token ids
            max_model_len=job.max_len,
            max_num_seqs=max_batch(job),
            enable_prefix_caching=False,  # or repeated prompts would be free in this engine only
            disable_log_stats=False,  # needed for its counters
            **shared,
            **drafting,
            **self.options,
            **job.options,
        )
        # N-gram rounds without drafts are not counted: the number of rounds follows from accepted drafts.
        self.counter = None if not drafting else ACCEPTED if is_ngram else DRAFTS

    def generate(self, prompts: list[list[int]], count: int) -> Generated:
        import vllm

        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        before = self.counted()
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        tokens, counted = [list(output.outputs[0].token_ids) for output in outputs], self.counted() - before
        if self.counter == ACCEPTED:  # a round emits one token more, and the first token is of no round
            return Generated(tokens, sum(len(t) - 1 for t in tokens) - counted)
        return Generated(tokens, None if self.counter is None else counted)

    def counted(self) -> int:
        """Return the counter's value."""
        if self.counter is None:
            return 0
        return sum(int(metric.value) for metric in self.llm.get_metrics() if metric.name == self.counter)
