"""The native backend: a causal language model of transformers, computed by our layers over paged KV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig

from ..families import Decoder, Family, family_of
from ..kv_pools import KvLayout, KvPools
from ..language_model import Prefilled, States
from ..layers.latent_attention import LatentAttention
from ..layers.mixer import Mixer, attach_caches, kv_layouts_of, mixers_of, state_specs_of
from ..layers.outputs import LayerOutput, select_rows
from ..layers.paged_batch import LastRows, PagedBatch
from ..options import ModelOptions
from ..state_cache import StateCache
from ..weights.config_entries import fault_of_entry
from ..weights.loading import load_causal_lm, place
from ..weights.model_config import config_from, config_of, keep_text_only
from ..weights.sharding import DIVISION, Division
from ..weights.update import write_over
from .base import PagedModel
from .self_check import CHECKED_NODES, CHECKED_ROWS, ModuleMismatchError, check_against_module


class UnreadableConfigError(ValueError):
    """A config with an entry that published ones do not have, with which no implementation can run."""


def supported_family(config: PretrainedConfig, max_len: int, name: str = "model") -> Family:
    """Return the family that makes the layers of such a model; raises as `check_supported`."""
    family = family_of(config, name)
    check_supported(family, max_len, name)
    return family


def check_supported(family: Family, max_len: int, name: str = "model") -> None:
    """Check that a family makes the layers of its config.

    Raises:
        UnreadableConfigError: an entry with a value that published ones do not have.
        ValueError: what they cannot express, by name.
    """

    def check(family: Family) -> None:
        family.check(name)
        family.check_len(max_len, name)
        for layer in range(family.config.num_hidden_layers):
            window = family.window(layer)
            if window is not None and (type(window) is not int or window < 1):
                why = f"layer {layer} has a sliding_window of {window!r}, expected an integer from 1 on"
                raise UnreadableConfigError(f"{name}: {why}")

    try:
        check(family)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        fault = fault_of_entry(family.config.to_dict(), lambda values: check(type(family)(config_from(values))), error)
        raise UnreadableConfigError(f"{name}: {family.config.model_type} {fault}") from error


def read_decoder(family: Family, model: Any, options: ModelOptions) -> Decoder:
    """Return the decoder that a family makes of a module.

    Raises:
        ModuleMismatchError: the module is not made as the family reads it.
        ValueError: what the family refuses.
    """
    try:
        return family.decoder(model, options.max_len, options.device)
    except (AttributeError, LookupError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ModuleMismatchError(
            f"{options.name}: {type(model).__name__} of transformers {transformers.__version__} is not made as our "
            f"layers read it ({type(error).__name__}: {reason}), expected implementation='transformers' for it"
        ) from error


class CausalLM(PagedModel):
    """The model with its KV pools, and one forward pass for every purpose (prefill, tree, draft step).

    Args:
        model: a path or hub id for `AutoModelForCausalLM`, or a module already loaded. Its weights are shared: those of
            projections that are fused become rows of the fused weight. It is moved to the device, and its parameters
            are cast to dtype; nothing else about it changes.
        options: how it is loaded, and its pools.

    Raises:
        ModuleMismatchError: our layers cannot read the module, or give other logits for random tokens.
        ValueError: an architecture or head dimension that is not supported; what `models.weights.loading` refuses.
    """

    decoder: Decoder

    def __init__(self, model: str | Path | nn.Module, options: ModelOptions) -> None:
        self._config = config_of(model, options.name)
        family = supported_family(options.shard.config(self._config, options.name), options.max_len, options.name)
        division: Division | None = None
        if options.shard.size > 1:
            styles = supported_family(self._config, options.max_len, options.name).division()
            division = Division(self._config, styles, options.shard, options.reduction, options.name)
        self.model = load_causal_lm(
            model,
            options.dtype,
            options.name,
            family.packages,
            options.adapter,
            draft_prefixes=options.draft_prefixes,
            division=division,
        )
        if not isinstance(model, nn.Module):
            keep_text_only(self.model)
        place(self.model, options.dtype, options.device)
        self._division: Division | None = getattr(self.model, DIVISION, None)
        if self._division is not None:
            self.caches = self._division.caches
            self._division.divide_tied_head(self.model)
        self._family = family
        self.max_len = options.max_len
        self.decoder = read_decoder(family, self.model, options)
        self.feature_layers = tuple(options.feature_layers)
        if any(layer > len(self.decoder.layers) for layer in self.feature_layers):
            raise ValueError(
                f"{options.name} feature_layers={self.feature_layers}, expected 0 to {len(self.decoder.layers)} "
                f"(layers of {self._config.model_type})"
            )
        self._kept_layers = sorted(set(options.feature_layers))
        layouts, states = kv_layouts_of(self._mixers), state_specs_of(self._mixers)
        if states != family.state_specs(options.dtype):
            raise ModuleMismatchError(
                f"{options.name}: layers keep recurrent states of other sizes than those in the config, "
                "expected the same"
            )
        device = self.embedding.weight.device
        if states:  # of one slot, for the passes before there are pools for all slots
            self.states = StateCache.allocate(states, 1, CHECKED_NODES, 1, device)
        if options.shard.size == 1:  # the module of a shard has no reductions
            self._check(layouts, options)
        self._make_pools(model, layouts, options)
        if states:
            sizes = options.num_slots, options.max_nodes, options.accept_width
            self.states = StateCache.allocate(states, *sizes, device, options.num_snapshots)
            self._hold(self.pools)

    def _check(self, layouts: Sequence[KvLayout], options: ModelOptions) -> None:
        """Compare our layers with the module, with small pools of `dtype`."""
        device = self.embedding.weight.device
        num_pages = -(-CHECKED_ROWS // options.page_size) + 1
        self._hold(KvPools.allocate(layouts, num_pages, options.page_size, options.dtype, device))
        check_against_module(self, options.dtype, options.name)

    def _hold(self, pools: KvPools) -> None:
        super()._hold(pools)
        attach_caches(self._mixers, pools, self.states)

    @property
    def _mixers(self) -> list[Mixer]:
        return mixers_of(self.decoder.layers)

    @torch.inference_mode()
    def refresh(self) -> None:
        device = self.embedding.weight.device
        write_over(self.decoder, self._family.decoder(self.model, self.max_len, device))

    def _drop_parts(self) -> None:
        super()._drop_parts()
        del self.decoder
        if self._division is not None:
            self._division.untie_head(self.model)

    @torch.no_grad()
    def _make_parts(self) -> None:
        if self._division is not None:
            self._division.tie_head(self.model)
        self.decoder = self._family.decoder(self.model, self.max_len, self._device)

    @property
    def hidden_size(self) -> int:
        size: int = self.config.hidden_size
        return size

    def expands_latents(self, chunks: Sequence[tuple[int, int]]) -> bool:
        mixer = next((mixer for mixer in self._mixers if isinstance(mixer, LatentAttention)), None)
        if mixer is None:
            return False
        rows = sum(count for _, count in chunks)
        pairs = sum(count * before + count * (count + 1) // 2 for before, count in chunks)
        return mixer.is_cheaper_expanded(rows, pairs, rows + sum(before for before, _ in chunks))

    def forward(self, tokens: Tensor, positions: Tensor, batch: PagedBatch) -> States:
        """Run tokens [B, Q], or packed ones [M], at positions of that shape."""
        x, residual, kept = self._pass(len(self.decoder.layers), tokens, positions, batch)
        hidden = self.decoder.norm.add_norm(x, residual)[0]
        return States(hidden.view(*tokens.shape, -1), self._features(kept, tokens))

    def prefill(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: PagedBatch,
        last: LastRows | None = None,
        *,
        all_rows: bool = False,
    ) -> Prefilled:
        """Write the rows' KV, and return the features, and the hidden states of the last rows or of all.

        Only the last rows pass what follows the last layer's KV write, unless `all_rows`; their KV in that layer is
        written twice. With `all_rows` they pass it twice, the second time as without.
        """
        layer, norm, hidden = self.decoder.layers[-1], self.decoder.norm, None
        all_hidden: Tensor | None = None
        # A recurrent mixer counts each row once: it must not run again for the last rows.
        once = bool(state_specs_of(layer.mixers))
        if once or len(self.decoder.layers) in self.feature_layers:
            x, residual, kept = self._pass(len(self.decoder.layers), tokens, positions, batch)
            states = norm.add_norm(x, residual)[0]
            if last is not None:
                hidden = states[last.indices]
            if all_rows:
                all_hidden = states
        else:
            x, residual, kept = self._pass(len(self.decoder.layers) - 1, tokens, positions, batch)
            if last is not None:  # copies, because entering the layer overwrites the residual
                of_last = (
                    select_rows(last.indices, x),
                    None if residual is None else select_rows(last.indices, residual),
                )
            normed, state = layer.enter(x, residual)
            if all_rows:
                is_kept = len(self.decoder.layers) - 1 in self.feature_layers  # its state may not be written over
                out = torch.empty_like(state) if is_kept else None
                all_hidden = norm.add_norm(*layer(normed, state, positions, batch, residual_out=out))[0]
            else:
                layer.write_cache(normed, state, positions, batch)
            if last is not None:
                normed, state = layer.enter(*of_last)
                hidden = norm.add_norm(*layer(normed, state, last.positions, last.batch))[0]
        return Prefilled(hidden, self._features(kept, tokens), all_hidden)

    def _pass(
        self, count: int, tokens: Tensor, positions: Tensor, batch: PagedBatch
    ) -> tuple[LayerOutput, Tensor | None, Tensor]:
        """Run the first `count` layers.

        Returns:
            Their output [T, H], the residual stream, if there is one, and the states that entered the kept layers
            [T, len(_kept_layers), H]. If layer `count` is kept, its state is there once that layer is entered.
        """
        layers = self.decoder.layers
        if self.states is not None:
            batch = batch._replace(sequences=batch.as_sequences(positions))
        embedded, residual = self.decoder.embedding(tokens, positions).flatten(0, -2), None
        # The residual stream is updated in place. At a kept layer it moves on to another tensor, and the feature stays.
        kept = embedded.new_empty(len(embedded), len(self._kept_layers), embedded.shape[-1])
        places = iter([*kept.unbind(1), embedded])
        moving = {0, *self._kept_layers} if self._kept_layers else set()
        x: LayerOutput = next(places).copy_(embedded) if 0 in self._kept_layers else embedded
        for i, layer in enumerate(layers[:count]):
            normed, state = layer.enter(x, residual)
            to = next(places) if i in moving else None
            x, residual = layer(normed, state, positions, batch, residual_out=to)
        return x, residual, kept

    def _features(self, kept: Tensor, tokens: Tensor) -> Tensor | None:
        """Concatenate the feature layers' states in the order that was asked for."""
        if not self.feature_layers:
            return None
        kept = kept.view(*tokens.shape, *kept.shape[1:])[..., : self.hidden_size]  # what follows is no state
        if list(self.feature_layers) == self._kept_layers:
            return kept.flatten(-2)
        return torch.cat([kept[..., self._kept_layers.index(layer), :] for layer in self.feature_layers], dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [..., V] for hidden states [..., H]."""
        return self.decoder.head(hidden)
