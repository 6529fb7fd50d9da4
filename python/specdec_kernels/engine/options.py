"""Options of an engine: name, type, default, meaning and check of each, in one place.

`Engine`, `EngineConfig`, the command line and `hf.generate` read this list, and none of them repeats it.
"""

# `option` returns a dataclass field.
# ruff: noqa: RUF009

from __future__ import annotations

import inspect
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

RING_DEPTH = 16  # records in the rings of commands and of results; rounds in flight stay below it

Class = TypeVar("Class")
TuningSource = str | Path | Mapping[str, Any]


# Types of options in messages.
WORDS: dict[Any, str] = {
    bool: "True, False",
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a path",
    Sequence: "a list",
    Mapping: "a dict",
    torch.dtype: "a dtype of torch",
    torch.device: "a device of torch",
    type(None): "None",
}


def option(default: Any, doc: str) -> Any:
    """Declare a field of `EngineOptions` with its default and the text that `help` shows for it."""
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Keyword options of `Engine`. A value of None leaves the choice to the engine.

    Raises:
        ValueError: an option out of range, or two options that exclude each other. Options that depend on the model,
            the draft or the device are checked by `EngineConfig.resolve`.
    """

    adaptive: bool | None = option(
        None,
        "choose in each round how many of the draft's nodes to verify, from measured costs and the acceptance seen so "
        "far, down to plain decoding. None: True, except with sampled drafts, with batch_invariant, and on CUDA "
        "without CUDA graphs.",
    )
    adapter: str | Path | None = option(
        None,
        "path or hub id of a LoRA in PEFT's format. It is merged into the weights while the model, a path or hub id, "
        "is loaded. A model that is itself the folder of a LoRA is merged into the base model that the LoRA names.",
    )
    tokenizer: Any = option(
        None,
        "a tokenizer of transformers, or the path or hub id of one. None: that of the adapter, if it has one, else "
        "that of the model, a path or hub id. An engine without a tokenizer takes token ids only.",
    )
    trust_remote_code: bool = option(False, "run code that comes with the tokenizer. A model's own code never runs.")
    max_len: int | None = option(
        None, "longest sequence in tokens, prompt included. None: 2048, or the model's limit if that is lower."
    )
    num_slots: int = option(8, "requests that run at the same time; others wait.")
    num_pages: int | None = option(
        None,
        "KV pages in the pool. None: enough for every slot at max_len, or what mem_fraction leaves. If every layer has "
        "a sliding window, a request holds only the pages of its window and about prefill_chunk further rows.",
    )
    mem_fraction: float | None = option(
        None,
        "fraction of the GPU's memory for weights, CUDA graphs, prefill and KV pages together, above 0, at most 1.",
    )
    page_size: int = option(16, "KV rows per page.")
    prefill_chunk: int = option(
        2048, "prompt rows prefilled between two rounds at most; longer prompts are split into chunks."
    )
    dtype: torch.dtype | None = option(
        None, "dtype of weights and KV. None: that of the checkpoint on CUDA, float32 on the CPU."
    )
    kv_dtype: str | torch.dtype | None = option(
        None,
        "dtype of KV: None, that of the weights, or 'fp8_e4m3', which holds twice as many tokens as 16 bits. The "
        "output is then that of the target with quantized KV, whatever the draft. Scales are those of the checkpoint, "
        "else measured at startup. The KV of a Standalone draft is quantized as well, that of an EAGLE head is not.",
    )
    device: str | torch.device | None = option(
        None, "cpu or cuda. None: CUDA if torch finds a GPU and this build has CUDA kernels, else the CPU."
    )
    cuda_graph: bool = option(True, "on CUDA, capture rounds as CUDA graphs. False: launch them kernel by kernel.")
    batch_sizes: Sequence[int] | None = option(
        None,
        "batch sizes of rounds, increasing, up to num_slots. A round is padded to the next of them, and each of them "
        "is captured. None: sizes about a third apart with CUDA graphs, all sizes without.",
    )
    rounds_in_flight: int | None = option(
        None,
        "rounds launched before their results are read. None: 2 on CUDA (one round is launched while another runs), "
        "else 1.",
    )
    prefix_cache: bool | None = option(
        False,
        "keep the KV pages of finished requests while there is room, and reuse full pages of them for requests with "
        "the same prefix, in target and draft (docs/round.md, section 8). Samples of one prompt that start together "
        "prefill it once. Texts are equal up to proven near-ties, as between batches of different composition. Refused "
        "with batch_invariant. None: enabled, except with batch_invariant, drafts that keep more of a prompt than KV, "
        "and models whose layers give back pages below a sliding window.",
    )
    num_snapshots: int | None = option(
        None,
        "with prefix_cache, states of prefixes that are kept for models with recurrent layers, whose prefixes are "
        "reused only where there is one; the least recently used is replaced. None: as many as num_slots.",
    )
    snapshot_rows: int = option(
        4096,
        "prompt rows between two of these states, in whole pages. Each prompt also has one at its last whole page.",
    )
    batch_invariant: bool = option(
        False,
        "make a request's result bitwise independent of the batch. All rounds have one size (num_slots requests, all "
        "nodes), attention splits KV at fixed rows, which is slower for few requests, and drafts keep the calibration "
        "they start with. A request that is retracted for lack of pages may differ from then on, since its output so "
        "far is prefilled as a prompt. Refused for models with experts.",
    )
    tp: int | None = option(
        None,
        "GPUs of this host that the target is divided among, with a rank on each (docs/tensor_parallel.md). The engine "
        "starts the other ranks, unless torchrun has: there, the first rank runs the script from here on; the others "
        "serve it until it closes the engine, and exit. The model must be a path or hub id. None: 1.",
    )
    custom_all_reduce: bool = option(
        True,
        "with tp on CUDA, reduce small tensors of captured rounds by kernels that write to the memory of the other "
        "GPUs, if 2, 4 or 8 GPUs reach each other's memory (docs/tensor_parallel.md). False: by NCCL, which is slower.",
    )
    implementation: str = option(
        "auto",
        "of the target: 'native' (our layers, for registered families), 'transformers' (its modules, our attention; "
        "slower, and checked against the module's own logits at startup), or 'auto': native where our layers can "
        "express the model.",
    )
    grammars: bool = option(
        False,
        "allow SamplingParams.json_schema, regex and grammar. Each round is then two CUDA graphs with a host step in "
        "between, and each node has a mask of V / 8 bytes.",
    )
    tuning: TuningSource | None = option(
        None,
        "the value of Engine.tuning, or the file that `specdec tune --out` wrote (docs/tuning.md): the calibration "
        "that the draft starts with, and round costs where the same rounds were measured. None: nothing is known.",
    )
    calibrate: bool = option(
        True,
        "let drafts with a model learn from acceptance how likely their candidates are. False: scores stay as the "
        "draft's own probabilities give them, or as tuning calibrates them. Engines with batch_invariant learn nothing "
        "either way.",
    )
    trace: str | Path | None = option(
        None,
        "file for a Chrome trace of the loop and its rounds, rewritten at the end of each generate(). If writing "
        "fails, the outputs are returned with a warning.",
    )
    progress: bool = option(False, "show progress while CUDA graphs are captured.")

    def __post_init__(self) -> None:
        self._check_kinds()
        if self.max_len is not None:
            check_at_least(2, max_len=self.max_len)
        check_at_least(1, num_slots=self.num_slots, page_size=self.page_size, prefill_chunk=self.prefill_chunk)
        check_at_least(1, snapshot_rows=self.snapshot_rows)
        if self.num_snapshots is not None:
            check_at_least(0, num_snapshots=self.num_snapshots)
        if self.tp is not None:
            check_at_least(1, tp=self.tp)
        if self.rounds_in_flight is not None:
            check_range("Engine: rounds_in_flight", self.rounds_in_flight, 1, RING_DEPTH - 1)
        self._check_mem_fraction()
        self._check_batch_sizes()
        self._check_batch_invariant()

    def _check_kinds(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            if hint is not Any:
                check_kind(f"Engine: {name}", getattr(self, name), hint)
            check_name(f"Engine: {name}", getattr(self, name))
            if getattr(self, name) == "" and name in ("adapter", "tokenizer", "tuning", "trace"):
                raise ValueError(f"Engine: {name} is '', expected a path or None")
        is_one = hasattr(self.tokenizer, "decode") and not isinstance(self.tokenizer, bytes | bytearray)
        if not (isinstance(self.tokenizer, str | Path | None) or is_one):
            kind = type(self.tokenizer).__name__
            raise ValueError(f"Engine: tokenizer is a {kind}, expected one of transformers, a path or a hub id")

    def _check_mem_fraction(self) -> None:
        if self.mem_fraction is None:
            return
        if self.num_pages is not None:
            raise ValueError(f"Engine: num_pages is {self.num_pages}, expected None with mem_fraction")
        if not 0 < self.mem_fraction <= 1:
            raise ValueError(f"Engine: mem_fraction is {self.mem_fraction}, expected above 0 and at most 1")

    def _check_batch_sizes(self) -> None:
        if self.batch_sizes is None:
            return
        sizes = list(self.batch_sizes)
        for size in sizes:
            check_integer("Engine: batch_sizes", size)
        if not sizes or sizes[0] < 1 or sizes[-1] != self.num_slots or sorted(set(sizes)) != sizes:
            raise ValueError(f"Engine: batch_sizes is {sizes}, expected rising sizes up to num_slots={self.num_slots}")

    def _check_batch_invariant(self) -> None:
        if not self.batch_invariant:
            return
        if self.batch_sizes is not None and len(self.batch_sizes) > 1:
            raise ValueError(f"Engine: batch_sizes is {list(self.batch_sizes)}, expected one size with batch_invariant")
        if self.adaptive:
            raise ValueError("Engine: adaptive is set, expected not with batch_invariant")
        if self.prefix_cache:
            raise ValueError(
                "Engine: prefix_cache is set, expected not with batch_invariant "
                "(rows that another request has written are equal up to rounding)"
            )


def check_kind(what: str, value: Any, hint: Any) -> None:
    """Raise ValueError for a value, in errors `what`, of another type than an annotation; a bool is no number."""
    union = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [get_origin(kind) or kind for kind in union]
    abstract = tuple({int: Integral, float: Real}.get(kind, kind) for kind in kinds)
    if not isinstance(value, abstract) or (isinstance(value, bool) and bool not in kinds):
        words = ", ".join(WORDS[kind] for kind in kinds)
        raise ValueError(f"{what} is {value!r}, expected {' or '.join(words.rsplit(', ', 1))}")
    if int in kinds and value is not None and not -(2**31) <= value < 2**31:
        raise ValueError(f"{what} is {value}, expected an integer of 32 bits")


def check_name(what: str, value: Any) -> None:
    """Raise ValueError for a path or hub id, in errors `what`, that no file can have: other values are no concern."""
    if isinstance(value, str | Path):
        try:
            is_name = b"\0" not in os.fsencode(value)
        except UnicodeEncodeError:
            is_name = False
        if not is_name:
            raise ValueError(f"{what} is {str(value)!r}, expected a name that a file can have")


def check_at_least(low: int, **arguments: int) -> None:
    """Raise ValueError for an argument below `low`."""
    for name, value in arguments.items():
        if value < low:
            raise ValueError(f"Engine: {name} is {value}, expected at least {low}")


def check_integer(what: str, value: Any) -> None:
    """Raise ValueError for a value, in errors `what`, that is no integer; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{what} is {value!r}, expected an integer")


def check_range(what: str, value: Any, low: int, high: int) -> None:
    """Raise ValueError for a value, in errors `what`, that is no integer from `low` to `high`."""
    check_integer(what, value)
    if not low <= value <= high:
        raise ValueError(f"{what} is {value}, expected {low} to {high}")


def documents_options(kind: type[Class]) -> type[Class]:
    """Spell out the options in the signature and the docstring of a class that takes them as keyword arguments."""
    signature = inspect.signature(kind)
    named = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    named += inspect.signature(EngineOptions).parameters.values()
    kind.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    kind.__doc__ = f"{inspect.getdoc(kind)}\n\nOptions, with defaults:\n{options_text()}"
    return kind


def options_text() -> str:
    """Return a paragraph for each option: name, default, meaning."""
    texts = [f"{each.name} ({each.default!r}): {each.metadata['doc']}" for each in fields(EngineOptions)]
    return "\n".join(textwrap.fill(text, 120, initial_indent=" " * 4, subsequent_indent=" " * 8) for text in texts)
