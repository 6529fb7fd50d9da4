"""The flags of drafting, named as SGLang's server names them, and the draft that they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..smollm2 import HEAD_NAME, is_smollm2, model_path
from .algorithms import (
    ALGORITHMS,
    BLOCK_ALGORITHMS,
    IN_TARGET,
    MODEL_ALGORITHMS,
    UNIONS,
    algorithm_of,
    draft_class,
    make_draft,
    model_part,
    one_of,
)
from .arguments import add_flag, add_model, model_of
from .tuning_flags import apply_tuning

if TYPE_CHECKING:
    from ..engine import Draft

OF_MODELS = ("num-steps", "eagle-topk")  # options of drafts with a model
WITH_DRAFT = (*OF_MODELS, "num-draft-tokens", "adaptive")  # of any draft
UNION_NODES = 48  # of a union with the n-gram index, by default
# Options of drafts that say how they are stored, and their flags.
STORED_BY = {"draft_weights": "draft-model-quantization", "kv_dtype": "draft-kv-cache-dtype"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of drafting."""
    parser.add_argument(
        "--speculative-algorithm",
        type=one_of(*ALGORITHMS),
        metavar="NAME",
        help=f"how to draft: {', '.join(ALGORITHMS)}, or a class of your own as module:Class (default: that of the "
        "draft model, if one is given, else NGRAM; for smollm2, and on a GPU for the tiny model, EAGLE3)",
    )
    add_draft_path(parser)
    parser.add_argument(
        "--speculative-num-steps", type=int, metavar="N", help="draft steps per round (5; all of a block)"
    )
    parser.add_argument(
        "--speculative-eagle-topk",
        type=int,
        metavar="K",
        help="branches per step (8 on a GPU, 1, a chain, on the CPU)",
    )
    parser.add_argument(
        "--speculative-num-draft-tokens",
        type=int,
        metavar="N",
        help="nodes verified per round, root included (48 for a tree, steps + 1 for a chain, 16 for NGRAM)",
    )
    parser.add_argument(
        "--speculative-draft-model-quantization",
        choices=["fp8", "fp8-head"],
        help="quantize the linears of an EAGLE-3 head or a block drafter to 8 bits when it is loaded; fp8-head: with "
        "a copy of the target's LM head, if it drafts with that",
    )
    parser.add_argument(
        "--speculative-draft-kv-cache-dtype",
        choices=["fp8_e4m3"],
        help="dtype of their own KV cache (default: that of the weights)",
    )
    parser.add_argument(
        "--speculative-adaptive",
        action=argparse.BooleanOptionalAction,
        help="choose in each round how many of these nodes to verify (default: on, unless --disable-cuda-graph)",
    )
    parser.add_argument(
        "--speculative-ngram-corpus",
        action="append",
        default=[],
        metavar="FILE",
        help="text file that NGRAM has indexed from the start; repeat the flag for several",
    )


def add_draft_path(parser: argparse._ActionsContainer, *hidden: str) -> None:
    """Add the path of a draft's checkpoint; the flag may have hidden spellings."""
    add_flag(
        parser,
        "--speculative-draft-model-path",
        *hidden,
        metavar="PATH",
        help="EAGLE head, block drafter or small model (smollm2-eagle3: the head for smollm2); for MTP and DSPARK by "
        "default the target's own",
    )


def add_draft_to_examine(parser: argparse.ArgumentParser, *others: str) -> None:
    """Add what `doctor` and `tune` examine: a target, a draft, and prompts.

    `others` are algorithms without a checkpoint; `read_draft_to_examine` asks for one where there are none.
    """
    add_model(parser)
    add_draft_path(parser, "--draft")
    algorithms = (*MODEL_ALGORITHMS, *BLOCK_ALGORITHMS, *others, *UNIONS)
    parser.set_defaults(needs_draft_path=not others)
    without = ", NGRAM without one" if others else ""
    add_flag(
        parser,
        "--speculative-algorithm",
        "--algorithm",
        type=one_of(*algorithms),
        metavar="NAME",
        help=f"algorithm of the draft: {', '.join(algorithms)}, or a class of your own as module:Class (default: by "
        f"its checkpoint{without})",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="texts with empty lines between, or .jsonl with prompt or messages (default: a mix of chat, code, math)",
    )


def read_draft_to_examine(args: argparse.Namespace) -> None:
    """Set `args.model` to the target, and names of models of extras to their folders.

    Raises:
        ValueError: no target, or two; no checkpoint of a draft that needs one; an extra that is not installed.
    """
    args.model = model_path(str(model_of(args, required=True)))
    if (
        args.needs_draft_path
        and args.speculative_draft_model_path is None
        and model_part(args.speculative_algorithm or "") not in IN_TARGET
    ):
        raise ValueError(
            "--speculative-draft-model-path is missing, expected a folder or hub id (MTP and DSPARK need none)"
        )
    if args.speculative_draft_model_path is not None:
        args.speculative_draft_model_path = model_path(args.speculative_draft_model_path)


class Chosen(NamedTuple):
    """A target and its draft."""

    model: Any  # the target: a folder or hub id
    algorithm: str
    draft: Draft | None
    on_gpu: bool


