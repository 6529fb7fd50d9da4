"""Weight updates of a model that runs, by tensors that are named as in its checkpoint.

Values are copied in place, so that captured graphs stay valid. All tensors are checked before anything changes. What
was made of weights (fused weights, norms of 1 + weight) is made again and copied over the old one.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from ..kv_pools import KvPools
from ..layers.moe import QuantizedExperts
from ..layers.quantized import Fp8Weight, QuantizedLinear, QuantizedWeight
from .checkpoint import fault_of_experts, some
from .formats import Scheme, fitting_weight
from .kv_scales import FP8, SCALE_NAME
from .mtp_layouts import LEFT_OUT, mtp_prefixes
from .quantized_loading import PARTS, STORED_BY, expert_of, own_names, unstack_experts
from .sharding import DIVISION, Cut, Division, Kept

OURS = __name__.partition(".")[0]


class Update(NamedTuple):
    """A new value for a weight, or for a part of one."""

    place: Tensor  # where it is written: a view of the weight
    value: Tensor  # of the place's shape once it is cut, of any dtype that can be cast to its dtype, on any device
    weight: Tensor | None = None  # the parameter or buffer; None: it is not offloaded
    cut: Cut | None = None  # the part of the value that is written; None: all


@torch.inference_mode()
def write(updates: Iterable[Update]) -> None:
    """Copy each value to its place."""
    for update in updates:
        value = update.value.detach()
        update.place.copy_(value if update.cut is None else update.cut(value))


def expect_tensors(weights: Mapping[str, Tensor], name: str) -> None:
    """Raise TypeError or ValueError unless a mapping, in errors `name`, is of names to tensors with elements."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"{name} is a {type(weights).__name__}, expected a mapping of names to tensors")
    for key, tensor in weights.items():
        if not isinstance(key, str):
            raise TypeError(f"{name} has a {type(key).__name__}, expected names of tensors")
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}[{key!r}] is a {type(tensor).__name__}, expected a tensor")
        if tensor.is_meta:
            raise ValueError(f"{name}[{key!r}] is on the meta device, expected a tensor with elements")


def expect_floats(weights: Mapping[str, Tensor], name: str) -> None:
    """Raise a ValueError for a tensor that is not of 16-bit or 32-bit floats."""
    for key, tensor in weights.items():
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise ValueError(f"{name}[{key!r}] is {tensor.dtype}, expected float32, float16 or bfloat16")


