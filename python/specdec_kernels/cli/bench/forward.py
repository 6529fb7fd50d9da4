"""`specdec bench forward`: time the target's forward pass, and its GEMMs alone."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from ...synthetic.names import SHAPES
from ..arguments import CommandParser, at_least
from ..optional_dependencies import require
from ..table import print_table
from . import modules
from .ops import WORDS
from .output import NO_CUDA, find_device, refuse, refuse_files

COMMAND = "bench forward"
ROWS = "1x1,4x1,1x6,16x1,1x32,64x1,16x6,64x6,16x32,64x32"


def add_command(bench: CommandParser) -> None:
    """Add the benchmark's parser."""
    parser = bench.add_command(
        "forward",
        description="Time the target's forward pass and its GEMMs alone, on a GPU: what is left to gain in a round.",
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b", help="shape of the target (qwen3-8b)")
    parser.add_argument("--layers", type=at_least(1), metavar="N", help="layers of the target (the shape's)")
    parser.add_argument("--weights", choices=WORDS["weights"], help="how the layers are stored (default: in 16 bits)")
    parser.add_argument(
        "--rows", type=sizes, default=sizes(ROWS), metavar="BxN", help=f"requests x nodes, comma-separated ({ROWS})"
    )
    parser.add_argument("--prefix", type=at_least(1), default=430, metavar="N", help="tokens before the trees (430)")
    parser.add_argument("--kernels", action="store_true", help="also the time of kernels by kind, from the profiler")
    parser.add_argument("--json", metavar="FILE", help="write the times to FILE")
    parser.set_defaults(run=run)


def sizes(text: str) -> list[tuple[int, int]]:
    """Parse requests x nodes, separated by commas."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(,[1-9]\d*x[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not REQUESTSxNODES, separated by commas")
    return [(int(batch), int(nodes)) for batch, _, nodes in (item.partition("x") for item in text.split(","))]


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if not require(COMMAND, "engine", ["torch", "transformers", "safetensors"]):
        return 2
    device = find_device(None)
    if device is None or device.type != "cuda":
        return refuse(NO_CUDA.removeprefix("--device cuda "), COMMAND)
    if (code := refuse_files(args, COMMAND)) is not None:
        return code
    measure = modules.forward.measure_forward
    shape = args.shape if args.layers is None else f"{args.shape}:{args.layers}"
    results = measure(shape, args.weights, args.rows, args.prefix, args.kernels)
    columns = list(dict.fromkeys(name for result in results for name in result))
    whole = ("batch", "nodes")
    print_table(columns, [[str(r[c]) if c in whole else f"{r.get(c, 0):.3f}" for c in columns] for r in results])
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0
