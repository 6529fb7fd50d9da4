"""`specdec bench round`: time rounds of the engine on synthetic models."""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from ...synthetic.names import DOMAINS, DRAFTERS, SHAPES
from ..algorithms import draft_class
from ..arguments import CommandParser, at_least, integers, sized_words_of, words_of
from ..optional_dependencies import require
from ..progress import progress
from ..speculative_flags import own_draft
from ..tuning_flags import add_tuning, apply_tuning
from . import modules
from .ops import WORDS
from .output import NO_CUDA, add_run_flags, find_device, finish, refuse, refuse_files

COMMAND = "bench round"
SETTINGS = (
    "none", "chain", "tree", "mtp_chain", "mtp_tree", "mtp_adaptive", "standalone", "dspark_chain", "dspark_tree",
    "dspark_adaptive", "dflash_chain", "dflash_tree", "adaptive"
)  # fmt: skip
WRONG = "wrong"

EPILOG = """\
The target has a well-known shape and synthetic weights: it runs at full cost and continues a known text. Its drafts are
accepted as often as a published drafter's were on such texts, with easy and hard stretches. With --weights, layers of
the target are quantized to FP8 by blocks (fp8) or rows (fp8-rows), or to INT4 (int4); its own modules run it with
--implementation transformers. Every token is checked. All requests of a batch arrive at once. Rounds in which all of
them take part are timed, and so is the run, from arrival to the end of the last request:
  specdec bench round --shape qwen3-8b --algorithm none,chain,tree --batch 1,4,16,64 --acceptance code

With --tp N, torchrun starts N ranks on GPUs of one host. Each makes the whole models, so that they must fit its GPU,
and divides the target; a run has one algorithm:
  torchrun --standalone --nproc-per-node 2 -m specdec_kernels bench round --tp 2 --algorithm tree --batch 1,4

algorithms:
  none         plain decoding
  chain, tree  an EAGLE-3 head, 5 steps; topk 1 and 6 tokens, or topk 10 and 32 tokens; chain4, tree8: 4 and 8 tokens
  mtp_chain, mtp_tree
               an MTP layer with an LM head of its own: 3 steps and 4 tokens, or 4 steps, topk 4 and 16 tokens
  standalone   a chain of a small model
  dspark_chain, dflash_chain, dspark_tree, dflash_tree
               a block drafter of 5 layers that drafts 7 tokens, or --speculative-num-steps if they are more: a chain of
               8 tokens, or a tree of 32 over its trellis; dspark_tree16, dspark_chain16: 16 tokens
  adaptive, mtp_adaptive, dspark_adaptive
               the number of tokens is chosen in each round: the engine's default for an EAGLE-3 head, and that of
               mtp_tree and dspark_tree
  tree+ngram, dspark_tree16+ngram, ...
               a union of a chain, a tree or an adaptive one with the n-gram index, which finds nothing in these texts:
               what it costs
  module:Class a draft of your own, with the options that the flags give: made from --speculative-draft-model-path if
               that is given, else from the synthetic EAGLE-3 head or small model if it inherits from Eagle3 or
               Standalone, else from its options alone. Without a synthetic model its acceptance is what it reaches on
               the synthetic text, and the floor counts the target alone

columns:
  gpu           from a round's first kernel to its last, mean; idle: the GPU's share of time between rounds
  host          time of the loop's thread per round (empty on a CPU, where it is the round itself)
  emit, wait    handing out tokens in another thread, and waiting for the device, per round
  nodes         shares of rounds by tree size, which adaptive chooses
  run           tokens per second of the whole run, prefill included
  first token   when half of the requests had their first token

columns of the second table:
  GB            that a round must move at least: weights (of experts, those that its rows select), KV rows read,
                recurrent states read and written; with --tp those of a rank
  time / floor  of rounds; the floor is the time of these bytes, or of the products if that is longer,
                without reductions
  scratch       what recurrent layers keep besides the states, as a share of a copy of the states for each node
"""