class Skeleton:
    """A copy of a transformers module without storage.

    Transformers' own loading fills it, which renames and merges tensors of a checkpoint, and shows where they go.

    Args:
        model: its tensors' shapes and dtypes are those of the skeleton; if ranks divide it, shapes are the whole's.
    """

    def __init__(self, model: Any) -> None:
        with torch.device("meta"):
            self._module: Any = type(model)._from_config(copy.deepcopy(model.config))
        division: Division | None = getattr(model, DIVISION, None)
        kept = {} if division is None else division.kept
        self._left_out: tuple[str, ...] = getattr(model, LEFT_OUT, ())
        for name, tensor in model.state_dict().items():
            self._set(name, tensor, kept[name].shape if name in kept else tensor.shape)
        self._device = next(model.parameters()).device

    def _set(self, name: str, like: Tensor, shape: Sequence[int]) -> None:
        path, _, leaf = name.rpartition(".")
        module = self._module.get_submodule(path)
        empty = torch.empty(tuple(shape), dtype=like.dtype, device="meta")
        if leaf in module._parameters:
            module._parameters[leaf] = torch.nn.Parameter(empty, empty.is_floating_point())
        elif leaf in module._buffers:
            module._buffers[leaf] = empty

    def placed(self, weights: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
        """Return the tensors by the module's own names.

        Raises:
            ValueError: unknown names, tensors that do not fit, and parts of a merged tensor without the others.
        """
        devices = {tensor.device for tensor in weights.values()}
        device = devices.pop() if len(devices) == 1 else self._device
        mapping = get_model_conversion_mapping(self._module)
        how = LoadStateDictConfig(device_map={"": device}, weight_mapping=cast(Any, mapping))
        shows = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            info, _ = convert_and_load_state_dict_in_model(self._module, dict(weights), how)
            placed = {key: tensor for key, tensor in self._module.state_dict().items() if not tensor.is_meta}
        finally:
            if shows:
                logging.enable_progress_bar()
            for key, tensor in self._module.state_dict().items():
                if not tensor.is_meta:
                    self._set(key, tensor, tensor.shape)
        if unknown := sorted(key for key in info.unexpected_keys if not self._leaves_out(key, info.unexpected_keys)):
            kind = type(self._module).__name__
            raise ValueError(f"{name} has {some(unknown)}, unknown to {kind}, expected tensors of the model alone")
        for key, got, expected in sorted(info.mismatched_keys):
            raise ValueError(f"{name} has {key} of shape {list(got)}, expected {list(expected)}")
        for key in sorted(info.conversion_errors):
            why = fault_of_experts({each: tensor.shape for each, tensor in weights.items()}) or f"has a part of {key}"
            raise ValueError(f"{name} {why}, expected all of the tensors that {key} is made of")
        return placed

    def _leaves_out(self, key: str, unexpected: Collection[str]) -> bool:
        """Return whether loading leaves an unexpected tensor out: rotations, MTP layers, what transformers ignores."""
        ignored = self._module._keys_to_ignore_on_load_unexpected or ()
        if key.endswith("rotary_emb.inv_freq") or any(re.search(pattern, key) for pattern in ignored):
            return True
        num_layers = self._module.config.get_text_config().num_hidden_layers
        return key.startswith(self._left_out + mtp_prefixes(unexpected, num_layers))


def updates_of(
    model: Any, skeleton: Skeleton, weights: Mapping[str, Tensor], pools: KvPools, name: str
) -> list[Update]:
    """Return the updates of a module's tensors by weights that are named as in its checkpoint, all of them or some.

    Weights are those of the whole model. If ranks divide it, updates write this rank's parts.

    Raises:
        TypeError, ValueError: unknown names; tensors of another shape or of a dtype that cannot be cast to the
            weight's; a tensor without others that it needs. Nothing has changed then.
    """
    expect_tensors(weights, name)
    check_kv_scales(weights, pools, name)
    plain = {key: tensor for key, tensor in weights.items() if not SCALE_NAME.fullmatch(key)}
    scheme: Scheme | None = getattr(model, STORED_BY, None)
    updates: list[Update] = []
    if scheme is not None:
        updates, plain = stored_updates(model, scheme, plain, name)
    modules = dict(model.named_modules())
    for key, own in own_names(plain, model).items():
        module = modules.get(own.removesuffix(".weight"))
        if own.endswith(".weight") and isinstance(module, QuantizedLinear):
            raise ValueError(f"{name} has {key} alone, expected with it what its elements are multiplied by")
    expect_floats(plain, name)
    division: Division | None = getattr(model, DIVISION, None)
    places, cuts = model.state_dict(keep_vars=True), dict[str, Cut]()
    if division is not None:
        cuts = {key: kept.cut for key, kept in division.kept.items()}
        if division.tied_head is not None:
            places[division.tied_head] = model.get_input_embeddings().weight
            del cuts[division.tied_head]
    given: dict[tuple[int, int], tuple[str, Tensor]] = {}
    for key, value in skeleton.placed(plain, name).items() if plain else ():
        if key not in places:
            continue  # not of the text decoder, dropped when the model was loaded
        place = places[key]
        other, same = given.setdefault((place.data_ptr(), place.numel()), (key, value))
        if other == key:
            updates.append(Update(place.detach(), value, place, cuts.get(key)))
        elif not torch.equal(same.to(value.device), value):
            raise ValueError(f"{name} has {key}, expected it to be {other}, which is the same weight in this model")
    return updates


def check_kv_scales(weights: Mapping[str, Tensor], pools: KvPools, name: str) -> None:
    """Raise a ValueError if scales of 8-bit KV differ from the pools': captured launches have these as constants."""
    layers = pools.layers if pools.dtype == FP8 else []
    for key, tensor in weights.items():
        match = SCALE_NAME.fullmatch(key)
        if match is None or int(match[1]) >= len(layers):
            continue
        layer = layers[int(match[1])]
        scales = dict(zip(layer.layout.scale_names, layer.scales, strict=True))
        for part in match[2] or match[3]:
            if part in scales and float(tensor) != (scale := scales[part]):
                raise ValueError(f"{name} has {key} {float(tensor)}, expected {scale} (scales of KV stay)")


def stored_updates(
    model: Any, scheme: Scheme, weights: Mapping[str, Tensor], name: str
) -> tuple[list[Update], dict[str, Tensor]]:
    """Return the updates of quantized linears and experts, and the tensors that belong to none of them.

    Raises:
        ValueError: a linear that the model stores in another way, one that lacks a tensor, or one of another shape.
    """
    division: Division | None = getattr(model, DIVISION, None)
    linears, rest = unstack_experts(model, scheme, scheme.linears(weights), weights, name)
    modules = dict(model.named_modules())
    own, updates = own_names(linears, model), list[Update]()
    for path in sorted(linears):
        parts = {leaf: rest.pop(f"{path}.{leaf}", None) for leaf in scheme.tensors | scheme.optional}
        given = {leaf: tensor for leaf, tensor in parts.items() if tensor is not None}
        linear, expert = modules.get(own[path]), expert_of(own[path], modules)
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)", own[path])
        experts = None if match is None else modules.get(match[1])
        experts = experts if isinstance(experts, QuantizedExperts) else None
        if not isinstance(linear, QuantizedLinear) and expert is None and experts is None:
            raise ValueError(f"{name} has a quantized {path}, expected one where the checkpoint had one")
        if missing := sorted(scheme.tensors - given.keys()):
            raise ValueError(f"{name} lacks {path}.{missing[0]}, expected all tensors of a quantized product")
        weight = fitting_weight(scheme, given, f"{name} has a quantized {path}")
        if isinstance(linear, QuantizedLinear):
            kept = None if division is None else division.kept.get(own[path])
            updates += same_kind(linear.weight, own_part(weight, kept, f"{name} has {path}"), f"{name} has {path}")
            bias = rest.get(f"{path}.bias")
            if linear.bias is None and bias is not None and not bias.any():
                del rest[f"{path}.bias"]  # early GPTQ wrote zeros
        elif experts is not None:
            assert match is not None
            part = PARTS.get(match[3], "")
            kept = None if division is None else division.of_expert(match[1], part)
            weight = own_part(weight, kept, f"{name} has {path}")
            assert isinstance(weight, Fp8Weight)
            places = experts.stored(int(match[2]), part)
            if places is None or [list(place.shape) for place in places] != [
                list(weight.qweight.shape), list(weight.scales.t().shape)
            ]:  # fmt: skip
                raise ValueError(f"{name} has {path} of shape {list(weight.shape)}, which has no place in the model")
            buffer = "down" if part == "down" else "gate_up"
            updates += [
                Update(places[0], weight.qweight, experts.get_buffer(buffer)),
                Update(places[1], weight.scales.t(), experts.get_buffer(f"{buffer}_scales")),
            ]
        else:
            assert expert is not None
            kept = None if division is None else division.of_expert(expert.path, expert.part)
            shape = expert.rows.shape if kept is None else kept.shape
            if list(weight.shape) != list(shape):
                raise ValueError(f"{name} has {path} of shape {list(weight.shape)}, expected {list(shape)}")
            updates.append(Update(expert.rows, weight.dequantize(), expert.weight, None if kept is None else kept.cut))
    return updates, rest


