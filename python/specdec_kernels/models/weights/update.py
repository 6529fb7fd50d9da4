"""Other weights for a model that runs, named as a checkpoint names them, at the places where its weights are.

Whatever reads a weight goes on reading that place, a captured graph too. First all is checked, and nothing changes;
then values are copied. Parts that are no weights of the module but were made of some are made once more, and copied
over those that there are.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
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
from .formats import Scheme, fitting_weight
from .kv_scales import FP8, SCALE_NAME
from .loading import PARTS, STORED_BY, expert_of, own_names, some

OURS = __name__.partition(".")[0]


class Update(NamedTuple):
    """What one weight is to become."""

    place: Tensor
    value: Tensor  # of the place's shape, of any dtype that can be cast to its, on any device


@torch.inference_mode()
def write(updates: Iterable[Update]) -> None:
    """Copies each value to its place."""
    for place, value in updates:
        place.copy_(value.detach())


def expect_tensors(weights: Mapping[str, Tensor], name: str) -> None:
    """TypeError for what is no mapping of names to tensors; errors call it `name`."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"{name} is a {type(weights).__name__}, expected a mapping of names to tensors")
    for key, tensor in weights.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}[{key!r}] is a {type(tensor).__name__}, expected a tensor")


def expect_numbers(weights: Mapping[str, Tensor], name: str) -> None:
    """ValueError for what is no plain weight."""
    for key, tensor in weights.items():
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise ValueError(f"{name}[{key!r}] is {tensor.dtype}, expected numbers of float32, float16 or bfloat16")