def add_command(bench: CommandParser) -> None:
    """Add the benchmark's parser."""
    parser = bench.add_command(
        "round",
        description="Time rounds of the engine on a synthetic model whose text and acceptance are known.",
        epilog=EPILOG,
    )
    add_run_flags(parser)
    parser.add_argument("--batch", type=integers(1), metavar="N", help="requests in a batch, comma-separated")
    parser.add_argument("--shape", choices=SHAPES, help="shape of the target (qwen3-8b on a GPU, tiny on a CPU)")
    parser.add_argument("--layers", type=at_least(1), metavar="N", help="layers of the target (the shape's)")
    parser.add_argument(
        "--algorithm",
        type=settings_or_classes,
        metavar="NAME",
        help=f"how to draft, comma-separated: {', '.join(SETTINGS)}, or a class of your own as module:Class "
        "(none,chain,tree)",
    )
    parser.add_argument(
        "--speculative-algorithm",
        dest="algorithm",
        type=settings_or_classes,
        metavar="NAME",
        default=argparse.SUPPRESS,
        help="the same, by the name that other commands have for it",
    )
    parser.add_argument(
        "--speculative-draft-model-path", metavar="PATH", help="checkpoint of the draft of a class of your own"
    )
    parser.add_argument(
        "--acceptance",
        type=words_of((*DOMAINS, WRONG)),
        metavar="NAME",
        help="texts whose acceptance the drafts have: chat, code, math; or wrong: no draft is right; several with "
        "commas (chat)",
    )
    parser.add_argument(
        "--drafter",
        choices=DRAFTERS,
        help="published drafter whose acceptance the drafts have (that of the algorithm)",
    )
    parser.add_argument("--context-decay", action="store_true", help="acceptance falls with the length of the context")
    parser.add_argument(
        "--accept",
        type=at_least(1.0),
        metavar="N",
        help="instead of --acceptance: every round emits N tokens, and further drafts are wrong",
    )
    parser.add_argument("--input", type=at_least(1), metavar="N", help="tokens of a prompt (321; tiny: 32)")
    parser.add_argument("--output", type=at_least(1), metavar="N", help="tokens generated per request (215; tiny: 32)")
    parser.add_argument(
        "--max-len", type=at_least(1), metavar="N", help="longest sequence of the engine (input + output + 1)"
    )
    parser.add_argument("--dtype", choices=WORDS["dtype"], help="of the model (bfloat16 on a GPU, float32 on a CPU)")
    parser.add_argument("--weights", choices=WORDS["weights"], help="how the target's layers are stored (in --dtype)")
    parser.add_argument(
        "--draft-weights",
        type=words_of(("none", "fp8", "fp8-head")),
        metavar="NAME",
        help="how linears of EAGLE-3 heads and block drafters are stored: none (in --dtype), fp8, or fp8-head, which "
        "is fp8 with a copy of the target's LM head; several with commas (none)",
    )
    for name, metavar in (("num-steps", "N"), ("eagle-topk", "K"), ("num-draft-tokens", "N")):
        parser.add_argument(
            f"--speculative-{name}", type=at_least(1), metavar=metavar, help="overrides that of the algorithm"
        )
    parser.add_argument(
        "--implementation", choices=("native", "transformers"), default="native", help="backend of the target (native)"
    )
    parser.add_argument(
        "--disable-cuda-graph", action="store_true", help="launch rounds kernel by kernel, for drafts on the host"
    )
    parser.add_argument(
        "--tp", type=at_least(1), metavar="N", help="GPUs that the target is divided among, by torchrun's ranks (1)"
    )
    parser.add_argument("--disable-custom-all-reduce", action="store_true", help="with --tp, reduce by NCCL")
    parser.add_argument("--profile", action="store_true", help="also time the kernels of a captured round, by name")
    add_tuning(parser)
    parser.set_defaults(run=run)


def settings_or_classes(text: str) -> list[str]:
    """Parse names of SETTINGS, chains and trees with a number of tokens, and draft classes as `module:Class`."""
    parse = sized_words_of(SETTINGS)
    for value in text.split(","):
        if ":" not in value:
            parse(value)
    return text.split(",")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if not require("bench", "bench", ["torch", "rich"]):
        return 2
    if not require(COMMAND, "engine", ["transformers", "safetensors"]):
        return 2
    if (code := refuse_files(args, COMMAND)) is not None:
        return code
    device = find_device(args.device)
    if device is None:
        return refuse(NO_CUDA, COMMAND)
    if args.profile and (device.type != "cuda" or args.disable_cuda_graph):
        return refuse("--profile is set, expected only with rounds captured on a GPU", COMMAND)
    try:
        if args.tuning:
            from ...engine.tuning import read_tuning

            apply_tuning(args, read_tuning(args.tuning, "--tuning"))
        setups = round_setups(args, device)
    except (OSError, ValueError) as error:
        return refuse(str(error), COMMAND)

    rounds = modules.round
    place = setups[0].place
    if place is not None and (len(setups) > 1 or not place.by_torchrun):
        expected = "one --algorithm and --acceptance" if len(setups) > 1 else f"torchrun --nproc-per-node {place.size}"
        return refuse(f"--tp is {place.size}, expected {expected}, since each rank makes the models", COMMAND)
    batches = args.batch or ([1] if args.quick or device.type == "cpu" else [1, 4, 16, 64])
    for setup in setups:
        needed, free = rounds.memory_needed(setup, max(batches)), rounds.free_memory(device)
        if needed > free:
            return refuse(
                f"{setup.shape} needs about {needed / 1e9:.1f} GB for weights and KV of {max(batches)} requests in "
                f"{setup.params(1)['dtype']}, and {device.type} has {free / 1e9:.1f} GB free: another --shape, fewer "
                "--batch, a shorter --max-len",
                COMMAND,
            )
    if place is not None and place.rank:
        return follow(setups[0], max(batches))
    ceilings = modules.ceilings.measure_ceilings(device, args.quick)
    results = []
    try:
        with progress(len(setups) * len(batches)) as advance:
            for result in rounds.measure_rounds(setups, batches, ceilings):
                results.append(result)
                advance(f"round {result.params['algorithm']} batch {result.params['batch']}")
    except ValueError as error:  # what the engine refuses, by name
        return refuse(str(error), COMMAND)
    return finish(args, results, device, ceilings, COMMAND)


