"""Checks that a model computes what its module computes as transformers runs it.

Random tokens go through both: through the module, a sequence for each path of a tree; and through ours, a prefix in two
chunks and then the tree at once. Log-probabilities may differ by rounding alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationMixin

from ...ops import build_tree_from_parents
from ..language_model import LanguageModel
from ..layers.moe import QuantizedExperts
from ..layers.paged_batch import PagedBatch
from ..layers.quantized import QuantizedLinear
from .module_copy import accepted, cache_name, shared_copy

PREFIX = 21  # tokens, fewer if max_len leaves no room
CHUNK = 12  # tokens of the prefix in the first pass
PARENTS = [-1, 0, 0, 1, 1, 2, 5, 3]  # the tree: siblings, and paths of several lengths

# Largest difference, relative to the standard deviation of a row's log-probabilities.
LARGEST = {torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
LARGEST_WITH_STEPS = 1.0  # in 16 bits, and of quantized models: rounding may send rows to other experts or FP8 values
CHECKED_NODES = len(PARENTS)
CHECKED_ROWS = PREFIX + CHECKED_NODES


@torch.inference_mode()
def check_against_itself(lm: LanguageModel, dtype: torch.dtype, name: str) -> None:
    """Compare the logits of a tree with those of the module's own forward pass.

    Raises:
        ValueError: they differ, with how far; the module does not run on tokens alone.
    """
    parents = PARENTS[: max(1, lm.max_len // 2)]
    tokens, prefix = random_tokens(lm, len(parents))
    try:
        theirs, cached = own_logits(shared_copy(lm.model), tokens, prefix, parents)
    except Exception as error:
        raise ValueError(why_not_run(lm, name, error)) from error
    if (far := difference(theirs[-1:], cached, dtype)) > LARGEST[dtype]:
        raise ValueError(
            f"{name}: {type(lm.model).__name__} gives other logits with its own cache than without, {far:.2g} of their "
            f"spread apart, expected at most {LARGEST[dtype]} (what it generates is not what it scores)"
        )
    far = difference(theirs, tree_logits(lm, tokens, prefix, parents), dtype)
    if not far <= LARGEST[dtype]:  # nor a NaN
        raise ValueError(
            f"{name}: {type(lm.model).__name__} gives other logits with our attention than with its own, {far:.2g} of "
            f"their spread apart, expected at most {LARGEST[dtype]} "
            "(it carries more than keys and values from token to token, or attends in a way of its own)"
        )


class ModuleMismatchError(ValueError):
    """A module of transformers that our layers cannot read, or whose logits are not theirs."""


@torch.inference_mode()
def check_against_module(lm: LanguageModel, dtype: torch.dtype, name: str) -> None:
    """Compare the logits of our layers with those of the module that they were made of, for a prefix and a chain.

    Raises:
        ModuleMismatchError: they differ, with how far; the module does not run.
    """
    module: Any = lm.model
    parents = list(range(-1, min(4, max(1, lm.max_len // 2)) - 1))
    tokens, prefix = random_tokens(lm, len(parents))
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with eager_attention(module):
            theirs = run(module, tokens[None], 0, use_cache=False).logits[0, prefix:]
    except Exception as error:
        raise ModuleMismatchError(why_not_run(lm, name, error)) from error
    finally:
        for part, mode in modes.items():
            part.training = mode
    largest = LARGEST[dtype]
    if dtype != torch.float32 or any(isinstance(part, QuantizedLinear | QuantizedExperts) for part in module.modules()):
        largest = LARGEST_WITH_STEPS
    far = difference(theirs, tree_logits(lm, tokens, prefix, parents), dtype)
    if not far <= largest:  # nor a NaN
        hint = "implementation='transformers' runs its modules"
        if lm.states is not None:
            hint = "no other backend keeps recurrent states; if it runs with dtype='float32', only rounding differs"
        raise ModuleMismatchError(
            f"{name}: {type(module).__name__} of transformers {transformers.__version__} gives other logits than our "
            f"layers, {far:.2g} of their spread apart, expected at most {largest} ({hint})"
        )


def random_tokens(lm: LanguageModel, num_nodes: int) -> tuple[Tensor, int]:
    """Return the tokens of a prefix and of as many nodes, on the model's device, and the prefix's length."""
    prefix = max(0, min(PREFIX, lm.max_len - num_nodes))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(lm.config.vocab_size, (prefix + num_nodes,), generator=generator)
    return tokens.to(lm.embedding.weight.device), prefix


def why_not_run(lm: LanguageModel, name: str, error: Exception) -> str:
    """Return the message for a module whose forward pass fails."""
    message = str(error).partition("\n")[0]
    return (
        f"{name}: {type(lm.model).__name__} does not run on tokens alone ({type(error).__name__}: {message}), "
        "expected a model that generates text from text"
    )


@contextmanager
def eager_attention(module: Any) -> Iterator[None]:
    """Let a module of transformers compute its attention as written: with "sdpa" it leaves out caps of scores."""
    body = module.get_decoder()
    switches = body.config._attn_implementation == "sdpa"
    if switches:
        body.set_attn_implementation("eager")
    try:
        yield
    finally:
        if switches:
            body.set_attn_implementation("sdpa")


def difference(theirs: Tensor, ours: Tensor, dtype: torch.dtype) -> float:
    """Return the largest difference of two sets of logits [nodes, V], relative to their log-probabilities' spread."""
    theirs, ours = (logits.float().log_softmax(-1) for logits in (theirs, ours))
    spread = (theirs - theirs.mean(-1, keepdim=True)).square().mean(-1).sqrt().clamp(min=1e-6)
    off = (theirs - ours).abs().amax(-1) / spread
    # In 16 bits, rounding may send a token to another expert: a row or two then differ.
    return float(off.max() if dtype == torch.float32 else off.median())


