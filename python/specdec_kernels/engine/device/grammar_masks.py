"""Grammars of requests, compiled by xgrammar, and the token masks of a round's trees."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...ops import Tree
from ..params import SamplingParams
from ..text.detokenizer import Detokenizer
from ..text.json_schemas import held_to

if TYPE_CHECKING:
    from ..._C import ConstrainedRow

Matcher = Any  # xgrammar.GrammarMatcher
POLL_SECONDS = 5e-5  # between two polls for the device's trees
MOST_WHITESPACE = 16  # consecutive characters between two parts of a JSON text: some models would never stop
CACHE_BYTES = 512 << 20  # of compiled grammars
FULL = -1  # a word of a mask that allows all of its tokens


class Grammars:
    """Compiles the grammars of requests; any thread may call it."""

    def __init__(self, tokenizer: Any, no_tokenizer: str, vocab_size: int) -> None:
        self._tokenizer, self._no_tokenizer, self._vocab_size = tokenizer, no_tokenizer, vocab_size
        self._lock = Lock()
        self._compiler: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what it was made of, for another process."""
        return Grammars, (self._tokenizer, self._no_tokenizer, self._vocab_size)

    def compiled(self, sampling: SamplingParams) -> Any:
        """Return the compiled grammar of a request that has one.

        Raises:
            ValueError: there is no tokenizer or no xgrammar; the source is no schema, pattern or grammar.
        """
        kind, source = sampling.constraint
        if kind == "json_schema":
            source = held_to_source(source)
        self.prepare(kind)
        compile_it = {
            "json_schema": partial(self._compiler.compile_json_schema, max_whitespace_cnt=MOST_WHITESPACE),
            "regex": self._compiler.compile_regex,
            "grammar": self._compiler.compile_grammar,
        }[kind]
        try:
            return compile_it(source)
        except RuntimeError as error:
            why = " ".join(re.sub(r"^\[[^]]*\] \S+:\d+: ", "", str(error)).split())  # without its time and place
            raise ValueError(f"SamplingParams: {kind} does not compile: {why}") from error

    def prepare(self, kind: str = "grammar") -> None:
        """Read the tokenizer for grammars, at the latest when the first one is compiled."""
        with self._lock:
            if self._compiler is None:
                self._compiler = self._make_compiler(kind)

    def try_out(self, kind: str, source: str) -> int:
        """Compile a grammar, compute its first mask, and return its size in bytes; ValueError as `compiled`."""
        grammar = self.compiled(SamplingParams(**{kind: source}))
        NewMatcher(grammar, [0]).is_dead_end([])  # a stop token, whichever
        return int(grammar.memory_size_bytes)

    def new_matcher(self, sampling: SamplingParams, stop_tokens: Sequence[int]) -> NewMatcher:
        """Return what makes matchers at the start of the text, which the request's stop tokens may end.

        Raises:
            ValueError: as `compiled`; no stop token; no token of the vocabulary begins a text.
        """
        kind, _ = sampling.constraint
        if not stop_tokens:
            raise ValueError(f"SamplingParams: {kind} is given, expected beside it a stop token, which ends the text")
        new_matcher = NewMatcher(self.compiled(sampling), list(stop_tokens))
        if new_matcher.is_dead_end([]):
            raise ValueError(
                f"SamplingParams: {kind} allows no token of the vocabulary at the start of the text, "
                "expected at least one"
            )
        return new_matcher

    def _make_compiler(self, kind: str) -> Any:
        if self._tokenizer is None:
            raise ValueError(f"SamplingParams: {kind} is given, expected none ({self._no_tokenizer})")
        try:
            import xgrammar
        except ImportError as error:
            raise ValueError(
                f"SamplingParams: {kind} is given, expected none without xgrammar "
                '(pip install "specdec-kernels[grammar]")'
            ) from error
        info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=self._vocab_size)
        if info.vocab_type == xgrammar.VocabType.RAW:
            # xgrammar would take names of tokens for their texts: a space of Metaspace, "##" of WordPiece.
            detokenizer = Detokenizer(self._tokenizer)
            texts = [detokenizer.text_bytes(token) for token in range(self._vocab_size)]
            info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, stop_token_ids=info.stop_token_ids)
        return xgrammar.GrammarCompiler(info, cache_limit_bytes=CACHE_BYTES)


@lru_cache(maxsize=64)
def held_to_source(source: str) -> str:
    """Return the JSON of a schema that xgrammar holds to, for texts that the schema `source` accepts."""
    try:
        return json.dumps(held_to(json.loads(source)))
    except json.JSONDecodeError as error:
        raise ValueError(f"SamplingParams: json_schema does not compile: it is no JSON ({error})") from error
    except RecursionError as error:
        raise ValueError("SamplingParams: json_schema is nested too deep, expected fewer levels") from error
    except ValueError as error:
        raise ValueError(f"SamplingParams: {error}") from error