def follow(setup: Any, max_batch: int) -> int:
    """Serve rank 0 until it has measured, which ends this process; return 2 if the engine refuses the setup."""
    try:
        modules.round.Bench(setup, max_batch)
    except ValueError:  # rank 0 says so
        return 2
    return 0


def round_setups(args: argparse.Namespace, device: Any) -> list[Any]:
    """Return a setup for each algorithm and acceptance; one alone where no synthetic model drafts."""
    from dataclasses import replace

    import torch

    from ...parallel.launch import place_of
    from ...synthetic.acceptance import EvenAcceptance, PublishedAcceptance

    rounds = modules.round
    place = place_of(args.tp)
    if place is not None and place.by_torchrun and device.type == "cuda":
        torch.cuda.set_device(place.device(device, device))
    if args.disable_custom_all_reduce and (args.tp or 1) == 1:
        raise ValueError("--disable-custom-all-reduce is set, expected only with --tp above 1")
    shape = args.shape or ("qwen3-8b" if device.type == "cuda" else "tiny")
    small = shape.startswith("tiny")
    shape = shape if args.layers is None else f"{shape}:{args.layers}"
    input, output = (args.input or (32 if small else 321)), (args.output or (32 if small else 215))
    if args.accept is not None:
        for flag, value in (
            ("--acceptance", args.acceptance), ("--drafter", args.drafter), ("--context-decay", args.context_decay)
        ):  # fmt: skip
            if value:
                raise ValueError(f"--accept is {args.accept}, expected none with {flag}")
    dtype = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    names = args.algorithm or ("none", "chain", "tree")
    if set(names) == {"none"}:
        expect_no_drafting(args)
    given = {
        "num_steps": args.speculative_num_steps,
        "topk": args.speculative_eagle_topk,
        "num_nodes": args.speculative_num_draft_tokens,
    }
    if args.speculative_draft_model_path and not any(":" in name for name in names):
        raise ValueError(
            f"--speculative-draft-model-path is {args.speculative_draft_model_path}, expected none without a class of "
            "your own in --algorithm"
        )
    context = (input + output // 2) if args.context_decay else None
    if args.accept is not None:
        acceptances: list[Any] = [args.accept]
    else:
        acceptances = args.acceptance or ["chat"]
    setups = []
    stored = [None if how == "none" else how for how in args.draft_weights or ["none"]]
    for chosen, name, draft_weights in itertools.product(acceptances, names, stored):
        drafting = own_drafting(args, name, shape) if ":" in name else rounds.drafting_of(name)
        if drafting.kind is None and (chosen is not acceptances[0] or draft_weights is not stored[0]):
            continue
        if drafting.kind is not None and drafting.make is None:
            drafting = replace(drafting, **{key: value for key, value in given.items() if value is not None})
        acceptance: Any
        if isinstance(chosen, float):
            acceptance = EvenAcceptance(min(chosen, drafting.num_steps + 1))
        elif chosen == WRONG:
            acceptance = EvenAcceptance(1.0)
        else:
            acceptance = PublishedAcceptance(chosen, args.drafter or drafting.drafter, context)
        setup = rounds.Setup(
            shape=shape,
            drafting=drafting,
            acceptance=acceptance,
            input=input,
            output=output,
            device=device,
            dtype=getattr(torch, dtype),
            max_len=args.max_len,
            weights=args.weights,
            draft_weights=draft_weights,
            implementation=args.implementation,
            cuda_graph=not args.disable_cuda_graph,
            custom_all_reduce=not args.disable_custom_all_reduce,
            profile=args.profile,
            place=place,
        )
        setups.append(setup)
    return setups


def expect_no_drafting(args: argparse.Namespace) -> None:
    """Raise ValueError for a flag of drafts, where there is none."""
    flags = ("acceptance", "accept", "drafter", "context_decay", "draft_weights", "speculative_num_steps")
    for name in (*flags, "speculative_eagle_topk", "speculative_num_draft_tokens"):
        if getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')} is given, expected not with --algorithm none alone")


def own_drafting(args: argparse.Namespace, name: str, shape: str) -> Any:
    """Return the drafting of the class at `module:Class`.

    Raises:
        ValueError, OSError: no such class, or options, a checkpoint or a shape that it does not take.
    """
    make, checkpoint = own_draft(args, name), args.speculative_draft_model_path
    return modules.round.own_drafting(name, shape, draft_class(name), make, checkpoint)
