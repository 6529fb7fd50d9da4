"""A step that every engine of the packaged tiny target repeats, done once in a process: its files do not change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import pytest
import torch

from specdec_kernels.models.backends import native
from specdec_kernels.models.backends.native import CausalLM
from specdec_kernels.tiny import tiny_model

TARGET = str(tiny_model("target"))


@contextmanager
def checked_once() -> Iterator[None]:
    """Check the target's layers against its module once for each dtype and device.

    Modules, adapters and other folders are checked every time.
    """
    load_causal_lm, check_against_module = native.load_causal_lm, native.check_against_module
    of_files: WeakSet[torch.nn.Module] = WeakSet()
    checked: set[tuple[torch.dtype, torch.device]] = set()

    def load(model: Any, dtype: Any, name: str, packages: Any, adapter: Any = None, **options: Any) -> Any:
        module = load_causal_lm(model, dtype, name, packages, adapter, **options)
        if str(model) == TARGET and adapter is None:
            of_files.add(module)
        return module

    def check(lm: CausalLM, dtype: torch.dtype, name: str) -> None:
        kind = dtype, lm.embedding.weight.device
        if lm.model not in of_files or kind not in checked:
            check_against_module(lm, dtype, name)
        if lm.model in of_files:
            checked.add(kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "load_causal_lm", load)
        patch.setattr(native, "check_against_module", check)
        yield