def choose(args: argparse.Namespace) -> Chosen:
    """Return what the flags ask for; without a target that is the tiny model, whose head drafts on a GPU.

    The name "smollm2" stands for the model of that extra, whose head drafts unless they name another draft.

    `args.tuning` fills what the flags leave open, and sets `args.model` to its target.

    Raises:
        ValueError, OSError: flags that the algorithm does not use, and what `read_tuning` and `draft_of` refuse.
    """
    import torch
    from transformers.utils import logging

    from ..engine.config import default_device
    from ..engine.tuning import read_tuning
    from ..models.weights.checkpoint import local_folder
    from ..tiny import tiny_model

    logging.disable_progress_bar()
    on_gpu = str(args.device or default_device()).startswith("cuda")
    given = {flag for flag in WITH_DRAFT if getattr(args, f"speculative_{flag.replace('-', '_')}") not in (None, False)}
    if args.tuning:
        tuning = read_tuning(args.tuning, "--tuning")
        apply_tuning(args, tuning)
        args.model = args.model or tuning.get("model")
        chosen = args.speculative_algorithm or args.speculative_draft_model_path
        if "recommended" in tuning and not chosen:
            best = tuning["recommended"]
            args.speculative_algorithm = tuning["algorithm"] if best else "NONE"
            args.speculative_draft_model_path = tuning["draft"] if best else None
    if args.model is None:
        torch.set_num_threads(1)  # the model is too small to split: on a busy machine its threads wait for each other
    # On a CPU, a pass of a draft head costs a good part of the tiny model's own: the n-gram index is the faster draft.
    algorithm, head = args.speculative_algorithm, args.speculative_draft_model_path
    if head is None and is_smollm2(args.model) and not args.speculative_ngram_corpus:
        head = HEAD_NAME if algorithm is None or algorithm.startswith("EAGLE3") else None
    if algorithm is None and head is not None:
        algorithm = algorithm_of(local_folder(model_path(head), "--speculative-draft-model-path"))
    algorithm = algorithm or ("EAGLE3" if args.model is None and on_gpu else "NGRAM")
    for flag in WITH_DRAFT:
        if flag in given and (algorithm == "NONE" or (algorithm == "NGRAM" and flag in OF_MODELS)):
            value = getattr(args, f"speculative_{flag.replace('-', '_')}")
            what = "is set" if value is True else f"is {value}"
            raise ValueError(f"--speculative-{flag} {what}, expected none for {algorithm}")
    if algorithm.startswith("EAGLE3") and head is None and args.model is None:
        head = tiny_model("eagle3")
    if isinstance(head, str):
        head = model_path(head)
    # A GPU verifies a tree in the time of a token. A CPU pays for every node, so a chain is faster.
    draft = draft_of(args, algorithm, head, topk=8 if on_gpu else 1)
    return Chosen(tiny_model("target") if args.model is None else model_path(args.model), algorithm, draft, on_gpu)


def draft_of(args: argparse.Namespace, algorithm: str, head: Any, *, topk: int) -> Draft | None:
    """Return the draft of an algorithm, configured by the flags; None for NONE.

    `head` is the checkpoint of the draft; `topk` holds unless `--speculative-eagle-topk` is given.

    Raises:
        ValueError: flags that the algorithm does not use, or that it lacks; options out of range.
    """
    from ..engine import Ngram

    if ":" in algorithm:
        return own_draft(args, algorithm)(head)
    with_model = algorithm not in ("NONE", "NGRAM")
    if with_model and head is None and not algorithm.startswith(IN_TARGET):
        raise ValueError(f"--speculative-draft-model-path is missing, expected a folder or hub id for {algorithm}")
    if not with_model and head is not None:
        raise ValueError(f"--speculative-draft-model-path is {head}, expected none for {algorithm}")
    if args.speculative_ngram_corpus and not algorithm.endswith("NGRAM"):
        raise ValueError(f"--speculative-ngram-corpus is given, expected none for {algorithm}")
    nodes = args.speculative_num_draft_tokens
    model: dict[str, Any] = {
        "num_steps": 5 if args.speculative_num_steps is None else args.speculative_num_steps,
        "topk": topk if args.speculative_eagle_topk is None else args.speculative_eagle_topk,
        "num_nodes": nodes,
    }
    if model_part(algorithm) in BLOCK_ALGORITHMS:  # depth costs nothing, and a tree may have any width
        model["num_steps"] = args.speculative_num_steps
        if args.speculative_eagle_topk is None:
            model["topk"] = 1 if topk == 1 else None
    for option, flag in STORED_BY.items():
        if value := getattr(args, f"speculative_{flag.replace('-', '_')}", None):
            if model_part(algorithm) not in ("EAGLE3", *BLOCK_ALGORITHMS):
                raise ValueError(f"--speculative-{flag} is {value}, expected none for {algorithm}")
            model[option] = value
    corpus = args.speculative_ngram_corpus
    if algorithm == "NONE":
        return None
    if algorithm == "NGRAM":
        return Ngram(corpus=corpus) if nodes is None else Ngram(num_nodes=nodes, corpus=corpus)
    if algorithm in UNIONS and nodes is None:
        model["num_nodes"] = UNION_NODES
    return make_draft(algorithm, head, model, corpus)


def own_draft(args: argparse.Namespace, path: str) -> Callable[[Any], Draft]:
    """Return what makes a draft of the class at `module:Class` with the options that the flags give.

    It takes the draft's model or checkpoint, None for a draft without one, and raises ValueError if the class does not
    take it or the options.

    Raises:
        ValueError: there is no such class.
    """
    flags = {"num_steps": "num_steps", "topk": "eagle_topk", "num_nodes": "num_draft_tokens", "corpus": "ngram_corpus"}
    read = {name: getattr(args, f"speculative_{flag}", None) for name, flag in flags.items()}
    given = {name: value for name, value in read.items() if value is not None and value != []}
    own_class = draft_class(path)

    def make(model: Any) -> Draft:
        try:
            return own_class(*([] if model is None else [model]), **given)
        except TypeError as error:
            raise ValueError(f"--speculative-algorithm is {path}, which does not take its flags: {error}") from error

    return make
