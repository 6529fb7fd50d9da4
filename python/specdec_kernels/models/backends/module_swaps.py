"""Module swaps of the transformers backend: forward passes by our kernels where they compute the same.

A norm of transformers is eight launches, and ours is one; for few rows our GEMM is faster than cuBLAS. A module is
recognized by what it computes, not by its name: both run on the same random rows before ours replaces it. Modules keep
their classes, parameters and hooks; only their forward pass changes. They are copies (`module_copy.shared_copy`), so
the model itself stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from ...ops import silu_and_mul
from ..layers.linear import fused, linear_of
from ..layers.mlp import Activation, GatedMLP, activation_of
from ..layers.moe import Experts, routing_of
from ..layers.norm import RMSNorm
from ..layers.quantized import QuantizedLinear
from ..weights.quantized_loading import PARTS
from ..weights.update import write_over

EXPERTS = "specdec_experts"  # our experts, among transformers' implementations
EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")

# Largest relative difference of two results that count as the same; and absolute, relative to the largest element / 8.
NEAR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class ModuleSwaps:
    """Replaced forward passes of a model's modules.

    Args:
        model: a copy whose modules nobody else runs.
        widths: the row length of the input of each module that a pass has run.

    Attributes:
        counts: the number of swapped modules of each kind.
    """

    def __init__(self, model: nn.Module, widths: dict[nn.Module, int]) -> None:
        self.counts: Counter[str] = Counter()
        self._makers: list[Callable[[], RMSNorm | GatedMLP]] = []
        self._parts: list[RMSNorm | GatedMLP] = []
        like = next(model.parameters()).detach()
        with torch.inference_mode(False), torch.no_grad():
            for module, width in widths.items():
                maker: Callable[[], RMSNorm | GatedMLP] | None
                if (maker := norm_like(module, width, like)) is not None:
                    self.counts["norms"] += 1
                elif (maker := mlp_like(module, width)) is not None:
                    self.counts["mlps"] += 1
                if maker is not None:
                    self._swap(module, len(self._makers), width, like.dtype)
                    self._makers.append(maker)
            for module in model.modules():
                if type(module) is nn.Linear:
                    module.forward = partial(_linear, ref(module))  # type: ignore[method-assign]
                    self.counts["linears"] += 1
            self.make()

    @torch.no_grad()
    def make(self) -> None:
        """Make our layers from the parameters that the modules have now."""
        self._parts[:] = [maker() for maker in self._makers]

    def drop(self) -> None:
        """Let go of the parameters; no pass may run until `make`."""
        self._parts.clear()

    @torch.no_grad()
    def refresh(self) -> None:
        """Recompute, in place, what was made of parameters."""
        write_over(self._parts, [maker() for maker in self._makers])

    def _swap(self, module: nn.Module, index: int, width: int, dtype: torch.dtype) -> None:
        """Swap for rows of this width and dtype; the module runs others itself, and calls with more arguments.

        Nothing here holds the module: a cycle would keep its weights until the garbage collector runs.
        """
        own, itself, kind = vars(module).get("forward"), ref(module), type(module)
        parts = self._parts

        def forward(*arguments: Any, **named: Any) -> Any:
            if len(arguments) == 1 and not named and arguments[0].dtype == dtype and arguments[0].shape[-1] == width:
                part = parts[index]
                return part(arguments[0]) if isinstance(part, RMSNorm) else _mlp(part, arguments[0])
            return own(*arguments, **named) if own is not None else kind.forward(itself(), *arguments, **named)

        module.forward = forward


def _mlp(part: GatedMLP, x: Tensor) -> Tensor:
    return part.output(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def _linear(module: ref[nn.Linear], x: Tensor) -> Tensor:
    """Multiply by the parameters that the module has now: fusing may have moved them."""
    linear = module()
    assert linear is not None  # it runs
    if x.dtype != linear.weight.dtype:
        return functional.linear(x, linear.weight, linear.bias)  # raises torch's own error
    return linear_of(linear)(x)


def near(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Return whether two results are equal but for rounding in `dtype`."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.float(), b.float()
    return torch.allclose(a, b, rtol=NEAR[dtype], atol=NEAR[dtype] * float(b.abs().max()) / 8)


def random_rows(rows: int, width: int, like: Tensor) -> Tensor:
    """Return random rows [1, rows, width] from a fixed seed."""
    x = torch.randn(1, rows, width, generator=torch.Generator().manual_seed(rows))
    return x.to(like.device, like.dtype)


def agree(
    module: nn.Module, ours: Callable[[Tensor], Tensor], width: int, like: Tensor, scales: tuple[float, ...]
) -> bool:
    """Return whether the module and ours compute the same for random rows of these magnitudes."""
    for scale in scales:
        x = random_rows(5, width, like) * scale
        try:
            theirs = module(x.clone())
            mine = ours(x)
        except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError):
            return False
        if not isinstance(theirs, Tensor) or not near(mine, theirs, like.dtype):
            return False
    return True


def norm_like(module: nn.Module, width: int, like: Tensor) -> Callable[[], RMSNorm] | None:
    """Return a factory of the RMSNorm that a module computes, by weight, 1 + weight or ones of the dtype of `like`.

    None: the module is no RMSNorm.
    """
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    eps = next((getattr(module, name) for name in EPSILONS if isinstance(getattr(module, name, None), float)), None)
    weight = tensors.pop("weight", None)
    if eps is None or tensors or any(module.children()) or isinstance(module, nn.LayerNorm):
        return None
    if like.dtype not in NEAR or (weight is not None and (weight.shape != (width,) or weight.dtype != like.dtype)):
        return None
    ones = RMSNorm(torch.ones(width, dtype=like.dtype, device=like.device), eps)
    makers: list[Callable[[], RMSNorm]] = [lambda: ones]
    if weight is not None:
        makers = [
            lambda: RMSNorm(weight.detach(), eps),
            lambda: RMSNorm((1 + weight.detach().float()).to(weight.dtype), eps),
        ]
    for maker in makers:
        # Small rows reveal eps.
        if agree(module, maker().__call__, width, like, (1.0, 30.0, eps**0.5)):
            return maker
    return None


def mlp_like(module: nn.Module, width: int) -> Callable[[], GatedMLP] | None:
    """Return a factory of the gated MLP that a module computes, which fuses its weights; None: the module is none."""
    linears = {name: part for name, part in module.named_children() if isinstance(part, (nn.Linear, QuantizedLinear))}
    parts = {PARTS.get(name): part for name, part in linears.items()}
    others = [part for part in module.children() if part not in linears.values()]
    if len(linears) != 3 or parts.keys() != {"gate", "up", "down"} or len(others) > 1:
        return None
    gate, up, down = parts["gate"], parts["up"], parts["down"]
    if (gate.bias is None) != (up.bias is None) or any(isinstance(part, QuantizedLinear) for part in parts.values()):
        return None
    activation: Activation | None = activation_of(others[0]) if others else None
    like: Any = down.weight

    def by_parts(x: Tensor) -> Tensor:
        opened = gate(x)
        out: Tensor = down((functional.silu(opened) if activation is None else activation(opened)) * up(x))
        return out

    # Large rows reveal a clamp.
    if not agree(module, by_parts, width, like, (1.0, 20.0)):
        return None
    return lambda: GatedMLP(fused(gate, up), linear_of(down), activation)


def is_rotation_of_halves(q: Tensor, k: Tensor, out: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Return whether `out` is q and k [1, heads, T, D] as `rope_qkv_write_kv` rotates them.

    It rotates element i with element i + D / 2, by cosines and sines [1, T, D / 2], or these twice [1, T, D].
    """
    if named or len(arguments) != 2 or not all(isinstance(table, Tensor) for table in arguments):
        return False
    half = q.shape[-1] // 2
    for table in arguments:
        if table.shape not in ((1, q.shape[2], half), (1, q.shape[2], 2 * half)):
            return False
        if table.shape[2] > half and not torch.equal(table[..., :half], table[..., half:]):
            return False
    cosines, sines = (table[0, :, :half].float() for table in arguments)

    def rotated(x: Tensor) -> Tensor:
        first, second = x[..., :half].float(), x[..., half:].float()
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1).to(x.dtype)

    return isinstance(out, tuple) and all(near(rotated(x), y, x.dtype) for x, y in zip((q, k), out, strict=True))


def experts_function(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run experts by `Experts`, which never wait for the host, with the signature of transformers' functions."""
    if getattr(module, "has_post_expert_norm", False):
        other: Tensor = ALL_EXPERTS_FUNCTIONS["batched_mm"](module, hidden_states, top_k_index, top_k_weights)
        return other
    wide, down = module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj
    biases: dict[str, Any] = {}
    if module.has_bias:
        name = "gate_up_proj_bias" if module.has_gate else "up_proj_bias"
        biases = {"gate_up_bias": getattr(module, name).detach(), "down_bias": module.down_proj_bias.detach()}
    gate = module._apply_gate if module.has_gate else module.act_fn
    if module.has_gate and type(module)._apply_gate is _default_apply_gate and activation_of(module.act_fn) is None:
        gate = silu_and_mul
    wide, down = wide.detach(), down.detach()
    if not module.is_transposed:
        wide, down = wide.transpose(1, 2), down.transpose(1, 2)
    experts = Experts(wide, down, **biases, act=gate)
    return experts(hidden_states, routing_of(top_k_index, top_k_weights.float(), len(wide)))


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_function)
