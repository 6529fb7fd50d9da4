"""The type of the tensors that ops take: any that speaks DLPack (torch, NumPy, CuPy, JAX)."""

from typing import Any, TypeAlias

Tensor: TypeAlias = Any
