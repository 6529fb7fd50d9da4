"""Old names of 0.2: each warns and gives what replaced it, with its old keyword arguments."""

from __future__ import annotations

import inspect

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels import _deprecated, ops


@pytest.mark.parametrize("old", _deprecated.RENAMED)
@pytest.mark.parametrize("module", [sd, ops], ids=["package", "ops"])
def test_old_name_warns_and_gives_the_new_object(module: object, old: str) -> None:
    new = _deprecated.RENAMED[old]
    with pytest.warns(DeprecationWarning, match=rf"\.{old} is deprecated, use {new}$"):
        value = getattr(module, old)
    assert inspect.unwrap(value) is inspect.unwrap(getattr(sd, new))


@pytest.mark.parametrize("op", _deprecated.RENAMED_ARGUMENTS)
def test_new_arguments_exist_and_old_ones_do_not(op: str) -> None:
    parameters = inspect.signature(getattr(sd, op)).parameters
    for old, new in _deprecated.RENAMED_ARGUMENTS[op].items():
        assert new in parameters and old not in parameters


def test_old_keyword_warns_and_is_passed_on() -> None:
    scores = torch.randn(3, 8)
    with pytest.warns(DeprecationWarning):
        routed = sd.route_rows(scores, taken=2, normalised=True)
    assert torch.equal(routed[0], sd.moe_route(scores, 2, renormalize=True)[0])


def test_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"^module 'specdec_kernels' has no attribute 'nothing'$"):
        sd.nothing  # noqa: B018
