"""The fallback backend: a model of transformers as it is, with our paged tree attention in its attention interface.

The module's own code computes everything but attention. It reads position ids and has no cache. Where it calls an
attention function, ours writes the keys and values to the layer's pages and attends over them. A model says which rows
a layer sees (all, a sliding window, a chunk) by the mask it asks for: a probe learns that once, and later masks are
empty markers. Norms, MLPs, linears, rotations and experts run on our kernels where they compute the same
(`module_swaps`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from ..families import check_length
from ..kv_pools import KvPools
from ..language_model import Prefilled, States
from ..layers.paged_batch import LastRows, PagedBatch
from ..options import ModelOptions
from ..shard import WHOLE
from ..weights.loading import load_causal_lm, place
from ..weights.model_config import config_of
from .attention_hook import NAME, AttentionSpec, UnsupportedModel, hook_rotations, marker_like, use_hook
from .attention_probe import body_path, probe_pass
from .base import PagedModel
from .module_checks import (
    check_cached_windows,
    check_convolutions,
    check_serial_state,
    freeze_rotations,
    take_temperatures,
)
from .module_copy import accepted, replaced_submodule, shared_copy
from .module_swaps import EXPERTS, ModuleSwaps
from .paged_attention import PagedPass
from .place_check import check_places
from .self_check import check_against_itself

PROBED_TOKENS = 3


class GivenStates(nn.Module):
    """A model's body, for the modules that follow it: its output is the hidden states that it was given."""

    def __init__(self, output: type[ModelOutput]) -> None:
        super().__init__()
        self.output = output
        self.hidden: Tensor | None = None

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.output(last_hidden_state=self.hidden)


