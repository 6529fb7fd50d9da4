"""Our attention in transformers' attention interface: what a hooked module asks, and who answers it.

Transformers lets a model name the functions that compute attention and make masks. Ours pass each call to the hook of
the running pass: a probe when a model is loaded (`attention_probe`), paged attention afterwards (`paged_attention`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ...plans import HEAD_DIMS
from ..kv_pools import KeyValueLayout
from ..layers.head_layout import pool_dim

NAME = "specdec_paged_tree"  # our attention, among transformers'
ROTATION = "apply_rotary_pos_emb"  # what modeling files call the function that rotates queries and keys


class UnsupportedModel(ValueError):
    """A model that the transformers backend cannot run. The message, without the model's name, says what it does."""


class MaskKind(NamedTuple):
    """Rows of its path that a row sees in a layer: all, the last `size`, or those of its own chunk of `size`."""

    kind: str  # "all", "window" or "chunk"
    size: int = 0


class Temperature(NamedTuple):
    """Factors of queries that rise with their position, as Llama 4 has them (arXiv 2501.19399)."""

    scale: float
    floor: float  # positions that share a factor

    def scaled(self, q: Tensor, positions: Tensor) -> Tensor:
        """Return the queries [1, heads, T, D] of these positions [T], rounded as transformers does."""
        factors = torch.log1p(torch.floor((positions.float() + 1.0) / self.floor)) * self.scale + 1.0
        return (q * factors[:, None]).to(q.dtype)


class AttentionSpec(NamedTuple):
    """The fixed properties of one attention call of a pass. Every pass makes the same calls in the same order."""

    module: nn.Module
    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    mask: MaskKind
    is_rotated: bool  # a rotation comes just before it that `rope_qkv_write_kv` can do
    temperature: Temperature | None = None  # which the module leaves to us

    @property
    def head_dim(self) -> int:
        """The head dimension of the pools.

        It is the next one that our kernels have; if there is none, the larger one of K and V.
        """
        return pool_dim(max(self.k_dim, self.v_dim))

    @property
    def is_gathered(self) -> bool:
        """Whether our kernel cannot express the call, so that KV is gathered for torch."""
        return self.mask.kind == "chunk" or self.head_dim not in HEAD_DIMS

    @property
    def kv_layout(self) -> KeyValueLayout:
        return KeyValueLayout(self.kv_heads, self.head_dim, self.head_dim, self.window)

    @property
    def window(self) -> int | None:
        return self.mask.size if self.mask.kind == "window" else None


class AttentionHook(Protocol):
    """The receiver of a module's attention calls, masks and rotations during a pass."""

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor: ...

    def mask(self, options: dict[str, Any]) -> Tensor: ...

    def rotate(
        self, own: Callable[..., Any], q: Tensor, k: Tensor, *arguments: Any, **named: Any
    ) -> tuple[Tensor, Tensor]: ...


_running: ContextVar[AttentionHook | None] = ContextVar("specdec_paged_tree", default=None)


@contextmanager
def use_hook(hook: AttentionHook) -> Iterator[None]:
    """Send the attention calls, masks and rotations of this thread to the hook."""
    token = _running.set(hook)
    try:
        yield
    finally:
        _running.reset(token)


def running_hook() -> AttentionHook:
    """Return the hook of the pass that runs in this thread."""
    hook = _running.get()
    if hook is None:
        raise RuntimeError(f"attention {NAME!r} is called outside of a pass of the engine")
    return hook


def attention_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """Return [1, T, heads, D] for query [1, heads, T, D], with the signature of transformers' attention functions."""
    return running_hook().attend(module, query, key, value, attention_mask, options), None


def mask_function(**options: Any) -> Tensor:
    """Return the running hook's mask, with the signature of transformers' mask functions."""
    return running_hook().mask(options)


AttentionInterface.register(NAME, attention_function)
AttentionMaskInterface.register(NAME, mask_function)


class HookedRotation:
    """A modeling file's rotary function. It asks the running hook to rotate; without a hook it is the function."""

    def __init__(self, own: Callable[..., Any]) -> None:
        functools.update_wrapper(self, own)
        self._own = own

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        hook = None if torch.compiler.is_compiling() else _running.get()
        return self._own(*arguments, **named) if hook is None else hook.rotate(self._own, *arguments, **named)


_hooking = Lock()


def hook_rotations(model: nn.Module) -> None:
    """Have the modules' files ask the running hook to rotate queries and keys.

    Transformers has no interface for that: modules call a function of their modeling file. It is wrapped there, once
    for the process, and other users of the file get what they got: no hook runs in their threads.
    """
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)  # without its decorators
        names = getattr(getattr(forward, "__code__", None), "co_names", ())
        if ROTATION in names and ROTATION in forward.__globals__:
            with _hooking:
                own = forward.__globals__[ROTATION]
                if not isinstance(own, HookedRotation):
                    forward.__globals__[ROTATION] = HookedRotation(own)


def marker_like(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a tensor in place of a mask, which nothing reads."""
    return torch.zeros(1, 1, 1, 1, device=device, dtype=dtype)
