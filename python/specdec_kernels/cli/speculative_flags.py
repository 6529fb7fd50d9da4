"""The flags that say how to draft, named as in the field, and the draft they ask for, beside its target."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from .tune import apply_tuning

if TYPE_CHECKING:
    from ..engine import Draft

ALGORITHMS = ("NONE", "NGRAM", "EAGLE", "EAGLE3", "STANDALONE", "EAGLE3+NGRAM")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--speculative-algorithm",
        choices=ALGORITHMS,
        help="how to draft (default: NGRAM; for the tiny model on a GPU EAGLE3)",
    )
    parser.add_argument("--speculative-draft-model-path", metavar="PATH", help="EAGLE head or small draft model")
    parser.add_argument("--speculative-num-steps", type=int, metavar="N", help="depth of drafting (5)")
    parser.add_argument(
        "--speculative-eagle-topk", type=int, metavar="K", help="branches per step (8 on a GPU, 1, a chain, on the CPU)"
    )
    parser.add_argument(
        "--speculative-num-draft-tokens",
        type=int,
        metavar="N",
        help="nodes verified per round, root included (48 for a tree, steps + 1 for a chain, 16 for NGRAM)",
    )
    parser.add_argument(
        "--speculative-adaptive",
        action=argparse.BooleanOptionalAction,
        help="choose in each round how many of these nodes to draft (default: unless --no-cuda-graph)",
    )
    parser.add_argument(
        "--speculative-ngram-corpus",
        action="append",
        default=[],
        metavar="FILE",
        help="a text file that NGRAM knows from the start; several with several flags",
    )


class Chosen(NamedTuple):
    """What an engine is made of."""

    model: Any  # the target: a folder or hub id
    algorithm: str
    draft: Draft | None
    on_gpu: bool


def choose(args: argparse.Namespace) -> Chosen:
    """What the flags ask for; `args.model` None is the tiny model, whose head drafts on a GPU.

    What `args.tuning` names counts where the flags say nothing: `args.model` is the target from here on.

    Raises:
        ValueError, OSError: what `read_tuning` and `draft_of` refuse.
    """
    import torch
    from transformers.utils import logging

    from ..engine.config import default_device
    from ..engine.tuning import read_tuning
    from ..tiny import tiny_model

    logging.disable_progress_bar()
    on_gpu = str(args.device or default_device()).startswith("cuda")
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
        torch.set_num_threads(1)  # too small a model to share: on a busy machine its threads wait for each other
    # A pass of a draft head takes a CPU a good part of the tiny model's own: there the index is the faster draft.
    algorithm = args.speculative_algorithm or ("EAGLE3" if args.model is None and on_gpu else "NGRAM")
    head = args.speculative_draft_model_path
    if algorithm.startswith("EAGLE3") and head is None and args.model is None:
        head = tiny_model("eagle3")
    # A GPU scores a tree in the time of a token; a CPU pays for every node, so there a chain is the faster choice.
    draft = draft_of(args, algorithm, head, topk=8 if on_gpu else 1)
    return Chosen(args.model or tiny_model("target"), algorithm, draft, on_gpu)


def draft_of(args: argparse.Namespace, algorithm: str, head: Any, *, topk: int) -> Draft | None:
    """The draft of an algorithm, with what the flags say of it.

    Args:
        head: what `--speculative-draft-model-path` says, or the model that stands for it.
        topk: branches, where `--speculative-eagle-topk` says nothing.

    Raises:
        ValueError: flags that the algorithm has no use for, or that it lacks; options out of range.
    """
    from ..engine import Eagle, Eagle3, Ngram, Standalone, Union

    with_model = algorithm not in ("NONE", "NGRAM")
    if with_model and head is None:
        raise ValueError(f"--speculative-draft-model-path is missing, expected a folder or hub id for {algorithm}")
    if not with_model and head is not None:
        raise ValueError(f"--speculative-draft-model-path is {head}, expected none for {algorithm}")
    if args.speculative_ngram_corpus and not algorithm.endswith("NGRAM"):
        raise ValueError(f"--speculative-ngram-corpus is given, expected none for {algorithm}")
    nodes = args.speculative_num_draft_tokens
    model: dict[str, Any] = {
        "num_steps": 5 if args.speculative_num_steps is None else args.speculative_num_steps,
        "topk": args.speculative_eagle_topk or topk,
        "num_nodes": nodes,
    }
    corpus = args.speculative_ngram_corpus
    if algorithm == "NONE":
        return None
    if algorithm == "NGRAM":
        return Ngram(corpus=corpus) if nodes is None else Ngram(num_nodes=nodes, corpus=corpus)
    if algorithm == "EAGLE3+NGRAM":
        both = 48 if nodes is None else nodes
        eagle = Eagle3(head, **{**model, "num_nodes": both})
        return Union(eagle, Ngram(num_nodes=both, corpus=corpus), num_nodes=both)
    kinds: dict[str, Callable[..., Draft]] = {"EAGLE": Eagle, "EAGLE3": Eagle3, "STANDALONE": Standalone}
    return kinds[algorithm](head, **model)
