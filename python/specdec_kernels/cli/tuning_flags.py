"""The `--tuning` flag: start from what `specdec tune` or an engine has measured."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arguments import Container


def add_tuning(parser: Container) -> None:
    """Add `--tuning`."""
    parser.add_argument(
        "--tuning",
        metavar="FILE",
        help="measurements that `specdec tune --out` or Engine.tuning gave; other flags override them",
    )


def apply_tuning(args: argparse.Namespace, tuning: dict[str, Any]) -> None:
    """Fill the drafting flags that were not given from a tuning that `engine.tuning.read_tuning` has read."""
    options = tuning.get("recommended") or {}
    for flag, key in (("num_steps", "num_steps"), ("eagle_topk", "topk"), ("num_draft_tokens", "num_nodes")):
        if getattr(args, f"speculative_{flag}") is None:
            setattr(args, f"speculative_{flag}", options.get(key) or None)  # 0: the draft has no such option
