"""Prefill passes, captured as CUDA graphs for some shapes, else launched call by call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...models.language_model import LanguageModel
from ..drafts import Draft
from ..host_tensors import to_device
from ..prompt_scores import PromptScores
from .latent_blocks import Span, latent_blocks
from .prefill import Prefill, Shape, num_pieces, pack
from .prompt_scoring import ScoredRows, hand_out, score_rows, scored_rows
from .state import EngineState

if TYPE_CHECKING:
    from ..._C import PrefillChunk

PIECE = 64  # rows of a captured pass's pieces
CHEAP_ROWS = 256  # a pass of this many rows takes little longer than one of a few: reading the weights dominates
MOST_ROWS = 1.25  # rows of a captured pass, relative to a pass launched call by call
EXPANDED_ROWS = 1024  # of a pass whose latent rows are expanded, at least: it is launched call by call


def captured_shapes(prefill_chunk: int, num_slots: int, max_len: int) -> list[Shape]:
    """Return shapes such that every possible number of pieces has one that is at most a quarter larger."""
    most = min(-(-prefill_chunk // PIECE), num_slots * -(-(max_len - 1) // PIECE))
    sizes = (1, 2, 3, *(size << power for power in range(24) for size in (4, 5, 6, 7)))
    return [Shape(size, PIECE, min(size, num_slots)) for size in sizes if size < most] + [
        Shape(most, PIECE, min(most, num_slots))
    ]


class Passes:
    """Runs chunks of prompts through target and draft.

    Launching hundreds of kernels takes as long as many passes, so passes are captured for some numbers of pieces.
    Chunks that do not fit such a shape well are launched call by call, in the shape that fits them.
    """

    def __init__(self, target: LanguageModel, draft: Draft, state: EngineState) -> None:
        self.target, self.draft, self.state = target, draft, state
        self.captured: dict[Shape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # and its input, as of `pack`

    def run(self, chunks: Sequence[PrefillChunk], scores: Mapping[int, PromptScores] = MappingProxyType({})) -> None:
        """Run chunks in the captured or fitting shape.

        `scores`: of slots whose prompts are scored. A pass with such chunks is launched call by call.
        """
        lengths = [len(chunk.tokens) - 1 for chunk in chunks]
        fitting, device = Shape.fitting(lengths), self.state.seq_lens.device
        expanded = self.expanded(chunks)
        shape = None if expanded else self.captured_shape(lengths, fitting.rows)
        found = scored_rows(chunks, shape or fitting, scores, device)
        if found is not None:
            scored, owners = found
            packed = to_device(pack(chunks, shape or fitting), device)
            packed_scores = self.launch(packed, shape or fitting, scored, expanded)
            assert packed_scores is not None
            hand_out(packed_scores, scored.top_n, owners)
            return
        if shape is None:
            self.launch(to_device(pack(chunks, fitting), device), fitting, expanded=expanded)
            return
        graph, packed = self.captured[shape]
        packed.copy_(to_device(pack(chunks, shape), packed.device))
        graph.replay()

    def expanded(self, chunks: Sequence[PrefillChunk]) -> list[Span]:
        """Return the rows of chunks whose latent rows are cheaper to expand; none if they are not.

        The two forms differ in their last bits, so with `fixed_split`, where a text must not depend on the batch, it is
        always the absorbed one.
        """
        spans = [Span(chunk.start, len(chunk.tokens) - 1) for chunk in chunks]
        if self.state.fixed_split is not None or sum(span.size for span in spans) < EXPANDED_ROWS:
            return []
        return spans if self.target.expands_latents(spans) else []

    def captured_shape(self, lengths: Sequence[int], fitting_rows: int) -> Shape | None:
        """Return the smallest captured shape for chunks of these lengths; None if `fitting_rows` rows are better."""
        pieces = num_pieces(lengths, PIECE)
        shape = min((shape for shape in self.captured if shape.pieces >= pieces), default=None)
        most = max(CHEAP_ROWS, MOST_ROWS * fitting_rows)
        return shape if shape and shape.rows <= most else None

    @torch.inference_mode()
    def launch(
        self, packed: Tensor, shape: Shape, scored: ScoredRows | None = None, expanded: Sequence[Span] = ()
    ) -> Tensor | None:
        """Run one pass over what `pack` packed, without reading a device value on the host.

        `expanded`: the chunks' rows, if the target's latent rows are to be expanded.

        Returns:
            The scores of the tokens after rows, as of `score_rows`; None: none are wanted.
        """
        prefill = Prefill.of(packed, shape, self.state, keeps_states=self.target.states is not None)
        last, rows = prefill.last, prefill.rows
        if expanded:
            page_size = self.target.pools.page_size
            blocks = latent_blocks(expanded, shape.pieces, shape.length, rows.page_table, page_size)
            rows = rows._replace(latent_blocks=blocks)
        states = self.target.prefill(prefill.tokens, prefill.positions, rows, last, all_rows=scored is not None)
        self.draft.prefill(prefill, states.features)
        prefill.finish(self.state, states, last)
        if scored is None:
            return None
        assert states.all_hidden is not None
        return score_rows(self.target, states.all_hidden, scored)
