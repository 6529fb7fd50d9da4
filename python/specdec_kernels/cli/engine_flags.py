"""The flags that configure an engine, named as SGLang's server names them, and the engine they open."""

from __future__ import annotations

import argparse
import importlib.util
from typing import TYPE_CHECKING, Any, NamedTuple

from . import speculative_flags
from .arguments import add_flag, add_model, model_of
from .tuning_flags import add_tuning

if TYPE_CHECKING:
    from ..engine import Engine, EngineOptions

LONGEST_CONTEXT = 8192  # default on a GPU

# The packaged model continues text and has no conversation format: it gets the text of the messages.
TINY_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


class EngineFlag(NamedTuple):
    """A flag that sets one field of `EngineOptions`.

    Attributes:
        option: the field.
        parser: keyword arguments of `add_argument`.
        hidden: earlier spellings, still accepted.
        sets: the value that the flag gives if it takes no argument.
    """

    option: str
    parser: dict[str, Any]
    hidden: tuple[str, ...] = ()
    sets: bool = True

    def value(self, given: Any) -> Any:
        """Return the option's value for what the parser read; None leaves the default."""
        if self.parser.get("action") == "store_true":
            return self.sets if given else None
        if self.option == "dtype" and given is not None:
            import torch

            return getattr(torch, given)
        return given


FLAGS: dict[str, EngineFlag] = {
    "--tokenizer-path": EngineFlag(
        "tokenizer", {"metavar": "PATH", "help": "tokenizer: a folder or hub id (default: the model's)"}
    ),
    "--trust-remote-code": EngineFlag(
        "trust_remote_code", {"action": "store_true", "help": "run code that comes with a tokenizer"}
    ),
    "--adapter": EngineFlag(
        "adapter", {"metavar": "PATH", "help": "LoRA to merge into the target: a folder or hub id"}
    ),
    "--context-length": EngineFlag(
        "max_len",
        {
            "type": int,
            "metavar": "N",
            "help": "longest sequence, prompt included (default: the model's, at most 8192 on a GPU, 2048 on the CPU)",
        },
    ),
    "--max-running-requests": EngineFlag(
        "num_slots",
        {"type": int, "metavar": "N", "help": "requests that run at the same time (64 on a GPU, 8 on the CPU)"},
    ),
    "--mem-fraction-static": EngineFlag(
        "mem_fraction",
        {"type": float, "metavar": "F", "help": "fraction of the GPU's memory to use (0.85)"},
        ("--mem-fraction",),
    ),
    "--chunked-prefill-size": EngineFlag(
        "prefill_chunk",
        {"type": int, "metavar": "N", "help": "prompt rows prefilled between two rounds at most (2048)"},
    ),
    "--page-size": EngineFlag("page_size", {"type": int, "metavar": "N", "help": "KV rows per page (16)"}),
    "--dtype": EngineFlag(
        "dtype",
        {
            "choices": ["float32", "bfloat16", "float16"],
            "help": "dtype of weights and KV (default: the checkpoint's on a GPU, float32 on the CPU)",
        },
    ),
    "--kv-cache-dtype": EngineFlag(
        "kv_dtype",
        {"choices": ["fp8_e4m3"], "help": "dtype of the KV cache (default: that of the weights)"},
        ("--kv-dtype",),
    ),
    "--device": EngineFlag("device", {"help": "cpu or cuda (default: cuda where there is a GPU)"}),
    "--tp": EngineFlag(
        "tp",
        {"type": int, "metavar": "N", "help": "GPUs of this host that the target is divided among (1)"},
        ("--tp-size", "--tensor-parallel-size"),
    ),
    "--disable-custom-all-reduce": EngineFlag(
        "custom_all_reduce",
        {"action": "store_true", "help": "with --tp, reduce small tensors by NCCL instead of kernels of ours"},
        sets=False,
    ),
    "--enable-deterministic-inference": EngineFlag(
        "batch_invariant",
        {"action": "store_true", "help": "make a request's result bitwise independent of the batch"},
        ("--batch-invariant",),
    ),
    "--disable-radix-cache": EngineFlag(
        "prefix_cache",
        {
            "action": "store_true",
            "help": "prefill every prompt whole (default: reuse cached prefixes, unless layers have sliding windows or "
            "inference is deterministic)",
        },
        sets=False,
    ),
    "--disable-cuda-graph": EngineFlag(
        "cuda_graph",
        {"action": "store_true", "help": "launch rounds kernel by kernel"},
        ("--no-cuda-graph",),
        sets=False,
    ),
}


