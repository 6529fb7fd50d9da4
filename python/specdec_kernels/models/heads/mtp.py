"""Multi-token-prediction (MTP) layers that a language model ships with (DeepSeek-V3, arXiv 2412.19437, section 2.2).

The decoder layer is one of the target's own, so the target's family makes it. Row i pairs token i+1 with a state of
position i: for a committed row the target's, after its final norm; for a row that the layer drafted, the layer's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ...ops import rms_norm_concat
from ..backends.native import CausalLM
from ..families import family_of
from ..language_model import LanguageModel
from ..layers.decoder_layer import Layer
from ..layers.embedding import LMHead
from ..layers.linear import Linear, linear_of
from ..layers.norm import Norm, RMSNorm
from ..layers.quantized import Fp8Weight
from ..weights.checkpoint import Faults, does_not_fit, does_not_load, load_tensors, local_folder, tensor_names
from ..weights.formats import Scheme, fitting_weight
from ..weights.loading import DTYPES, check_modules, place
from ..weights.model_config import QUANTIZATION, StoredConfig
from ..weights.mtp_layouts import (
    EMBEDDING,
    EMBEDDING_NORM,
    FINAL_NORM,
    LAYERS,
    LM_HEAD,
    PROJECTION,
    STATE_NORM,
    MtpLayout,
    find_layout,
)
from ..weights.update import Skeleton, Update, expect_floats, expect_tensors, updates_of
from .base import DraftHead, Features

NAME = "MTP head"
# Model types in a known layout whose MTP layer differs from what `config_of_layers` describes.
DIFFERENT = {"exaone_moe": "rotates all heads, whatever its type"}


@dataclass(frozen=True)
class MtpCheckpoint:
    """An MTP layer of a checkpoint.

    Attributes:
        folder: of a language model, whose config is the layer's too; other tensors than the layer's may be missing.
        config: of the language model's text part.
        layout: of the MTP layer's tensors.
        scheme: how linears are quantized; None: they are not.
        num_layers: MTP layers of the checkpoint.
        index: of this one among them.
    """

    folder: Path
    config: Any
    layout: MtpLayout
    scheme: Scheme | None
    num_layers: int = 1
    index: int = 0

    @classmethod
    def open(cls, source: str | Path) -> MtpCheckpoint:
        """Find the first MTP layer of a folder or hub id.

        Raises:
            ValueError: there is none, or more than one in a layout whose chains are not known; one that is not
                computed here; no language model that transformers knows.
        """
        folder = local_folder(source, "MTP: head")
        stored = StoredConfig.read(folder, NAME)
        config = stored.text
        if config.model_type in DIFFERENT:
            raise ValueError(
                f"{NAME}: model_type is {config.model_type!r}, expected another (its MTP layer "
                f"{DIFFERENT[config.model_type]}; not supported)"
            )
        if "linear_attention" in (getattr(config, "mtp_layers_block_type", None) or ()):
            raise ValueError(
                f"{NAME}: {folder} has an MTP layer with a recurrent state, expected attention (not supported)"
            )
        layout, num_layers = find_layout(tensor_names(folder), config.num_hidden_layers, stored.what)
        return cls(folder, config, layout, stored.scheme, num_layers)

    def layer(self, index: int) -> MtpCheckpoint:
        """Return another MTP layer of this checkpoint."""
        return replace(self, index=index)

    @property
    def prefix(self) -> str:
        return self.layout.prefix_of(self.config.num_hidden_layers + self.index)

    def tensors(self) -> dict[str, Tensor]:
        """Return the layer's tensors by our names; quantized linears of FP8 are dequantized.

        Raises:
            ValueError: a tensor of other quantized elements, or one that lacks its scales.
        """
        stored = self._dequantized(load_tensors(self.folder, lambda key: key.startswith(self.prefix)))
        tensors: dict[str, Tensor] = {}
        for key, tensor in stored.items():
            if tensor.dtype not in DTYPES:
                known = ", ".join(map(str, DTYPES))
                raise ValueError(
                    f"{NAME}: {self.folder} has {key} of {tensor.dtype}, expected one of {known}, or FP8 with scales"
                )
            if not key.endswith("rotary_emb.inv_freq"):
                tensors[self.layout.own_name(key.removeprefix(self.prefix))] = tensor
        return tensors

    def _dequantized(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors with one weight in float32 for each quantized linear of FP8."""
        scheme, rest = self.scheme, dict(tensors)
        if scheme is None or scheme.kept is not Fp8Weight:
            return rest
        for path in sorted(scheme.linears(tensors)):
            parts = {name: rest.pop(f"{path}.{name}", None) for name in scheme.tensors | scheme.optional}
            given = {name: tensor for name, tensor in parts.items() if tensor is not None}
            what = f"{NAME}: {self.folder} has a quantized {path}"
            if missing := sorted(scheme.tensors - given.keys()):
                raise ValueError(f"{what} without {missing[0]}, expected all tensors of a quantized linear")
            rest[f"{path}.weight"] = fitting_weight(scheme, given, what).dequantize()
        return rest


