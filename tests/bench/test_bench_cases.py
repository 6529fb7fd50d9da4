"""Every op has a benchmark case, and every case checks what it times."""

from __future__ import annotations

import pytest
import torch

from specdec_kernels.bench.ops import timing
from specdec_kernels.bench.ops.cases import CASES
from specdec_kernels.bench.ops.ceilings import Ceilings
from specdec_kernels.bench.ops.check import WrongResult
from specdec_kernels.bench.ops.harness import Case, Work, check, measure
from specdec_kernels.ops._op_list import native_halves, public_ops

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def make_smallest(case: Case, device: torch.device) -> Work:
    if device.type not in case.devices:
        pytest.skip(f"runs on {' and '.join(case.devices)} only")
    return case.make(device, case.smallest(device))


def test_cases_cover_every_op() -> None:
    missing = [op for op in public_ops() if native_halves(op) and op not in CASES]
    assert not missing


@every_case
def test_case_passes_its_check_at_the_smallest_size(device: torch.device, case: Case) -> None:
    check(make_smallest(case, device))


@every_case
def test_case_check_fails_if_the_op_did_nothing(device: torch.device, case: Case) -> None:
    work = make_smallest(case, device)
    with pytest.raises(WrongResult):
        work.check()


@every_case
def test_case_is_measured_at_the_smallest_size(
    device: torch.device, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type not in case.devices:
        pytest.skip("no such half")
    monkeypatch.setattr(timing, "MAX_SECONDS", 0.01)
    result = measure(case, case.smallest(device), device, Ceilings(1e12, 1e12, 1e12))
    assert result.error is None and result.time is not None
    assert 0 <= result.time.best <= result.time.median <= result.time.p90
    assert result.bytes_moved > 0 and result.floor is not None and result.floor > 0
    assert (result.host is None) == (device.type == "cpu")