def add_engine_flags(parser: argparse.ArgumentParser, *names: str, **helps: str) -> None:
    """Add the named flags of FLAGS; `helps` replaces the help of a flag, by its option's name."""
    for name in names:
        flag = FLAGS[name]
        add_flag(
            parser, name, *flag.hidden, **flag.parser | ({"help": helps[flag.option]} if flag.option in helps else {})
        )


def options_of(args: argparse.Namespace, **others: Any) -> EngineOptions:
    """Return the engine options that the flags of a command give, and `others`, which the command derives itself.

    Absent flags and None leave the default.

    Raises:
        ValueError: options out of range, or a flag without effect.
    """
    from ..engine import EngineOptions

    if getattr(args, "disable_custom_all_reduce", False) and (args.tp or 1) == 1:
        raise ValueError("--disable-custom-all-reduce is set, expected only with --tp above 1")
    given: dict[str, Any] = {"tuning": getattr(args, "tuning", None)}
    for name, flag in FLAGS.items():
        given[flag.option] = flag.value(getattr(args, name.removeprefix("--").replace("-", "_"), None))
    return EngineOptions(**{name: value for name, value in given.items() if value is not None} | others)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of commands that keep an engine running."""
    add_model(parser, " (default: the packaged tiny model)")
    add_engine_flags(parser, "--tokenizer-path", "--trust-remote-code", "--adapter")
    speculative_flags.add_arguments(parser)
    add_tuning(parser)
    add_engine_flags(
        parser,
        "--context-length",
        "--mem-fraction-static",
        "--chunked-prefill-size",
        "--page-size",
        "--dtype",
        "--kv-cache-dtype",
        "--device",
        "--tp",
        "--disable-custom-all-reduce",
        "--enable-deterministic-inference",
        "--disable-radix-cache",
        "--disable-cuda-graph",
    )
    parser.add_argument("--chat-template", metavar="FILE", help="Jinja template (default: the tokenizer's)")


def add_serving(parser: argparse.ArgumentParser) -> None:
    """Add the flags of an engine that serves many requests."""
    add_engine_flags(parser, "--max-running-requests")
    parser.add_argument(
        "--grammar-backend",
        choices=["auto", "none"],
        help="constraints of texts (default: auto where llguidance and xgrammar are installed)",
    )


def resolve(args: argparse.Namespace) -> tuple[speculative_flags.Chosen, str | None]:
    """Return the draft that the flags ask for, and the chat template in place of the target's own.

    Sets `args.model` to the target, None for the tiny one.

    Raises:
        ValueError: two targets, a template that is none, or what `speculative_flags.choose` refuses.
        OSError: no such template, or what `speculative_flags.choose` refuses.
    """
    from ..engine.text.files import read_text

    args.model = model_of(args)
    chosen = speculative_flags.choose(args)
    if args.chat_template is None:
        return chosen, TINY_TEMPLATE if args.model is None else None
    template = read_text(args.chat_template, "--chat-template")
    if not template.strip():
        raise ValueError(f"--chat-template is {args.chat_template}, which is empty, expected a template")
    return chosen, template


def open_engine(args: argparse.Namespace, chosen: speculative_flags.Chosen, num_slots: int | None = None) -> Engine:
    """Open the engine that the flags ask for, with the draft that `resolve` returned.

    `num_slots` stands for the flags of `add_serving`.

    Raises:
        ValueError: options that the engine refuses.
        OSError: no such model.
    """
    from ..engine import Engine
    from ..models.families import position_limit
    from ..models.weights.model_config import config_of

    model, _, draft, on_gpu = chosen
    max_len = args.context_length
    if max_len is None and on_gpu:
        max_len = min(LONGEST_CONTEXT, position_limit(config_of(model)) or LONGEST_CONTEXT)
    mem_fraction = args.mem_fraction_static
    grammars = num_slots is None and grammars_of(args)
    if num_slots is None:
        num_slots = args.max_running_requests
    if num_slots is None:
        num_slots = 64 if on_gpu else 8
    options = options_of(
        args,
        adaptive=args.speculative_adaptive if draft is not None else None,
        max_len=max_len,
        num_slots=num_slots,
        mem_fraction=0.85 if mem_fraction is None and on_gpu else mem_fraction,
        prefix_cache=False if args.disable_radix_cache else None,
        grammars=grammars,
    )
    return Engine(model, draft, options=options)


def grammars_of(args: argparse.Namespace) -> bool:
    """Return whether the engine allows grammars.

    Raises:
        ValueError: they are asked for, and a backend is not installed.
    """
    missing = [name for name in ("llguidance", "xgrammar") if importlib.util.find_spec(name) is None]
    if args.grammar_backend == "auto" and missing:
        raise ValueError(
            f'--grammar-backend is auto, expected none without {missing[0]} (pip install "specdec-kernels[grammar]")'
        )
    return not missing and args.grammar_backend != "none"