class MtpParts(NamedTuple):
    embeddings: Tensor
    embedding_norm: RMSNorm
    state_norm: RMSNorm
    fc: Linear
    layers: list[Layer]
    norm: Norm
    head: LMHead


class MtpHead(DraftHead):
    """An MTP layer over a target. Its norms and projection have no storage until they are loaded.

    Args:
        lm: a language model of transformers whose layers are the MTP layer's, mostly one; its embedding, final norm and
            LM head are the layer's own, or the target's modules.
        layout: of the checkpoint.
        prefix: of the layer's tensors in the checkpoint.
    """

    name = "MTP"
    _parts: MtpParts

    def __init__(self, lm: Any, layout: MtpLayout, prefix: str) -> None:
        config = lm.config
        super().__init__(config)
        self.layout, self.prefix, self.passes_normed_state = layout, prefix, layout.passes_normed_state
        self.lm = lm
        norm = lm.get_submodule(module_names(lm)[FINAL_NORM])
        self.embedding_norm, self.state_norm = (deepcopy(norm).to("meta") for _ in range(2))
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False, device="meta")
        self._skeleton: Skeleton | None = None

    def prepare(self, target: LanguageModel, num_pages: int, page_size: int) -> None:
        assert isinstance(target, CausalLM)
        self._target = target  # no nn.Module, so its parameters do not become the head's
        super().prepare(target, num_pages, page_size)

    def _place(self, dtype: torch.dtype, device: torch.device) -> None:
        place(self.lm, dtype, device)
        for module in (self.embedding_norm, self.state_norm, self.fc):
            module.to(device=device, dtype=dtype)

    def _make_parts(self) -> MtpParts:
        family: Any = family_of(self.config, NAME)
        decoder = family.decoder(self.lm, self._max_len, self.fc.weight.device)
        head = decoder.head
        if self._among is not None:
            head = head._replace(linear=head.linear.permute_outputs(self._among))
        return MtpParts(
            embeddings=self.lm.get_input_embeddings().weight.detach(),
            embedding_norm=family.norm(self.embedding_norm),
            state_norm=family.norm(self.state_norm),
            fc=linear_of(self.fc),
            layers=decoder.layers,
            norm=decoder.norm,
            head=head,
        )

    def updates(self, weights: Mapping[str, Tensor], name: str) -> list[Update]:
        expect_tensors(weights, name)
        expect_floats(weights, name)
        names = module_names(self.lm)
        own = {key: in_module(self.layout.own_name(key.removeprefix(self.prefix)), names) for key in weights}
        parameters, of_layer, updates = dict(self._named()), dict[str, Tensor](), list[Update]()
        for key, place_name in own.items():
            if f"lm.{place_name}" in self._of_target:
                continue  # a copy of the target's, which has its own update
            if place_name not in parameters:
                of_layer[place_name] = weights[key]
                continue
            parameter = parameters[place_name]
            if weights[key].shape != parameter.shape:
                shapes = list(weights[key].shape), list(parameter.shape)
                raise ValueError(f"{name} has {key} of shape {shapes[0]}, expected {shapes[1]}")
            updates.append(Update(parameter.data, weights[key], parameter))
        if of_layer:
            self._skeleton = self._skeleton or Skeleton(self.lm)
            try:
                updates += updates_of(self.lm, self._skeleton, of_layer, self.pools, name)
            except ValueError as error:
                block = f"{self.layout.own_block}."
                stored = f"{self.prefix}{self.layout.stored_name(block)}"
                raise ValueError(str(error).replace(block, stored)) from None
        return updates

    def join(self, features: Tensor) -> Tensor:
        """Return what the first step reads [..., H], from the target's states before its final norm."""
        return self._target.decoder.norm(features) if self.layout.reads_normed_state else features

    def enter(self, tokens: Tensor, features: Features, positions: Tensor) -> tuple[Tensor, Tensor]:
        parts, hidden = self._parts, self.config.hidden_size
        ids, rows = tokens.flatten().contiguous(), features.rows
        embedding_norm, state_norm = parts.embedding_norm.weight, parts.state_norm.weight
        eps = parts.embedding_norm.eps
        if self.layout.state_first:
            if rows is None:
                rows = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
            pairs, _ = rms_norm_concat(
                features.table, rows, state_norm, parts.embeddings, embedding_norm, eps, feature_rows=ids
            )
            embedded = pairs[:, hidden:]
        else:
            pairs, _ = rms_norm_concat(
                parts.embeddings, ids, embedding_norm, features.table, state_norm, eps, feature_rows=rows
            )
            embedded = pairs[:, :hidden]
        if self.layout.zeroes_first_embedding:  # the norm of zeros is zeros
            embedded.masked_fill_((positions.flatten() == 0)[:, None], 0)
        return parts.layers[0].enter(parts.fc(pairs), None)


