"""The flags of the commands that keep an engine running, named as SGLang's server names them, and that engine."""

from __future__ import annotations

import argparse
import importlib.util
from typing import TYPE_CHECKING

from . import speculative_flags, tune
from .engine_options import options_of

if TYPE_CHECKING:
    from ..engine import Engine

LONGEST_CONTEXT = 8192  # on a GPU, unless the flags say otherwise

# The packaged model continues text, and knows no conversations: to it they are the text of their messages.
TINY_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="target: a folder or hub id (default: the packaged tiny model)")
    parser.add_argument("--model-path", metavar="PATH", help="the same, as a flag")
    parser.add_argument("--tokenizer-path", metavar="PATH", help="of its tokenizer (default: the model's)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that a tokenizer brings along")
    parser.add_argument("--adapter", metavar="PATH", help="LoRA to merge into the target: a folder or hub id")
    speculative_flags.add_arguments(parser)
    tune.add_tuning(parser)
    parser.add_argument(
        "--context-length",
        type=int,
        metavar="N",
        help="longest sequence, prompt included (default: the model's, at most 8192 on a GPU, 2048 on the CPU)",
    )
    parser.add_argument(
        "--max-running-requests", type=int, metavar="N", help="requests that run at once (64 on a GPU, 8 on the CPU)"
    )
    parser.add_argument(
        "--mem-fraction-static", type=float, metavar="F", help="share of the GPU's memory to take (0.85)"
    )
    parser.add_argument("--chunked-prefill-size", type=int, metavar="N", help="rows of a prefill (2048)")
    parser.add_argument("--page-size", type=int, metavar="N", help="KV rows per page (16)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of weights and KV")
    parser.add_argument("--kv-cache-dtype", choices=["fp8_e4m3"], help="of KV, if it is to have 8 bits")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument(
        "--enable-deterministic-inference", action="store_true", help="the same bits whatever runs beside a request"
    )
    parser.add_argument(
        "--disable-radix-cache",
        action="store_true",
        help="prefill every prompt whole (default: what texts before have begun with is kept, unless layers have "
        "windows or inference is deterministic)",
    )
    parser.add_argument("--disable-cuda-graph", action="store_true", help="launch rounds kernel by kernel")
    parser.add_argument(
        "--grammar-backend",
        choices=["xgrammar", "none"],
        help="what holds texts to JSON schemas and grammars (default: xgrammar where it is installed)",
    )
    parser.add_argument("--chat-template", metavar="FILE", help="a template in Jinja (default: the tokenizer's)")


def resolve(args: argparse.Namespace) -> tuple[speculative_flags.Chosen, str | None]:
    """What the flags ask for, and the chat template in place of the target's own; sets `args.model` to the target, None
    for the tiny one.

    Raises:
        ValueError: two targets. OSError: no such template. Both: what `drafts.choose` refuses.
    """
    if args.model is not None and args.model_path is not None:
        raise ValueError(f"--model-path is {args.model_path}, expected none beside {args.model}")
    args.model = args.model or args.model_path
    chosen = speculative_flags.choose(args)
    if args.chat_template is None:
        return chosen, TINY_TEMPLATE if args.model is None else None
    with open(args.chat_template, encoding="utf-8") as file:
        return chosen, file.read()


def open_engine(args: argparse.Namespace, chosen: speculative_flags.Chosen, num_slots: int | None = None) -> Engine:
    """The engine that the flags ask for.

    Args:
        chosen: what `resolve` gave.
        num_slots: in place of `--max-running-requests`.

    Raises:
        ValueError, OSError: what the engine refuses.
    """
    from ..engine import Engine
    from ..models.families import position_limit
    from ..models.weights.loading import config_of

    model, _, draft, on_gpu = chosen
    max_len = args.context_length
    if max_len is None and on_gpu:
        max_len = min(LONGEST_CONTEXT, position_limit(config_of(model)) or LONGEST_CONTEXT)
    mem_fraction = args.mem_fraction_static
    options = options_of(
        args,
        adaptive=args.speculative_adaptive if draft is not None else None,
        max_len=max_len,
        num_slots=num_slots or args.max_running_requests or (64 if on_gpu else 8),
        mem_fraction=0.85 if mem_fraction is None and on_gpu else mem_fraction,
        prefix_cache=False if args.disable_radix_cache else None,
        grammars=grammars_of(args),
    )
    return Engine(model, draft, options=options)


def grammars_of(args: argparse.Namespace) -> bool:
    installed = importlib.util.find_spec("xgrammar") is not None
    if args.grammar_backend == "xgrammar" and not installed:
        raise ValueError(
            '--grammar-backend is xgrammar, expected none without it (pip install "specdec-kernels[grammar]")'
        )
    return installed and args.grammar_backend != "none"
