"""The engine: a target, a draft, paged KV, and continuous batching over fixed slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from .. import _C
from ..models.causal_lm import CausalLM
from ..models.eagle3 import feature_layers, read_config
from ..status import FinishReason, Status
from .drafts import build_draft
from .executor import Executor
from .outputs import NewTokens, RequestOutput, RequestStats
from .params import SamplingParams, Speculation
from .state import SlotState

MAX_STOP_TOKENS = 16

OnTokens = Callable[[NewTokens], None]


class Engine:
    """Generates with a Hugging Face causal language model by speculative decoding.

    The output of every algorithm is the target's own greedy text: speculation changes the speed alone.

    Args:
        model: path or hub id of the target (Llama, Mistral, Qwen2, Qwen3).
        speculation: how to draft; default none.
        max_len: longest sequence, prompt included. None: 2048, or the model's limit if that is less.
        num_slots: requests that run at once; more wait.
        num_pages: KV pages in the pool. None: enough for every slot at `max_len`.
        page_size: KV rows per page.
        prefill_chunk: longest piece of a prompt run between two rounds.
        dtype: of weights and KV. None: the checkpoint's own on CUDA, float32 on the CPU.
        device: None: CUDA where torch has it and this build has kernels, else the CPU.
        compile: compile each decoder layer with torch.compile.

    Raises:
        ValueError: an unsupported model, a pool that cannot hold one request of `max_len`.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        speculation: Speculation | None = None,
        max_len: int | None = None,
        num_slots: int = 8,
        num_pages: int | None = None,
        page_size: int = 16,
        prefill_chunk: int = 512,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        compile: bool = False,
    ) -> None:
        self.speculation = speculation = speculation or Speculation()
        self.device = torch.device(device or default_device())
        config = AutoConfig.from_pretrained(str(model))
        self.max_len = max_len = max_len or min(2048, config.max_position_embeddings)
        self.dtype = dtype or (torch.float32 if self.device.type == "cpu" else config.dtype or torch.bfloat16)
        self.tokenizer: Any = load_tokenizer(model)
        self.eos_token_ids = eos_token_ids(config, self.tokenizer)

        width = speculation.num_nodes if speculation.algorithm == "NGRAM" else speculation.num_steps + 1
        scratch = speculation.topk * (speculation.num_steps - 1) + 1
        model_draft = speculation.algorithm in ("EAGLE3", "STANDALONE")
        # Rows a round may write beyond L: the tree, the accepted rows, the draft's scratch (docs/round.md).
        reserve = max(speculation.num_nodes, width, scratch if model_draft else 0) + 1
        max_pages = -(-(max_len + reserve) // page_size)
        num_pages = num_pages or num_slots * max_pages

        layers: tuple[int, ...] = ()
        if speculation.algorithm == "EAGLE3":
            layers = feature_layers(read_config(Path(str(speculation.draft_model))), config.num_hidden_layers)
        self.target = CausalLM(
            model,
            max_len=max_len,
            num_pages=num_pages,
            page_size=page_size,
            dtype=self.dtype,
            device=self.device,
            feature_layers=layers,
        )
        if compile:
            self.target.compile_layers()
        self.state = SlotState.create(
            num_slots=num_slots,
            max_len=max_len,
            max_stop_tokens=MAX_STOP_TOKENS,
            num_pages=num_pages,
            max_pages=max_pages,
            page_size=page_size,
            device=self.device,
        )
        self.draft = build_draft(speculation, self.state, self.target, num_pages=num_pages, max_len=max_len)
        self.draft.feature_layers = layers
        self._executor = Executor(self.target, self.draft, self.state, reserve, self._emit)
        self._scheduler = _C.Scheduler(
            self._executor,
            num_slots=num_slots,
            num_pages=num_pages,
            page_size=page_size,
            max_len=max_len,
            reserve=reserve,
            accept_width=self.draft.accept_width,
            prefill_chunk=prefill_chunk,
            out_tokens=self._executor.out_tokens,
            out_len=self._executor.out_len,
            finish_reasons=self._executor.finish_reasons,
            status=self._executor.status,
            num_nodes=self._executor.num_nodes,
        )
        self._running: dict[int, RequestOutput] = {}
        self._on_tokens: OnTokens | None = None

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_tokens: OnTokens | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (text or token ids, one or a list); returns one output each, in their order.

        Args:
            prompts: uneven lengths are fine; more prompts than slots wait their turn.
            params: one for all, or one each.
            on_tokens: called with every round's new tokens of every request, as they are committed.

        Raises:
            ValueError: an empty prompt, or one that leaves no room below `max_len`; then nothing has started.
        """
        token_lists = [self._tokenize(prompt) for prompt in as_list(prompts)]
        each = [params or SamplingParams()] * len(token_lists) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(token_lists):
            raise ValueError(
                f"generate: params has {len(each)} entries, expected one, or {len(token_lists)} like prompts"
            )

        outputs = [RequestOutput(index, tokens) for index, tokens in enumerate(token_lists)]
        submitted: list[int] = []
        try:
            for output, sampling in zip(outputs, each, strict=True):
                request_id = self._scheduler.submit(
                    output.prompt_tokens, sampling.max_new_tokens, self._stop_tokens(sampling)
                )
                submitted.append(request_id)
                self._running[request_id] = output
            self._on_tokens = on_tokens
            self._scheduler.run_until_idle()
        finally:
            for request_id in submitted:
                if self._running.pop(request_id, None) is not None:
                    self._scheduler.cancel(request_id)
            self._on_tokens = None
        return outputs

    def _tokenize(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise ValueError("generate: prompts has text, expected token ids (the model folder has no tokenizer)")
        tokens: list[int] = self.tokenizer(prompt)["input_ids"]
        return tokens

    def _stop_tokens(self, sampling: SamplingParams) -> list[int]:
        stop = sampling.stop_token_ids
        if stop is None:
            stop = [] if sampling.ignore_eos else self.eos_token_ids
        if len(stop) > MAX_STOP_TOKENS:
            raise ValueError(
                f"SamplingParams: stop_token_ids has {len(stop)} entries, expected at most {MAX_STOP_TOKENS}"
            )
        return list(stop)

    def _emit(
        self,
        request_id: int,
        tokens: list[int],
        finish_reason: int,
        rounds: int,
        drafted: int,
        accepted: int,
        status: int,
    ) -> None:
        """The scheduler's report on one request, after a round or at its end."""
        output = self._running.get(request_id)
        if output is None:  # of a `generate` that was interrupted
            return
        output.tokens += tokens
        output.stats = RequestStats(rounds, drafted, accepted)
        output.finish_reason = FinishReason(finish_reason)
        if output.finish_reason != FinishReason.RUNNING:
            del self._running[request_id]
            if self.tokenizer is not None:
                output.text = self.tokenizer.decode(output.tokens, skip_special_tokens=True)
        if status:
            raise RuntimeError(f"generate: request {output.index} was ended by {Status(status)!r}")
        if self._on_tokens is not None:
            self._on_tokens(NewTokens(output.index, tokens, output.finish_reason))


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and _C.cuda_version else "cpu")


def load_tokenizer(model: str | Path) -> Any:
    """The model's tokenizer, or None where its folder has none."""
    try:
        return AutoTokenizer.from_pretrained(str(model))
    except (OSError, ValueError):
        return None


def eos_token_ids(config: Any, tokenizer: Any) -> list[int]:
    eos = config.eos_token_id
    if eos is None and tokenizer is not None:
        eos = tokenizer.eos_token_id
    return [] if eos is None else list(eos) if isinstance(eos, list) else [eos]


def as_list(prompts: str | Sequence[int] | Sequence[str | Sequence[int]]) -> Sequence[str | Sequence[int]]:
    """A single prompt, text or token ids, as a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts  # type: ignore[list-item,return-value]
