"""Arctic's suffix decoding, SGLang's n-gram trie and vLLM's prompt lookup, called as their engines call them.

All run on the CPU. Written for arctic-inference 0.3.0, which needs only NumPy for this, sglang 0.5.23, whose trie is
compiled on first use, and vllm 0.26.0, whose lookup Numba compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..ops.baselines import installed
from .drafter import Drafter

TRIE_DEPTH, TRIE_NODES = 18, 10_000_000  # sglang's defaults
LOOKUP = 5  # tokens that must match, vllm's default; its users set matches down to 2
MAX_TOKENS = 1 << 14  # per request
UNLIMITED = 1e6


class SuffixTrees(Drafter):
    """Arctic: a suffix tree of the request and one of all answers; the better draft of the two."""

    def __init__(self, package: Any, drafts: int, *, depth: int, tree: bool) -> None:
        self._cache = package.SuffixDecodingCache(max_tree_depth=depth)
        factor = UNLIMITED if tree else 1.0  # its default: as many drafts as matching tokens
        self._options = {"max_spec_tokens": drafts, "max_spec_factor": factor, "use_tree_spec": tree}
        self._depth, self._request = depth, 0

    def learn(self, document: Sequence[int]) -> None:
        self.begin([])
        self.extend(document)

    def begin(self, prompt: Sequence[int]) -> None:
        if self._request:
            self._cache.stop_request(self._request)
        self._request += 1
        self._context = list(prompt)
        self._cache.start_request(self._request, list(prompt))

    def extend(self, tokens: Sequence[int]) -> None:
        self._context += tokens
        self._cache.add_active_response(self._request, list(tokens))

    def draft(self) -> Any:
        return self._cache.speculate(self._request, self._context[-self._depth :], **self._options)

    def nodes(self, found: Any) -> tuple[list[int], list[int]]:
        return [self._context[-1], *found.token_ids], [-1, *(parent + 1 for parent in found.parents)]


class Trie(Drafter):
    """SGLang: a trie of 18-token n-grams, which gets the last tokens before each draft.

    With `prompts` it gets the prompts as well, which its engine does not do.
    """

    def __init__(self, package: Any, drafts: int, *, prompts: bool) -> None:
        self._trie = package.get_ngram_corpus_cls()(TRIE_NODES, TRIE_DEPTH, 1, 10, drafts + 1, "BFS")
        self._prompts, self._request = prompts, 0

    def _insert(self, tokens: Sequence[int]) -> None:
        self._trie.insert([list(tokens)])
        self._trie.synchronize()

    def learn(self, document: Sequence[int]) -> None:
        self._insert(document)

    def begin(self, prompt: Sequence[int]) -> None:
        self._trie.erase_states([self._request])
        self._request += 1
        self._context = list(prompt)
        if self._prompts:
            self._insert(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        self._insert(self._context[-TRIE_DEPTH:])  # one round late, as in its engine
        self._context += tokens

    def draft(self) -> Any:
        return self._trie.match_stateful([self._request], [self._context[-TRIE_DEPTH:]], [len(self._context)])

    def nodes(self, found: Any) -> tuple[list[int], list[int]]:
        tokens, mask = found[0].tolist(), found[1].reshape(len(found[0]), -1)
        # Ancestors come before their children. Unused entries hold token 0, which no text here has.
        kept = [i for i, token in enumerate(tokens) if i == 0 or token != 0]
        index = {node: i for i, node in enumerate(kept)}
        parents = [-1 if i == 0 else index[int(mask[i, :i].nonzero()[0][-1])] for i in kept]
        return [tokens[i] for i in kept], parents


class PromptLookup(Drafter):
    """vLLM: a chain, the continuation of the last match in the request's own text."""

    def __init__(self, package: Any, drafts: int, *, shortest: int) -> None:
        self._proposer = package.NgramProposer(
            SimpleNamespace(
                speculative_config=SimpleNamespace(
                    prompt_lookup_min=shortest, prompt_lookup_max=LOOKUP, num_speculative_tokens=drafts
                ),
                model_config=SimpleNamespace(max_model_len=MAX_TOKENS),
                scheduler_config=SimpleNamespace(max_num_seqs=1024),
                parallel_config=SimpleNamespace(tensor_parallel_size=1),
            )
        )
        self._drafts = drafts
        self._text = np.zeros((1, MAX_TOKENS), np.int32)
        self._length = np.zeros(1, np.int32)

    def learn(self, document: Sequence[int]) -> None:
        """Ignore the document: only the request is searched."""

    def begin(self, prompt: Sequence[int]) -> None:
        self._length[0] = 0
        self.extend(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        begin = int(self._length[0])
        self._text[0, begin : begin + len(tokens)] = tokens
        self._length[0] += len(tokens)

    @property
    def _root(self) -> int:
        return int(self._text[0, self._length[0] - 1])

    def draft(self) -> Any:
        return self._proposer.propose(self._drafts, [[self._root]], self._length, self._text)

    def nodes(self, found: Any) -> tuple[list[int], list[int]]:
        tokens = list(found[0])
        return [self._root, *tokens], [*range(-1, len(tokens))]


def ngram_drafters() -> dict[str, Callable[[int], Drafter]]:
    """Return constructors of drafters, which take the number of drafts, by name: as served, and at their best."""
    drafters: dict[str, Callable[[int], Drafter]] = {}
    if arctic := installed("arctic_inference.suffix_decoding"):
        drafters["arctic"] = lambda drafts: SuffixTrees(arctic, drafts, depth=24, tree=False)
        drafters["arctic tree"] = lambda drafts: SuffixTrees(arctic, drafts, depth=64, tree=True)
    if sglang := installed("sglang.kernels.ops.speculative.ngram_corpus"):
        drafters["sglang"] = lambda drafts: Trie(sglang, drafts, prompts=False)
        drafters["sglang + prompts"] = lambda drafts: Trie(sglang, drafts, prompts=True)
    if vllm := installed("vllm.v1.spec_decode.ngram_proposer"):
        drafters["vllm"] = lambda drafts: PromptLookup(vllm, drafts, shortest=LOOKUP)
        drafters["vllm from 2"] = lambda drafts: PromptLookup(vllm, drafts, shortest=2)
    return drafters
