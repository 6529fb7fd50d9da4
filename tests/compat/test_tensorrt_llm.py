"""compat.tensorrt_llm: the n-gram drafter, on stubs of TensorRT-LLM's requests and base classes."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import pickle
import sys
import types
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest

from specdec_kernels.compat import tensorrt_llm, version_gate
from specdec_kernels.compat.tensorrt_llm import ngram
from specdec_kernels.compat.tensorrt_llm.ngram import NgramDrafts

RECORD = Path(__file__).parent / "contracts" / "tensorrt_llm-1.2.0rc2.json"


class Request:
    """A request with what TensorRT-LLM's own n-gram drafter reads."""

    def __init__(self, request_id: int, prompt: list[int], new: int = 100) -> None:
        self.request_id, self.tokens = request_id, list(prompt)
        self.py_orig_prompt_len, self.py_max_new_tokens = len(prompt), new
        self.py_draft_tokens: list[int] = [7, 7, 7]

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self.tokens)


def scheduled(*requests: Request) -> Any:
    return types.SimpleNamespace(generation_requests=requests, context_requests=[Request(99, [1])])


def drafts(drafter: Any, *requests: Request) -> list[list[int]]:
    drafter.prepare_draft_tokens(scheduled(*requests), None)
    return [request.py_draft_tokens for request in requests]


def test_drafter_continues_texts_of_all_requests() -> None:
    drafter = NgramDrafts(4, max_requests=4, max_len=64)
    first, other = Request(0, [1, 2, 3, 4, 5, 6, 1, 2]), Request(1, [30, 31, 32])
    assert drafts(drafter, first, other) == [[3, 4, 5, 6], []]
    first.tokens += [30, 31]
    assert drafts(drafter, other, first)[1][0] == 32


def test_drafter_inserts_each_text_once_and_follows_a_request_that_waits() -> None:
    drafter = NgramDrafts(4, max_requests=1, max_len=64)
    first = Request(0, [1, 2, 3])
    drafts(drafter, first)
    first.tokens += [4, 5]
    drafts(drafter, first)
    assert drafter.index.statistics.inserted == 5
    drafts(drafter, Request(1, [8, 9]))
    first.tokens += [1, 2]
    assert drafts(drafter, first)[0][:2] == [3, 4]
    assert drafter.index.statistics.inserted == 9


def test_drafter_detects_an_id_that_is_used_again() -> None:
    drafter = NgramDrafts(4, max_requests=1, max_len=64)
    drafts(drafter, Request(0, [1, 2, 3, 4]))
    assert drafts(drafter, Request(0, [9, 2]))[0][:2] == [3, 4]


@pytest.mark.parametrize(("new", "count"), [(0, 0), (1, 0), (2, 1), (4, 3), (50, 4)])
def test_drafter_stops_where_the_request_ends(new: int, count: int) -> None:
    request = Request(0, [1, 2, 3, 4, 5, 6, 1, 2], new)
    assert drafts(NgramDrafts(4, max_requests=1, max_len=64), request) == [[3, 4, 5, 6][:count]]


def test_drafter_stops_at_max_len_and_leaves_longer_texts_alone() -> None:
    drafter = NgramDrafts(4, max_requests=2, max_len=10)
    request, longer = Request(0, [1, 2, 3, 4, 5, 6, 1]), Request(1, list(range(11)))
    assert drafts(drafter, request, longer) == [[2, 3], []]
    request.tokens += [2, 3]
    assert drafts(drafter, request, longer) == [[], []]


def test_drafter_names_what_it_refuses() -> None:
    with pytest.raises(ValueError, match=r"^NgramDrafter: max_draft_len is 256, expected 1 to 255$"):
        NgramDrafts(256, max_requests=1, max_len=10)
    with pytest.raises(ValueError, match=r"^NgramDrafter: 2 requests generate, expected at most max_requests, 1$"):
        drafts(NgramDrafts(4, max_requests=1, max_len=10), Request(0, [1]), Request(1, [1]))


# --- with TensorRT-LLM's base class ---


class OlderDrafter(ABC):
    def __init__(self, max_concurrency: int | None = None) -> None:
        self.max_concurrency = max_concurrency

    @abstractmethod
    def prepare_draft_tokens(self, scheduled_requests: Any, resource_manager: Any = None) -> None:
        raise NotImplementedError


class NewerDrafter(OlderDrafter):
    def __init__(
        self, max_draft_len: int, max_total_draft_tokens: int, max_concurrency: int | None = None, schedule: Any = None
    ) -> None:
        super().__init__(max_concurrency)
        self.max_draft_len, self.max_total_draft_tokens = max_draft_len, max_total_draft_tokens


@pytest.fixture(params=[OlderDrafter, NewerDrafter])
def base(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let TensorRT-LLM's drafter be a stub."""
    package = "tensorrt_llm._torch.speculative.drafter"
    for end in range(1, 5):
        name = ".".join(package.split(".")[:end])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[package].Drafter = request.param  # type: ignore[attr-defined]
    ours = "specdec_kernels.compat.tensorrt_llm.drafter"
    monkeypatch.delitem(sys.modules, ours, raising=False)
    yield request.param
    sys.modules.pop(ours, None)


def test_drafter_is_one_of_the_engine(base: Any) -> None:
    drafter = tensorrt_llm.NgramDrafter(4, max_requests=2, max_len=64, max_concurrency=8)
    assert isinstance(drafter, base) and isinstance(drafter, NgramDrafts)
    assert drafter.max_draft_len == 4 and drafter.max_concurrency == 8
    assert getattr(drafter, "max_total_draft_tokens", 4) == 4
    assert drafts(drafter, Request(0, [1, 2, 3, 1])) == [[2, 3, 1]]


def test_drafter_is_copied_to_the_process_of_the_engine(base: Any) -> None:
    drafter = tensorrt_llm.NgramDrafter(3, max_requests=2, max_len=64, max_concurrency=8)
    for made in (pickle.loads(pickle.dumps(drafter)), copy.deepcopy(drafter)):
        assert type(made) is type(drafter) and made.index is not drafter.index
        assert made.max_draft_len == 3 and made.max_concurrency == 8


def test_package_is_imported_without_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    importlib.reload(tensorrt_llm)
    with pytest.raises(ImportError):
        _ = tensorrt_llm.NgramDrafter
    with pytest.raises(AttributeError, match=r"has no attribute 'Other'$"):
        _ = tensorrt_llm.Other


def test_changed_signature_of_the_base_class_is_refused(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.loads(RECORD.read_text())
    (key,) = [key for key in record if "Drafter.prepare_draft_tokens" in key and key.startswith("Parameters")]
    read: dict[str, Any] = dict(record)
    gate = functools.partial(version_gate.parts_to_take_over, sources_of=lambda package: read)
    monkeypatch.setattr(ngram, "parts_to_take_over", gate)
    monkeypatch.setattr(version_gate, "version", lambda package: "1.4.0rc1")
    tensorrt_llm.NgramDrafter(4, max_requests=2, max_len=64)
    read[key] = ["self", "batch"]
    with pytest.raises(
        ValueError,
        match=r"^NgramDrafter: this version of TensorRT-LLM is not known, and .* has the parameters \(self, batch",
    ):
        tensorrt_llm.NgramDrafter(4, max_requests=2, max_len=64)
