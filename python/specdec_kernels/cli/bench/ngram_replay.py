"""`specdec bench ngram-replay`: replay a text against the n-gram index."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..arguments import CommandParser, allow_empty, at_least, integers
from ..optional_dependencies import require
from ..progress import progress
from . import modules
from .output import add_json, refuse, refuse_files, show

COMMAND = "bench ngram-replay"
MIN_TOKENS = 32  # of a document
MOST_NODES, MOST_TOKENS = 256, 1 << 29  # of a tree with its root; of the index, half of its room

EPILOG = """\
A token file is a NumPy file (.npy) or plain little-endian int32 (.i32, .bin), with tokens below 0 between documents. A
folder or another file is text, each file a document, cut into pieces much as a tokenizer would. The last documents are
requests: the first tokens of each are the prompt, and what follows is the target's output.

workloads:
  cold    the index starts empty
  warm    it starts with N tokens of the other documents (--warm N)
  edit    the prompt is the document with about every 40th token edited, and the output is the document

  specdec bench ngram-replay tokens.npy
  specdec bench ngram-replay corpus.i32 --drafts 8,16,32 --warm 100000,1000000
  specdec bench ngram-replay path/to/a/folder --suffix .py
"""


def add_command(bench: CommandParser) -> None:
    """Add the benchmark's parser."""
    parser = bench.add_command(
        "ngram-replay",
        description="Replay a text against the n-gram index and print how many drafts are accepted per lookup.",
        epilog=EPILOG,
    )
    parser.add_argument("file", type=Path, help="token file, text file or folder")
    allow_empty(parser.add_argument("--suffix", default="", help="suffix of the files to read in a folder (all)"))
    parser.add_argument(
        "--drafts", type=integers(1), default=[8, 16, 32], metavar="N", help="nodes without the root (8,16,32)"
    )
    parser.add_argument("--warm", type=integers(1), default=[], metavar="N", help="tokens in the index at the start")
    parser.add_argument(
        "--requests", type=at_least(1), default=40, metavar="N", help="documents that are requests (40)"
    )
    parser.add_argument(
        "--prompt",
        type=at_least(1),
        default=256,
        metavar="N",
        help="tokens of a prompt, at most half the document (256)",
    )
    parser.add_argument(
        "--output", type=at_least(1), default=512, metavar="N", help="tokens of an output at most (512)"
    )
    parser.add_argument("--mode", choices=["tree", "chain"], default="tree", help="shape of the drafts (tree)")
    parser.add_argument(
        "--own-weight",
        type=at_least(0.0, 256.0),
        default=4.0,
        metavar="W",
        help="weight of matches in the request's own text (4)",
    )
    parser.add_argument(
        "--recency",
        type=at_least(1e-6, 1.0),
        default=1.0,
        metavar="R",
        help="factor on the weight of a match for each newer match of the same n-gram (1)",
    )
    parser.add_argument(
        "--min-prob", type=at_least(0.0, 1.0), default=0.0, metavar="P", help="least probability of a draft (0)"
    )
    parser.add_argument("--baselines", action="store_true", help="other packages' drafters as well")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if not require(COMMAND, "bench", ["torch", "rich"]):
        return 2
    import torch

    if (code := refuse_files(args, COMMAND)) is not None:
        return code
    replay, record = modules.ngram_replay, modules.record
    try:
        documents = [d for d in replay.read_documents(args.file, args.suffix) if len(d) >= MIN_TOKENS]
    except OSError as error:
        return refuse(f"{args.file} cannot be read ({error.strerror})", COMMAND)
    if max(args.drafts) >= MOST_NODES:
        return refuse(f"--drafts has {max(args.drafts)}, expected at most {MOST_NODES - 1}", COMMAND)
    if args.warm and max(args.warm) > MOST_TOKENS:
        return refuse(f"--warm has {max(args.warm)}, expected at most {MOST_TOKENS}", COMMAND)
    if not documents:
        return refuse(f"{args.file} has no document of {MIN_TOKENS} tokens or more", COMMAND)
    text = replay.Text(documents[: -args.requests], documents[-args.requests :], args.prompt, args.output)
    print(f"{len(documents)} documents, {sum(map(len, documents))} tokens; the last {len(text.requests)} are requests")
    options = {name: getattr(args, name) for name in ("mode", "own_weight", "recency", "min_prob")}
    results = []
    with progress((len(args.warm) + 2) * len(args.drafts)) as advance:
        for result in replay.measure_replay(text, args.file.stem, args.drafts, args.warm, options, args.baselines):
            results.append(result)
            if result.params["drafter"] == "index":
                advance(f"{result.params['workload']}, {result.params['drafts']} drafts")
    run_record = record.record(results, torch.device("cpu"), None, command_line(args))
    show(run_record)
    if args.json:
        record.write_record(run_record, args.json)
    return 0


def command_line(args: argparse.Namespace) -> str:
    """Return the command without the folders of its files."""
    command: str = args.command_line
    for file in (args.file, args.json):
        if file is not None:
            command = command.replace(str(file), Path(file).name)
    return command
