"""Tensors made from values of the host without waiting for the device."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor


def to_device(values: array[Any], device: torch.device) -> Tensor:
    """Return values as int32, or float32, on the device, in stream order; a pageable copy would wait for the stream."""
    dtype = torch.float32 if values.typecode == "f" else torch.int32
    if not values:  # torch takes no empty buffer
        return torch.empty(0, dtype=dtype, device=device)
    tensor = torch.frombuffer(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