def own_logits(model: Any, tokens: Tensor, prefix: int, parents: list[int]) -> tuple[Tensor, Tensor]:
    """Return logits of the module's own forward pass.

    Those of each node after its path [nodes, V]; and of the last node by two passes with the module's cache [1, V].
    """
    rows = []
    for node in range(len(parents)):
        if node in parents:  # a longer path has it
            continue
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        sequence = torch.cat([tokens[:prefix], tokens[prefix:][path]])[None]
        logits = run(model, sequence, 0, use_cache=False).logits[0, prefix:]
        rows += [(at, logits[depth]) for depth, at in enumerate(path)]
    begin = sequence.shape[1] - 1
    if begin:
        name = cache_name(model)
        cache = getattr(run(model, sequence[:, :begin], 0, use_cache=True), name)
        cached = run(model, sequence, begin, use_cache=True, **{name: cache}).logits[0, -1:]
    else:
        cached = logits[-1:]
    by_node = dict(rows)
    return torch.stack([by_node[node] for node in range(len(parents))]), cached


def run(model: Any, sequence: Tensor, begin: int, **options: Any) -> Any:
    """Run the tokens [1, n] from `begin` on, with the arguments that `generate` of transformers would pass."""
    positions = torch.arange(sequence.shape[1], device=sequence.device)[None]
    arguments = {
        "input_ids": sequence[:, begin:],
        "attention_mask": torch.ones_like(sequence),
        "position_ids": positions[:, begin:],
    }
    if not keeps_positions(model, arguments | {"input_ids": sequence, "position_ids": positions}):
        del arguments["position_ids"]
    return model(**accepted(model, arguments | options))


def keeps_positions(model: Any, arguments: dict[str, Any]) -> bool:
    """Return whether `generate` of transformers passes position ids on; some models count from another number."""
    if type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation:
        return True
    try:
        return "position_ids" in model.prepare_inputs_for_generation(**arguments)
    except Exception:  # it wants what `generate` alone has
        return True


def tree_logits(lm: LanguageModel, tokens: Tensor, prefix: int, parents: list[int]) -> Tensor:
    """Return the logits [nodes, V] of all nodes by one pass over the prefix."""
    device, ids = tokens.device, tokens.to(torch.int32)
    pages = torch.arange(lm.pools.num_pages, dtype=torch.int32, device=device).flip(0)[None]
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    for begin in range(0, prefix, CHUNK):
        chunk = ids[begin : min(begin + CHUNK, prefix)][None]
        at = torch.full((1,), begin, dtype=torch.int32, device=device)
        rows = PagedBatch(slots=slots, page_table=pages, prefix_lens=at, tail_len=chunk.shape[1])
        positions = begin + torch.arange(chunk.shape[1], dtype=torch.int32, device=device)[None]
        lm.prefill(chunk, positions, rows)
    seq_lens = torch.full((1,), prefix, dtype=torch.int32, device=device)
    tree = build_tree_from_parents(
        ids[prefix:][None].contiguous(), torch.tensor([parents], dtype=torch.int32, device=device), seq_lens
    )
    rows = PagedBatch(slots=slots, page_table=pages, prefix_lens=seq_lens, tail_len=len(parents), mask=tree.mask)
    return lm.logits(lm.forward(tree.tokens, tree.positions, rows).hidden)[0]