class TransformersLM(PagedModel):
    """A causal language model of transformers over paged KV, with the interface of `CausalLM`.

    Its modules are copies that share all parameters and buffers with the model's own, which stays as it is.

    Args:
        model, options: as for `CausalLM`.

    Attributes:
        specs: the attention calls of a pass.
        num_swaps: how many modules of each kind run on our kernels.

    Raises:
        ValueError: a model whose attention does not go through transformers' interface, or that carries more from token
            to token than keys and values; one whose logits are not those of its own forward pass; what
            `models.weights.loading` refuses.
    """

    def __init__(self, model: str | Path | nn.Module, options: ModelOptions) -> None:
        name, dtype, device = options.name, options.dtype, options.device
        if options.shard != WHOLE:
            raise ValueError(f"{name}: shard is {options.shard}, expected {WHOLE} with implementation='transformers'")
        self._config = config_of(model, name)
        check_length(self._config, options.max_len, name)
        self.model = load_causal_lm(
            model, dtype, name, adapter=options.adapter, any_module=True, draft_prefixes=options.draft_prefixes
        )
        place(self.model, dtype, device)
        self.max_len, self.dtype, self.device = options.max_len, dtype, device
        self.feature_layers = tuple(options.feature_layers)
        self._features: dict[int, Tensor] = {}
        self._marker = marker_like(device, dtype)
        try:
            self._open_modules(options.max_len)
            if self.feature_layers:
                self._keep_features()
        except UnsupportedModel as unsupported:
            raise ValueError(
                f"{name}: {type(self.model).__name__} {unsupported}, expected a decoder with causal attention "
                "through transformers' attention interface"
            ) from unsupported
        layouts = [spec.kv_layout for spec in self.specs]
        self._hold(KvPools.allocate(layouts, 16 + -(-64 // options.page_size), options.page_size, dtype, device))
        check_against_itself(self, dtype, name)
        self._make_pools(model, layouts, options)

    @torch.inference_mode()
    def _open_modules(self, max_len: int) -> None:
        """Make the body, which returns hidden states, and the head that follows it, from what one pass shows."""
        whole = shared_copy(self.model)
        whole.set_attn_implementation(NAME)
        whole.set_experts_implementation(EXPERTS)
        hook_rotations(whole)
        check_serial_state(whole, self._config)
        freeze_rotations(whole, self._config, max_len)
        tokens = torch.zeros(1, PROBED_TOKENS, dtype=torch.long, device=self.device)
        arguments = self._arguments(tokens, torch.arange(PROBED_TOKENS, device=self.device)[None])
        temperatures = take_temperatures(whole)
        probed = probe_pass(whole, arguments)
        self.specs: list[AttentionSpec] = [
            spec._replace(temperature=temperatures.get(spec.module)) for spec in probed.specs
        ]
        check_convolutions(whole, self.specs)
        check_cached_windows(self.specs, self._config, max_len)
        check_places(whole, self._arguments, max_len)
        path = body_path(whole, probed)
        self._body = whole.get_submodule(path)
        self.hidden_size: int = probed.outputs[path].last_hidden_state.shape[-1]  # its layers may have another
        self._swaps = ModuleSwaps(whole, probed.widths)
        self.num_swaps = self._swaps.counts
        if rotated := sum(spec.is_rotated for spec in self.specs):
            self.num_swaps["rotations"] = rotated
        if "position_ids" not in accepted(self._body, arguments):
            raise UnsupportedModel("takes no position_ids")
        self._given = GivenStates(type(probed.outputs[path]))
        self._head = replaced_submodule(whole, path, self._given)

    def _arguments(self, tokens: Tensor, positions: Tensor) -> dict[str, Any]:
        # Without a mask of ones, transformers looks for packed sequences in the positions, which waits for the device.
        ones = torch.ones_like(tokens)
        return {"input_ids": tokens, "attention_mask": ones, "position_ids": positions, "use_cache": False}

    def _keep_features(self) -> None:
        """Register hooks that keep the states entering the feature layers while a pass runs."""
        layers, features = self._layers(), self._features  # the hooks hold no more than these: no cycle
        count = len(layers)

        def keep(index: int) -> Callable[..., None]:
            def entering(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
                features[index] = arguments[0] if arguments else named["hidden_states"]

            return entering

        def leaving(_: nn.Module, __: Any, output: Any) -> None:
            features[count] = output if isinstance(output, Tensor) else output[0]

        for index in set(self.feature_layers):
            if index < count:
                layers[index].register_forward_pre_hook(keep(index), with_kwargs=True)
            else:
                layers[-1].register_forward_hook(leaving)

    def _layers(self) -> nn.ModuleList:
        """Return the list of the model's layers, each of which has one of the attention modules."""
        modules = [spec.module for spec in self.specs]
        for _, module in self._body.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == self._config.num_hidden_layers:
                within = [set(layer.modules()) for layer in module]
                if all(any(each in of for of in within) for each in modules):
                    return module
        raise UnsupportedModel("has no list of layers for feature_layers")

    def _hold(self, pools: KvPools) -> None:
        super()._hold(pools)
        self._kv = pools.layers

    @torch.inference_mode()
    def refresh(self) -> None:
        self._swaps.refresh()

    def _drop_parts(self) -> None:
        super()._drop_parts()
        self._swaps.drop()

    def _make_parts(self) -> None:
        self._swaps.make()

    def forward(self, tokens: Tensor, positions: Tensor, batch: PagedBatch) -> States:
        """Run tokens [B, Q], or packed ones [M], at positions of that shape, as one sequence of all rows."""
        # Position tables end at max_len. Later rows, of deep nodes and padding, give no token.
        clamped = positions.reshape(1, -1).long().clamp(0, self.max_len - 1)
        arguments = accepted(self._body, self._arguments(tokens.reshape(1, -1).long(), clamped))
        with use_hook(PagedPass(self.specs, self._kv, self._marker, tokens.shape, clamped[0], batch)):
            hidden = self._body(**arguments).last_hidden_state
        features = None
        if self.feature_layers:
            kept = [self._features[layer] for layer in self.feature_layers]
            self._features.clear()
            features = torch.cat(kept, -1).view(*tokens.shape, -1)
        return States(hidden.view(*tokens.shape, -1), features)

    def prefill(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: PagedBatch,
        last: LastRows | None = None,
        *,
        all_rows: bool = False,
    ) -> Prefilled:
        """Write the rows' KV, and return the features, and the hidden states of the last rows or of all."""
        states = self.forward(tokens, positions, batch)
        hidden = states.hidden.flatten(0, -2)
        return Prefilled(None if last is None else hidden[last.indices], states.features, hidden if all_rows else None)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [..., V] for hidden states [..., H], with all that the model does to its logits."""
        self._given.hidden = hidden.reshape(1, -1, hidden.shape[-1])
        tokens = torch.zeros(self._given.hidden.shape[:2], dtype=torch.long, device=hidden.device)
        try:
            out: Tensor = self._head(**accepted(self._head, {"input_ids": tokens, "use_cache": False})).logits
        finally:
            self._given.hidden = None
        return out.view(*hidden.shape[:-1], -1).to(hidden.dtype)