class Skeleton:
    """A module of transformers without storage, through which its own loading says where tensors of a checkpoint go:
    which are renamed, and which become one.

    Args:
        model: whose tensors the skeleton has the shapes and dtypes of.
    """

    def __init__(self, model: Any) -> None:
        with torch.device("meta"):
            self._module: Any = type(model)._from_config(copy.deepcopy(model.config))
        for name, tensor in model.state_dict().items():
            self._set(name, tensor)
        self._device = next(model.parameters()).device

    def _set(self, name: str, like: Tensor) -> None:
        path, _, leaf = name.rpartition(".")
        module = self._module.get_submodule(path)
        empty = torch.empty(like.shape, dtype=like.dtype, device="meta")
        if leaf in module._parameters:
            module._parameters[leaf] = torch.nn.Parameter(empty, empty.is_floating_point())
        elif leaf in module._buffers:
            module._buffers[leaf] = empty

    def placed(self, weights: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
        """The tensors by the names that the module has for them.

        Raises:
            ValueError: names that it does not know, and tensors that do not fit, or not together.
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
                    self._set(key, tensor)
        ignored = {key for key in info.unexpected_keys if key.endswith("rotary_emb.inv_freq")}
        if unknown := sorted(info.unexpected_keys - ignored):
            kind = type(self._module).__name__
            raise ValueError(f"{name} has {some(unknown)}, unknown to {kind}, expected tensors of the model alone")
        for key, got, expected in sorted(info.mismatched_keys):
            raise ValueError(f"{name} has {key} of shape {list(got)}, expected {list(expected)}")
        for key in sorted(info.conversion_errors):
            raise ValueError(f"{name} has a part of {key}, expected all of the tensors that it is made of")
        return placed


def updates_of(
    model: Any, skeleton: Skeleton, weights: Mapping[str, Tensor], pools: KvPools, name: str
) -> list[Update]:
    """What becomes of a module's tensors by weights named as its checkpoint's, all of them or some.

    Raises:
        TypeError, ValueError: names that are unknown; tensors of another shape, or of numbers that cannot become the
            weight's; one without others that it means nothing without. Then nothing has changed.
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
            raise ValueError(f"{name} has {key} alone, expected beside it what its numbers are multiplied by")
    expect_numbers(plain, name)
    places = model.state_dict()
    given: dict[tuple[int, int], tuple[str, Tensor]] = {}
    for key, value in skeleton.placed(plain, name).items() if plain else ():
        if key not in places:
            continue  # of another sense than text, dropped when the model was loaded
        place = places[key]
        other, same = given.setdefault((place.data_ptr(), place.numel()), (key, value))
        if other == key:
            updates.append(Update(place, value))
        elif not torch.equal(same.to(value.device), value):
            raise ValueError(f"{name} has {key}, expected it to be {other}, which is the same weight in this model")
    return updates


def check_kv_scales(weights: Mapping[str, Tensor], pools: KvPools, name: str) -> None:
    """ValueError for other scales of 8-bit KV than the pools have: they are numbers of launches."""
    layers = pools.layers if pools.dtype == FP8 else []
    for key, tensor in weights.items():
        match = SCALE_NAME.fullmatch(key)
        if match is None or int(match[1]) >= len(layers):
            continue
        layer = layers[int(match[1])]
        scales = dict(zip(layer.layout.row_shapes, layer.scales, strict=True))
        for part in match[2] or match[3]:
            if float(tensor) != (scale := scales[part]):
                raise ValueError(f"{name} has {key} {float(tensor)}, expected {scale} (scales of KV stay)")


def stored_updates(
    model: Any, scheme: Scheme, weights: Mapping[str, Tensor], name: str
) -> tuple[list[Update], dict[str, Tensor]]:
    """What becomes of quantised products, and the tensors that are none of theirs.

    Raises:
        ValueError: a product that the model has in another way, one that lacks a tensor, or one of another shape.
    """
    products = scheme.products(weights)
    modules = dict(model.named_modules())
    own, rest, updates = own_names(products, model), dict(weights), list[Update]()
    for path in sorted(products):
        parts = {leaf: rest.pop(f"{path}.{leaf}", None) for leaf in scheme.tensors | scheme.optional}
        given = {leaf: tensor for leaf, tensor in parts.items() if tensor is not None}
        linear, expert = modules.get(own[path]), expert_of(own[path], modules)
        of_eight = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)", own[path])
        experts = None if of_eight is None else modules.get(of_eight[1])
        experts = experts if isinstance(experts, QuantizedExperts) else None
        if not isinstance(linear, QuantizedLinear) and expert is None and experts is None:
            raise ValueError(f"{name} has a quantised {path}, expected one where the checkpoint had one")
        if missing := sorted(scheme.tensors - given.keys()):
            raise ValueError(f"{name} lacks {path}.{missing[0]}, expected all tensors of a quantised product")
        weight = fitting_weight(scheme, given, f"{name} has a quantised {path}")
        if isinstance(linear, QuantizedLinear):
            updates += same_kind(linear.weight, weight, f"{name} has {path}")
            bias = rest.get(f"{path}.bias")
            if linear.bias is None and bias is not None and not bias.any():
                del rest[f"{path}.bias"]  # early GPTQ wrote zeros
        elif experts is not None:
            assert of_eight is not None and isinstance(weight, Fp8Weight)
            places = experts.stored(int(of_eight[2]), PARTS.get(of_eight[3], ""))
            if places is None or [list(place.shape) for place in places] != [
                list(weight.qweight.shape), list(weight.scales.t().shape)
            ]:  # fmt: skip
                raise ValueError(f"{name} has {path} of shape {list(weight.shape)}, which has no place in the model")
            updates += [Update(places[0], weight.qweight), Update(places[1], weight.scales.t())]
        else:
            assert expert is not None
            if list(weight.shape) != list(expert.rows.shape):
                raise ValueError(f"{name} has {path} of shape {list(weight.shape)}, expected {list(expert.rows.shape)}")
            updates.append(Update(expert.rows, weight.dequantize()))
    return updates, rest


def same_kind(old: Any, new: QuantizedWeight, what: str) -> list[Update]:
    """The numbers and scales of a stored weight for those of one that differs in nothing else; ValueError where it
    does.
    """
    if list(new.shape) != list(old.shape):
        raise ValueError(f"{what} of shape {list(new.shape)}, expected {list(old.shape)}")
    updates = []
    for field in fields(old):
        before: Any = getattr(old, field.name)
        after: Any = getattr(new, field.name, None)
        if field.name in ("qweight", "scales") and after is not None and before.shape == after.shape:
            updates.append(Update(before, after))
        elif isinstance(before, Tensor) and isinstance(after, Tensor):
            if not torch.equal(before.cpu(), after.cpu()):
                raise ValueError(f"{what} with another {field.name}, expected the one that it has")
        elif before is not after and before != after:
            raise ValueError(f"{what} with {field.name} {after!r}, expected {before!r}")
    return updates


def write_over(old: Any, new: Any) -> None:
    """Makes the tensors of a structure of parts those of another that was made alike, at their places.

    Tensors that both have, which are weights of the module, are left alone; so is whatever is no part of ours.
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