def load_mtp_head(source: MtpCheckpoint | MtpHead, target: LanguageModel, *, num_pages: int, page_size: int) -> MtpHead:
    """Return a checkpoint's MTP layer, or a copy of a loaded one, with KV pools of the target's page geometry.

    Embedding and LM head are the target's where the checkpoint has none for the layer, or copies of the target's.

    Raises:
        ValueError: a target that does not run by our layers; tensors that are missing, unknown, quantized or of another
            shape, by their names in the checkpoint.
    """
    if not isinstance(target, CausalLM):
        raise ValueError(f"{NAME}: the target runs by transformers' modules, expected a native one")
    head = copy(source) if isinstance(source, MtpHead) else load_checkpoint(source, target)
    head.is_given = isinstance(source, MtpHead)
    head.prepare(target, num_pages, page_size)
    return head


def load_checkpoint(checkpoint: MtpCheckpoint, target: CausalLM) -> MtpHead:
    """Return a head with the tensors of a checkpoint; see `load_mtp_head`."""
    config, what = checkpoint.config, f"{NAME}: {checkpoint.folder}"
    for size in ("hidden_size", "vocab_size"):
        if getattr(config, size) != (wanted := getattr(target.config, size)):
            raise ValueError(f"{what} has {size} {getattr(config, size)}, expected the target's {wanted}")
    tensors = checkpoint.tensors()
    modules = shared_modules(checkpoint.layout, tensors, target)
    for path, kind in ((EMBEDDING, nn.Embedding), (LM_HEAD, nn.Linear)):
        weight = tensors.pop(f"{path}.weight", None)
        if path not in modules and weight is not None:
            if list(weight.shape) != (expected := [config.vocab_size, config.hidden_size]):
                stored = checkpoint.prefix + checkpoint.layout.stored_name(f"{path}.weight")
                raise does_not_fit(what, f"has {stored} of shape {list(weight.shape)}, expected {expected}", "layer")
            modules[path] = module_of(kind, weight)
    of_layer = {key: tensors.pop(key) for key in list(tensors) if key.startswith((f"{LAYERS}.", f"{FINAL_NORM}."))}
    lm, faults = model_of_layers(checkpoint, of_layer, tuple(modules), target.embedding.weight.dtype)
    names = module_names(lm)
    for path, module in modules.items():
        lm.set_submodule(names[path], module)
    head = MtpHead(lm, checkpoint.layout, checkpoint.prefix)
    for name in (EMBEDDING_NORM, STATE_NORM, PROJECTION):
        key, module = f"{name}.weight", getattr(head, name)
        tensor = tensors.pop(key, None)
        if tensor is None:
            faults.missing.append(key)
        elif tensor.shape != module.weight.shape:
            faults.mismatched.append((key, tensor.shape, module.weight.shape))
        else:
            module.weight = nn.Parameter(tensor, requires_grad=False)
    faults.unknown.extend(tensors)
    faults.check(what, head, "layer", lambda own: checkpoint.prefix + checkpoint.layout.stored_name(own))
    check_modules(lm, NAME)
    return head


def shared_modules(layout: MtpLayout, tensors: Mapping[str, Tensor], target: CausalLM) -> dict[str, nn.Module]:
    """Return the modules that an MTP layer shares with its target, by our names.

    A tensor of the layer's that is equal to the target's is a copy, which is not kept.
    """
    shared: dict[str, nn.Module] = {}
    for path, module in ((EMBEDDING, target.embedding), (LM_HEAD, target.lm_head)):
        tensor, weight = tensors.get(f"{path}.weight"), getattr(module, "weight", None)
        is_copy = tensor is not None and isinstance(weight, Tensor) and torch.equal(tensor.to(weight), weight)
        if tensor is None or is_copy:
            shared[path] = module
    if layout.final_norm is None:
        shared[FINAL_NORM] = target.model.get_submodule(module_names(target.model)[FINAL_NORM])
    return shared


