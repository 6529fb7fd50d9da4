"""The type of tensors: any with DLPack (torch, NumPy, CuPy, JAX)."""

from typing import Any, TypeAlias

Tensor: TypeAlias = Any
