"""The base of families with recurrent layers."""

from __future__ import annotations

from typing import Any

import torch

from ..layers.linear import linear_of
from ..layers.recurrent import Conv, GatedRMSNorm, Mamba2
from ..layers.reduction import reduction_of
from ..state_cache import ConvSpec, RecurrenceSpec, StateSpec
from .llama import Llama

MAX_TAPS, MAX_STATE_DIM = 8, 256  # of our ops
RECURRENT = ("linear_attention", "mamba", "conv")  # in `layer_types`; "mamba" in older releases of transformers


class Hybrid(Llama):
    """Llama with a recurrent state in some layers, those of `RECURRENT` types."""

    @property
    def types(self) -> list[str]:
        """The type of each layer."""
        kinds: list[str] = self.config.layer_types
        return kinds

    def state_spec(self, dtype: torch.dtype) -> StateSpec:
        """Return what a recurrent layer keeps."""
        raise NotImplementedError

    def state_specs(self, dtype: torch.dtype) -> list[StateSpec]:
        return [self.state_spec(dtype) for kind in self.types if kind in RECURRENT]

    @property
    def num_kv_layers(self) -> int:
        return sum("attention" in kind and kind not in RECURRENT for kind in self.types)

    def check(self, name: str = "model") -> None:
        super().check(name)
        if not self.num_kv_layers:
            raise ValueError(
                f"{name}: {self.config.model_type} has no attention in its layers, expected some that have"
            )
        spec = self.state_spec(torch.float32)
        if not 2 <= spec.conv.width <= MAX_TAPS:
            raise ValueError(f"{name}: convolutions have {spec.conv.width} taps, expected 2 to {MAX_TAPS}")
        if spec.recurrence is not None and (most := spec.recurrence.largest_dim) > MAX_STATE_DIM:
            raise ValueError(f"{name}: states have a dimension of {most}, expected at most {MAX_STATE_DIM}")


class Mamba2Hybrid(Hybrid):
    """A hybrid whose recurrent layers are Mamba 2, by the names that most configs have."""

    act_name = "hidden_act"  # in the config, of the convolutions' activation
    mamba_path = "mamba"  # the end of the paths of mixers

    def check(self, name: str = "model") -> None:
        super().check(name)
        if (act := self.conv_activation) != "silu":
            raise ValueError(f"{name}: {self.act_name} is {act!r}, expected 'silu'")

    @property
    def conv_activation(self) -> str:
        name: str = getattr(self.config, self.act_name)
        return name

    @property
    def mamba_sizes(self) -> RecurrenceSpec:
        config = self.config
        return RecurrenceSpec(config.mamba_n_groups, config.mamba_n_heads, config.mamba_d_state, config.mamba_d_head)

    @property
    def conv_width(self) -> int:
        width: int = self.config.mamba_d_conv
        return width

    def state_spec(self, dtype: torch.dtype) -> StateSpec:
        sizes = self.mamba_sizes
        channels = sizes.value_heads * sizes.value_dim + 2 * sizes.key_heads * sizes.key_dim
        return StateSpec(ConvSpec(channels, self.conv_width, dtype), sizes)

    def division(self) -> dict[str, Any]:
        sizes, path = self.mamba_sizes, self.mamba_path
        values, keys = (sizes.value_heads, sizes.value_dim), (sizes.key_heads, sizes.key_dim)
        steps = sizes.value_heads, 1
        return {
            f"{path}.in_proj": (values, values, keys, keys, steps),
            f"{path}.conv1d": (values, keys, keys),
            f"{path}.A_log": "colwise",
            f"{path}.D": "colwise",
            f"{path}.dt_bias": "colwise",
            f"{path}.norm": f"norm_of_groups:{sizes.key_heads}",
            f"{path}.out_proj": "rowwise",
        }

    def gated_norm(self, module: Any) -> GatedRMSNorm:
        """Return the norm of a mixer's outputs, of groups of heads where the module's norm knows groups.

        Bamba and Granite 4 of older versions of transformers normalize whole rows. That is the same for their published
        models, which have one group.
        """
        norm = module.norm
        has_groups = hasattr(norm, "group_size") or hasattr(norm, "n_groups")
        groups = self.mamba_sizes.key_heads if has_groups else 1
        return GatedRMSNorm(
            norm.weight.detach(), norm.variance_epsilon, groups, gates_first=True, reduction=reduction_of(norm)
        )

    def mamba(self, module: Any) -> Mamba2:
        """Return the mixer of a module.

        Its limits of time steps hold for all tokens, as in the module's pass over a text. Modules with a lower limit
        above 0 (Nemotron-H, Zamba 2) leave it out in transformers' decode steps: where a step is that small, `generate`
        gives another text than the one that the module scores highest.
        """
        low, high = module.time_step_limit
        return Mamba2(
            conv=Conv.of(module.conv1d, "silu"),
            out=linear_of(module.out_proj),
            in_proj=linear_of(module.in_proj),
            decay=-module.A_log.detach().float().exp(),
            dt_bias=module.dt_bias.detach(),
            skip=module.D.detach().float(),
            norm=self.gated_norm(module),
            sizes=self.mamba_sizes,
            dt_limit=(low, high),
        )