def module_of(kind: type[nn.Embedding] | type[nn.Linear], weight: Tensor) -> nn.Module:
    """Return an embedding or a linear with this weight."""
    rows, columns = weight.shape
    with torch.device("meta"):
        module = nn.Embedding(rows, columns) if kind is nn.Embedding else nn.Linear(columns, rows, bias=False)
    module.weight = nn.Parameter(weight)
    return module


def module_names(lm: Any) -> dict[str, str]:
    """Return the names that a language model gives to the modules that we call `EMBEDDING`, `FINAL_NORM`, `LM_HEAD`."""
    family: Any = family_of(lm.config, NAME)
    embedding = lm.get_input_embeddings()
    path = next(path for path, module in lm.named_modules() if module is embedding)
    return {EMBEDDING: path, FINAL_NORM: f"{path.rpartition('.')[0]}.{family.last_norm_name}", LM_HEAD: LM_HEAD}


def in_module(own: str, names: Mapping[str, str]) -> str:
    """Return a language model's name of a tensor that we call `own`."""
    module, _, parameter = own.rpartition(".")
    return f"{names.get(module, module)}.{parameter}"


def model_of_layers(
    checkpoint: MtpCheckpoint, tensors: Mapping[str, Tensor], replaced: tuple[str, ...], dtype: torch.dtype
) -> tuple[Any, Faults]:
    """Return a model of transformers of the config's type whose layers have these tensors, and what does not fit.

    Modules that are to be `replaced` are small; so are the embedding and the LM head.

    Raises:
        ValueError: a type without a language model of its own; experts that do not fit each other.
    """
    config = checkpoint.config
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"{NAME}: model_type is {config.model_type!r}, expected a causal language model's")
    small = {EMBEDDING: (1, config.hidden_size), LM_HEAD: (1, config.hidden_size), FINAL_NORM: (config.hidden_size,)}
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    short = config_of_layers(config, checkpoint.index, has_experts=any(".experts." in key for key in tensors))
    with torch.device("meta"):
        names = module_names(kind._from_config(deepcopy(short)))
    given = {f"{path}.weight": torch.zeros(small[path]) for path in replaced} | dict(tensors)
    try:
        lm, info = kind.from_pretrained(
            None,
            config=short,
            state_dict={in_module(key, names): tensor for key, tensor in given.items()},
            dtype=dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # experts that do not fit each other
        stored_name = checkpoint.layout.stored_name
        shapes = {f"{checkpoint.prefix}{stored_name(key)}": each.shape for key, each in tensors.items()}
        raise does_not_load(f"{NAME}: {checkpoint.folder}", "layer", shapes, error) from error
    ours = {name: own for own, name in names.items()}
    missing = [in_module(key, ours) for key in sorted(info["missing_keys"])]
    unknown = [in_module(key, ours) for key in sorted(info["unexpected_keys"])]
    mismatched = [(in_module(key, ours), *shapes) for key, *shapes in sorted(info["mismatched_keys"])]
    return lm, Faults(missing, unknown, mismatched)


def config_of_layers(config: Any, index: int, has_experts: bool) -> Any:
    """Return the config of a model whose layers are those of MTP layer `index`: those that it names, or full attention.

    What differs between the target's layers is as in those of the MTP layer's type. `has_experts` says whether the
    layer has experts where the config does not.
    """
    config = deepcopy(config)
    for key in QUANTIZATION:
        vars(config).pop(key, None)
    each = getattr(config, "mtp_layer_types", None)
    types: list[str] = getattr(config, "mtp_layers_block_type", None) or [each[index] if each else "full_attention"]
    if kinds := getattr(config, "mtp_mlp_layer_types", None):
        has_experts = kinds[index] == "sparse"
    different: dict[str, Any] = {}
    if getattr(config, "is_heterogeneous", False):
        if types[0] not in config.layer_types:
            raise ValueError(f"{NAME}: layer_types has {types[0]!r} for an MTP layer, expected a type of the target's")
        alike = config.per_layer_config[types[0]]
        different = {name: getattr(alike, name) for name in config.per_layer_attributes}
        config.per_layer_config = None
    values = {
        "num_hidden_layers": len(types),
        "vocab_size": 1,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "layer_types": types,
        "mlp_layer_types": ["sparse" if has_experts else "dense"],
        "first_k_dense_replace": 0 if has_experts else 1,
        "mlp_only_layers": [] if has_experts else [0],
        "decoder_sparse_step": 1,
        "moe_layer_start_index": 0 if has_experts else 1,
        "moe_layer_end_index": 0,
        "moe_layer_interval": 1,
        "swiglu_limits": None,
        "swiglu_limits_shared": None,
    }
    for name, value in values.items():
        if hasattr(config, name):
            setattr(config, name, value)
    for name, value in different.items():
        setattr(config, name, value)
    return config