@dataclass(frozen=True)
class NewMatcher:
    """Makes matchers of a compiled grammar at the start of the text."""

    grammar: Any  # xgrammar.CompiledGrammar
    stop_tokens: list[int]

    def __call__(self) -> Matcher:
        import xgrammar

        return xgrammar.GrammarMatcher(self.grammar, override_stop_tokens=self.stop_tokens)

    def is_dead_end(self, tokens: Sequence[int]) -> bool:
        """Return whether the grammar accepts these tokens as the start of a text, and none after them."""
        import xgrammar

        matcher = self()
        if not all(map(matcher.accept_token, tokens)) or matcher.is_terminated():
            return False
        mask = xgrammar.allocate_token_bitmask(1, self.grammar.tokenizer_info.vocab_size)
        return bool(matcher.fill_next_token_bitmask(mask)) and not mask.any()


class TreeMasks:
    """The tokens that each node of a round's trees allows, computed on the host while the target runs over the trees.

    Attributes:
        allowed: [rows, ceil(V / 32)] int32 on the device, of packed rows as `edit_logits` takes them.
    """

    def __init__(self, num_slots: int, num_rows: int, most_nodes: int, vocab: int, device: torch.device) -> None:
        words = -(-vocab // 32)
        pinned = device.type == "cuda"
        self.allowed = torch.full((num_rows, words), FULL, dtype=torch.int32, device=device)
        self._on_host = torch.full(self.allowed.shape, FULL, dtype=torch.int32, pin_memory=pinned)
        self._trees = torch.zeros(num_slots * (3 * most_nodes + 1) + 1, dtype=torch.int32, pin_memory=pinned)
        self._number = torch.zeros(1, dtype=torch.int64, pin_memory=pinned)
        self._copies = torch.cuda.Stream(device) if pinned else None  # type: ignore[no-untyped-call]
        self._threads = ThreadPoolExecutor(thread_name_prefix="specdec masks")
        self.matchers: dict[int, Matcher] = {}  # of slots, where they have one

    def reset(self) -> None:
        """Discard the trees of all rounds."""
        self._number.zero_()

    def publish(self, tree: Tree, cu_seqlens: Tensor, number: Tensor) -> None:
        """Copy the trees of a round [B, N] to the host, and then the round's number, which says that they are there."""
        parts = (tree.tokens, tree.first_child, tree.next_sibling, cu_seqlens)
        together = torch.cat([part.flatten() for part in parts])
        self._trees[: len(together)].copy_(together, non_blocking=True)
        self._number.copy_(number, non_blocking=True)

    def fill(
        self,
        number: int,
        requests: Sequence[ConstrainedRow],
        batch: int,
        num_nodes: int,
        busy: Callable[[], bool],
    ) -> None:
        """Fill the masks of round `number`, with `batch` trees of `num_nodes`, once its trees are published.

        Args:
            number: of the round.
            requests: the constrained requests of the round, with their new tokens.
            batch: rows of the round.
            num_nodes: nodes of each tree.
            busy: whether the device is working; an idle device publishes nothing more.
        """
        while int(self._number) != number:
            if not busy() and int(self._number) != number:
                raise RuntimeError(f"the device is idle and has not published the trees of record {number}")
            time.sleep(POLL_SECONDS)
        size = batch * num_nodes
        tokens, first_child, next_sibling = self._trees[: 3 * size].view(3, batch, num_nodes).long()
        ends = self._trees[3 * size : 3 * size + batch + 1].tolist()

        @torch.inference_mode()
        def fill_one(request: ConstrainedRow) -> None:
            row, matcher = request.row, self.matchers[request.slot]
            for token in request.tokens:
                matcher.accept_token(token)
            begin, count = ends[row], ends[row + 1] - ends[row]
            allowed = self._on_host[begin : begin + count].fill_(FULL)
            if count == 0 or matcher.is_terminated():
                return
            links = [part[row, :count].contiguous() for part in (first_child, next_sibling, tokens)]
            matcher.traverse_draft_tree(*links, allowed)
            # A walk samples a token at a node that ends the text, so some must be allowed there; none follows it. Other
            # nodes without an allowed token are not reached, or no token continues the text, as at a root.
            ends_text = torch.isin(links[2][1:], torch.tensor(matcher.stop_token_ids))
            allowed[1:][ends_text & ~allowed[1:].any(1)] = FULL

        # xgrammar releases the GIL.
        for _ in self._threads.map(fill_one, requests) if len(requests) > 1 else map(fill_one, requests):
            pass
        rows = [(ends[request.row], ends[request.row + 1]) for request in requests]
        begin, end = min(first for first, _ in rows), max(last for _, last in rows)
        if self._copies is None:
            self.allowed[begin:end] = self._on_host[begin:end]
            return
        # Runs parallel to the target's pass. Earlier rounds have read what this overwrites, or no tree would be there.
        with torch.cuda.stream(self._copies):
            self.allowed[begin:end].copy_(self._on_host[begin:end], non_blocking=True)
        torch.cuda.current_stream(self.allowed.device).wait_stream(self._copies)
