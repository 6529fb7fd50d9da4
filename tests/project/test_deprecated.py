"""Old names of 0.2: each warns and gives its replacement, with its old keyword arguments."""

from __future__ import annotations

import inspect
import operator

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels import _deprecated, ops

KEPT_NAMES = sorted(_deprecated.RENAMED_ARGUMENTS.keys() - set(_deprecated.RENAMED.values()))


@pytest.mark.parametrize("old", _deprecated.RENAMED)
@pytest.mark.parametrize("module", [sd, ops], ids=["package", "ops"])
def test_old_name_warns_and_gives_the_new_object(module: object, old: str) -> None:
    new = _deprecated.RENAMED[old]
    with pytest.warns(DeprecationWarning, match=rf"\.{old} is deprecated, use {new}$"):
        value = getattr(module, old)
    assert inspect.unwrap(value) is inspect.unwrap(getattr(sd, new))


@pytest.mark.parametrize("function", _deprecated.RENAMED_ARGUMENTS)
def test_new_arguments_exist_and_old_ones_do_not(function: str) -> None:
    parameters = inspect.signature(operator.attrgetter(function)(sd)).parameters
    for old, new in _deprecated.RENAMED_ARGUMENTS[function].items():
        assert new in parameters and old not in parameters


def test_old_keyword_of_an_old_name_warns_and_is_passed_on() -> None:
    scores = torch.randn(3, 8)
    with pytest.warns(DeprecationWarning):
        routed = sd.route_rows(scores, taken=2, normalised=True)
    assert torch.equal(routed[0], sd.moe_route(scores, 2, renormalize=True)[0])


def draft_of_nothing(**size: int) -> torch.Tensor:
    return sd.NgramIndex(27, 1, 8).draft(None, torch.zeros(1, dtype=torch.int32), **size).tree.tokens


def tree_of_nothing(**size: int) -> torch.Tensor:
    none = [torch.zeros(1, 0, dtype=torch.int32)] * 2
    state = [torch.zeros(1, dtype=torch.int32)] * 2
    return sd.build_tree(sd.Candidates(*none, torch.zeros(1, 0)), *state, **size).tokens


def merged_roots(**size: int) -> torch.Tensor:
    zeros = torch.zeros(1, 1, dtype=torch.int32)
    root = sd.build_tree_from_parents(zeros, zeros - 1, zeros[0])
    return sd.merge_trees(root, torch.zeros(1, 1), root, torch.zeros(1, 1), **size)[1]


def packed_root(**allocation: sd.NodeAllocation) -> torch.Tensor:
    zeros = torch.zeros(1, 1, dtype=torch.int32)
    root = sd.build_tree_from_parents(zeros, zeros - 1, zeros[0])
    return sd.pack_trees(root, torch.zeros(1, 1), num_rows=2, **allocation).scores


CALLS = {
    "NgramIndex.draft": (draft_of_nothing, 3),
    "build_tree": (tree_of_nothing, 3),
    "merge_trees": (merged_roots, 3),
    "pack_trees": (packed_root, sd.allocate_nodes(torch.zeros(1, 1), 1)),
}


@pytest.mark.parametrize("function", KEPT_NAMES)
def test_old_keyword_of_a_function_that_keeps_its_name_warns_and_is_passed_on(function: str) -> None:
    call, value = CALLS[function]
    ((old, new),) = _deprecated.RENAMED_ARGUMENTS[function].items()
    with pytest.warns(DeprecationWarning, match=rf"^{function}: {old} is deprecated, use {new}$"):
        result = call(**{old: value})
    assert torch.equal(result, call(**{new: value}))


def test_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"^module 'specdec_kernels' has no attribute 'nothing'$"):
        sd.nothing  # noqa: B018