def own_part(weight: QuantizedWeight, kept: Kept | None, what: str) -> QuantizedWeight:
    """Return this rank's part of a weight.

    Raises:
        ValueError: the weight has another shape than the whole.
    """
    if kept is None:
        return weight
    if list(weight.shape) != list(kept.shape):
        raise ValueError(f"{what} of shape {list(weight.shape)}, expected {list(kept.shape)}")
    return kept.cut.of_quantized(weight)


def same_kind(old: Any, new: QuantizedWeight, what: str) -> list[Update]:
    """Return updates of a quantized weight's elements and scales by those of another.

    Raises:
        ValueError: the weights differ in anything else.
    """
    if list(new.shape) != list(old.shape):
        raise ValueError(f"{what} of shape {list(new.shape)}, expected {list(old.shape)}")
    updates = []
    for field in fields(old):
        before: Any = getattr(old, field.name)
        after: Any = getattr(new, field.name, None)
        if field.name in ("qweight", "scales") and after is not None and before.shape == after.shape:
            updates.append(Update(before, after, before))
        elif isinstance(before, Tensor) and isinstance(after, Tensor):
            if not torch.equal(before.cpu(), after.cpu()):
                raise ValueError(f"{what} with another {field.name}, expected the one that it has")
        elif before is not after and before != after:
            raise ValueError(f"{what} with {field.name} {after!r}, expected {before!r}")
    return updates


def write_over(old: Any, new: Any) -> None:
    """Copy the tensors of one structure of layers over those of another of the same form, in place.

    Tensors that both share, which are weights of the module, are left alone; so are objects that are not ours.
    """
    if old is new:
        return
    if isinstance(old, Tensor):
        alike = old.untyped_storage().data_ptr() == new.untyped_storage().data_ptr()
        if not (alike and old.storage_offset() == new.storage_offset()):
            old.copy_(new)
    elif isinstance(old, Mapping):
        for key in old:
            write_over(old[key], new[key])
    elif isinstance(old, Sequence) and not isinstance(old, str):
        for one, other in zip(old, new, strict=True):
            write_over(one, other)
    elif isinstance(old, FunctionType):
        for one, other in zip(old.__closure__ or (), new.__closure__ or (), strict=True):
            write_over(one.cell_contents, other.cell_contents)
    elif isinstance(old, MethodType):
        write_over(old.__self__, new.__self__)
    elif isinstance(old, partial):
        write_over((*old.args, old.func, old.keywords), (*new.args, new.func, new.keywords))
    elif is_dataclass(old) or type(old).__module__.partition(".")[0] == OURS:
        for key, value in vars(new).items():
            write_over(getattr(old, key), value)
