"""`specdec bench engines`: time this engine, SGLang and vLLM on the same synthetic checkpoints."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from ..arguments import CommandParser, at_least, integers, sized_words_of, words_of
from ..optional_dependencies import require
from . import modules
from .output import NO_CUDA, add_device, add_json, add_models, find_device, refuse, refuse_files, show

COMMAND = "bench engines"
ENGINES = ("ours", "sglang", "sglang_fa3", "sglang_plugin", "vllm", "vllm_plugin")
ALGORITHMS = (
    "plain", "chain", "tree", "adaptive", "adaptive_chain", "mtp_chain", "mtp_tree", "mtp_adaptive", "dspark_chain",
    "dspark_tree", "dspark_adaptive", "dflash_chain", "dflash_tree", "ngram"
)  # fmt: skip

EPILOG = """\
A synthetic target and its drafts are written to --out in published formats. Each engine loads them in a process of
its own and greedily continues pieces of a known text; every token is checked. Tokens per second are those of decoding
alone: a long run minus a short one.
  specdec bench engines --shape qwen3-8b --acceptance code --batch 1,4,16,64 --engines ours,sglang --out checkpoints

engines:
  ours                        this engine
  sglang, vllm                as installed, without our plugin
  sglang_fa3                  SGLang with FA3 for trees, where its default is FlashInfer
  sglang_plugin, vllm_plugin  with our plugin

algorithms:
  plain, chain, tree, adaptive   as in `specdec bench round`; vLLM has no trees
  chain4, mtp_chain6, tree16     chains and trees of 4, 6 and 16 tokens
  adaptive_chain                 chains of adaptive length; in vLLM, adaptive verification
  mtp_chain, mtp_tree, mtp_adaptive
                                 an MTP layer in the target's checkpoint, for shapes whose models ship with one, the
                                 hybrids: 3 steps and 4 tokens; 4 steps, topk 4 and 16 tokens; the same, adaptive
  dspark_chain, dflash_chain     a block drafter of 5 layers, 7 drafts in one pass: a chain of 8 tokens
  dspark_tree, dspark_adaptive, dflash_tree
                                 trees of 32 tokens over its trellis, in this engine alone; adaptive
  ngram                          12 tokens verified per round; prompts quote the expected output
  tree+ngram, dspark_tree16+ngram, ...
                                 a union of a chain, a tree or an adaptive one with the n-gram index, in this engine
                                 alone; prompts quote the expected output
