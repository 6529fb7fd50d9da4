"""Files that never end, as options of an engine: refused by name instead of read for ever."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specdec_kernels.engine import Engine, Ngram
from specdec_kernels.engine.tuning import read_tuning
from specdec_kernels.tiny import tiny_model


@pytest.fixture(params=["fifo", "device"])
def endless(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "device":
        return Path("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_tuning_refuses_endless_files(endless: Path) -> None:
    with pytest.raises(ValueError) as error:
        read_tuning(endless)
    assert str(error.value) == f"Engine: tuning is {endless}, expected a regular file"


def test_corpus_refuses_endless_files(endless: Path) -> None:
    with pytest.raises(ValueError) as error:
        Engine(tiny_model("target"), draft=Ngram(corpus=[endless]), device="cpu", max_len=64, num_slots=1)
    assert str(error.value) == f"Ngram: corpus is {endless}, expected a regular file"