"""


def add_command(bench: CommandParser) -> None:
    """Add the benchmark's parser."""
    parser = bench.add_command(
        "engines",
        description="Compare engines on the same checkpoints: this one, SGLang and vLLM, where they are installed.",
        epilog=EPILOG,
    )
    add_models(parser)
    parser.add_argument("--layers", type=at_least(1), metavar="N", help="layers of the target (the shape's)")
    parser.add_argument(
        "--engines",
        type=words_of(ENGINES),
        default=list(ENGINES),
        metavar="NAME",
        help="engines to time, comma-separated (all that are installed)",
    )
    parser.add_argument(
        "--path",
        action="append",
        default=[],
        type=engine_and_folders,
        metavar="ENGINE=FOLDER[:FOLDER]",
        help="folders that an engine's process searches for packages first; repeat the flag for several",
    )
    parser.add_argument(
        "--options",
        action="append",
        default=[],
        type=engine_and_options,
        metavar="ENGINE=JSON",
        help="more options of an engine's class (Engine, sglang.Engine, vllm.LLM); repeat the flag for several",
    )
    parser.add_argument(
        "--algorithm",
        type=sized_words_of(ALGORITHMS),
        default=[name for name in ALGORITHMS if not name.startswith(("mtp", "dspark", "dflash"))],
        metavar="NAME",
        help="how to draft, comma-separated (all without MTP and block drafters)",
    )
    parser.add_argument(
        "--batch", type=integers(1), default=[1, 4, 16, 64], metavar="N", help="requests in a batch (1,4,16,64)"
    )
    parser.add_argument("--input", type=at_least(1), default=321, metavar="N", help="tokens of a prompt (321)")
    parser.add_argument("--output", type=at_least(2), default=420, metavar="N", help="tokens of the long run (420)")
    parser.add_argument("--short", type=at_least(1), default=20, metavar="N", help="tokens of the short run (20)")
    parser.add_argument("--repeats", type=at_least(1), default=2, metavar="N", help="runs whose median counts (2)")
    parser.add_argument(
        "--max-len", type=at_least(1), metavar="N", help="longest sequence of the engines (what requests need)"
    )
    parser.add_argument(
        "--limit", type=at_least(0.0), default=400.0, metavar="S", help="seconds of one process at most (400)"
    )
    parser.add_argument(
        "--together", type=at_least(1), default=1, metavar="N", help="engines that start at the same time (1)"
    )
    parser.add_argument(
        "--served", action="store_true", help="send requests to SGLang's server, as streams, all at once"
    )
    add_device(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the checkpoints")
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="folder that keeps what each process says (shown if it fails)"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def engine_and_folders(text: str) -> tuple[str, list[str]]:
    """Parse ENGINE=FOLDER[:FOLDER]."""
    engine, _, folders = text.partition("=")
    if engine not in ENGINES or not folders:
        raise argparse.ArgumentTypeError(f"{text!r} is not ENGINE=FOLDER, of {', '.join(ENGINES)}")
    for folder in folders.split(os.pathsep):
        if not os.path.isdir(folder):
            raise argparse.ArgumentTypeError(f"{text!r} has {folder!r}, expected existing folders")
    return engine, folders.split(os.pathsep)


def engine_and_options(text: str) -> tuple[str, dict[str, Any]]:
    """Parse ENGINE=JSON."""
    engine, _, written = text.partition("=")
    try:
        options = json.loads(written)
    except ValueError:
        options = None
    if engine not in ENGINES or not isinstance(options, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not ENGINE=JSON with an object, of {', '.join(ENGINES)}")
    return engine, options


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if not require(COMMAND, "engine", ["torch", "transformers", "safetensors"]):
        return 2
    device = find_device(args.device)
    if device is None:
        return refuse(NO_CUDA, COMMAND)
    if args.short >= args.output:
        return refuse(f"--short is {args.short}, expected less than --output {args.output}", COMMAND)
    if (code := refuse_files(args, COMMAND)) is not None:
        return code
    for flag in ("path", "options"):
        engines = [engine for engine, _ in getattr(args, flag)]
        for engine in engines:
            if engines.count(engine) > 1:
                return refuse(f"--{flag} is given twice for {engine}, expected once", COMMAND)
            if engine not in args.engines:
                return refuse(f"--{flag} is given for {engine}, expected an engine of --engines", COMMAND)
    for flag in ("out", "logs"):
        if (folder := getattr(args, flag)) is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError:
                return refuse(f"--{flag} is {folder}, expected a folder that can be made", COMMAND)
    try:
        found = modules.engine_comparison.compare_engines(comparison_of(args, device), args.command_line)
    except ValueError as error:
        return refuse(str(error), COMMAND)
    if found is None:
        return 2
    show(found)
    if args.json:
        modules.record.write_record(found, args.json)
    lines = found["results"]
    return 1 if any(line["error"] for line in lines) else 2 if any(line["skipped"] for line in lines) else 0


def comparison_of(args: argparse.Namespace, device: Any) -> Any:
    """Return the comparison that the flags ask for."""
    names = ("shape", "layers", "acceptance", "drafter", "engines", "input", "output", "short", "repeats", "max_len")
    return modules.engine_comparison.Comparison(
        **{name: getattr(args, name) for name in names},
        algorithms=args.algorithm,
        batches=args.batch,
        limit=args.limit,
        together=args.together,
        served=args.served,
        folders=dict(args.path),
        options=dict(args.options),
        out=args.out,
        logs=args.logs,
        device=device,
    )
