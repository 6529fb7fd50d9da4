"""Configs of language models: which model a folder, hub id or module holds, and how its weights are stored.

No code of a folder is run, and no weight is read.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from ..layers.quantized import Fp8Weight
from .checkpoint import LANGUAGE_MODEL, expect_kind, in_a_line, local_folder
from .config_entries import NUM_EXPERTS, check_entries, check_raw, config_class, fault_of_entry, made_of
from .formats import Scheme, Unsupported, scheme_of

# Model types whose families run FP8 experts, quantized activations included.
FP8_EXPERTS = (
    "afmoe", "axk1", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe",
    "glm4_moe_lite", "hunyuan_v1_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe",
    "qwen3_next", "qwen3_vl_moe_text", "step3p5",
)  # fmt: skip

# Multimodal types that pass text alone to the model of their `text_config`, and its states to a head. Others may do
# more: mask or place tokens differently, look things up, have a head for each modality.
PLAIN_TEXT_DECODERS = (
    "aya_vision", "cohere2_vision", "deepseek_vl", "gemma3", "got_ocr2", "idefics2", "idefics3", "internvl",
    "lighton_ocr", "llava", "llava_next", "llava_next_video", "llava_onevision", "mistral3", "ovis2", "qianfan_ocr",
    "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "video_llama_3",
    "video_llava", "vipllava",
)  # fmt: skip

QUANTIZATION = ("quantization_config", "compression_config")  # its names in configs

# Names in configs of the tokens that images, audio and video replace.
PLACEHOLDERS = tuple(f"{modality}_token_{end}" for end in ("index", "id") for modality in ("audio", "video", "image"))


class Storage(NamedTuple):
    """The formats in which an engine keeps a checkpoint's linears and experts, in words."""

    linears: str
    experts: str | None  # None: it has none


@dataclass(frozen=True)
class StoredConfig:
    """The config of a language model's folder or hub id.

    Attributes:
        source: the folder or hub id.
        name: of the model in errors.
        values: the entries of its config.json.
        whole: what transformers makes of them.
        text: the part of it that is the language model's.
        scheme: how linears are quantized; None: they are not.
    """

    source: str | Path
    name: str
    values: dict[str, Any]
    whole: Any
    text: Any
    scheme: Scheme | None

    @classmethod
    def read(cls, source: str | Path, name: str = "model") -> StoredConfig:
        """Read the config of a folder or hub id; errors call its model `name`.

        Raises:
            ValueError: the folder holds no language model, one that transformers does not know, one that is quantized
                in an unsupported way, or an entry that is refused.
            OSError: there is no config.
        """
        expect_kind(source, LANGUAGE_MODEL, name)
        what = f"{name}: {source}"
        values = read_values(source, what)
        scheme = scheme_in(values, what)
        if config_class(values) is None:
            raise ValueError(
                f"{what} has model_type {values.get('model_type')!r}, "
                "expected one that transformers knows (code that comes with a model is not run)"
            )
        check_raw(values, what)
        try:
            whole = AutoConfig.from_pretrained(str(source), trust_remote_code=False)
        except OSError:
            raise
        except Exception as error:
            raise ValueError(f"{what} {fault_of_entry(values, config_from, error)}") from error
        text = text_config(whole)
        check_entries(text, what)
        return cls(source, name, values, whole, text, scheme)

    @property
    def what(self) -> str:
        """Return the name of the model and its source, for errors."""
        return f"{self.name}: {self.source}"

    def folder(self) -> Path:
        """Return the folder itself, or the hub id's snapshot."""
        return local_folder(self.source, self.name)

    def storage(self) -> Storage:
        """Describe how weights are kept."""
        text, scheme = self.text, self.scheme
        count = next((getattr(text, name) for name in NUM_EXPERTS if hasattr(text, name)), 0)
        linears = "in the engine's dtype"
        experts = "MXFP4, dequantized to the engine's dtype" if is_mxfp4(self.values) else "in the engine's dtype"
        if scheme is not None:
            kinds = {
                "none": "",
                "token": ", activations quantized per token",
                "group": ", activations quantized per group",
            }
            activations = kinds.get(scheme.activations, ", activations quantized by the checkpoint's scales")
            linears = f"in FP8{activations}" if scheme.kept is Fp8Weight else "in INT4"
            experts = linears if keeps_experts(scheme, text.model_type) else "dequantized to the engine's dtype"
        return Storage(linears, f"{count}, {experts}" if count else None)


def config_of(model: str | Path | nn.Module, name: str = "model") -> Any:
    """Return the text config of a folder, hub id or module; raises as `StoredConfig.read`."""
    return module_config(model, name) if isinstance(model, nn.Module) else StoredConfig.read(model, name).text


def read_values(source: str | Path, what: str) -> dict[str, Any]:
    """Return the entries in the config of a folder or hub id, in errors `what`.

    Raises:
        ValueError: what transformers refuses.
        OSError: there is no config.
    """
    try:
        values, _ = PretrainedConfig.get_config_dict(str(source))
        if not isinstance(values, dict):
            raise TypeError(f"it is a {type(values).__name__}")
    except OSError as error:
        raise OSError(f"{what} has no config that can be read ({in_a_line(error)})") from error
    except Exception as error:
        raise ValueError(f"{what} has a config that transformers refuses ({in_a_line(error)})") from error
    return values


def config_from(values: dict[str, Any]) -> Any:
    """Return the config of transformers for the entries of a config.json."""
    return config_class(values).from_dict(copy.deepcopy(values))


def drop_quantization(config: Any) -> None:
    """Delete what a config says of quantized weights; transformers would import the packages that quantized them."""
    for part in (config, config.get_text_config(decoder=True)):
        for key in QUANTIZATION:
            vars(part).pop(key, None)


def auto_class(config: Any, what: str) -> Any:
    """Return the class of transformers that loads models of a whole config.

    Raises:
        ValueError: there is none.
    """
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in kind._model_mapping:
            return kind
    raise ValueError(f"{what} has model_type {config.model_type!r}, expected a causal language model of transformers")


def own_class(config: Any, what: str) -> Any:
    """Return the class of a whole config's model; raises as `auto_class`."""
    return auto_class(config, what)._model_mapping[type(config)]


def empty_module(config: Any, what: str, dtype: torch.dtype | None = None) -> Any:
    """Return the module of a whole config without memory for its weights, none of them quantized."""
    kind = own_class(config, what)
    drop_quantization(config)
    with torch.device("meta"):
        return kind._from_config(config, dtype=dtype)


def check_module(values: dict[str, Any], what: str) -> None:
    """Raise ValueError for an entry of a config.json with which transformers makes no module."""
    made_of(values, lambda values: empty_module(config_from(values), what), what)


def model_name(model: str | Path | nn.Module) -> str:
    """Return the last part of a folder's or hub id's name; for a module, of what it was loaded from, or its class."""
    if isinstance(model, nn.Module):
        model = getattr(model.config, "name_or_path", "") or type(model).__name__
    return (Path(model).resolve() if Path(model).is_dir() else Path(model)).name


def text_config(config: Any) -> Any:
    """Return the part of a config that is the language model's: for most models, all of it.

    For a multimodal model it is a copy. If the whole model does more to text than the model of its `text_config`, the
    copy keeps the whole model's type, for which there is no family.
    """
    text = config.get_text_config(decoder=True)
    if text is config:
        return config
    text = copy.deepcopy(text)
    text.dtype = text.dtype or config.dtype
    text.name_or_path = config.name_or_path
    if config.model_type not in PLAIN_TEXT_DECODERS:
        text.model_type = config.model_type
    return text


def placeholders(config: Any) -> dict[int, str]:
    """Return the names, in a model's whole config, of the tokens that images, audio and video replace, by token."""
    if config.get_text_config(decoder=True) is config:
        return {}
    tokens = ((getattr(config, name, None), name) for name in PLACEHOLDERS)
    return {token: name for token, name in tokens if isinstance(token, int)}


def keep_text_only(model: Any) -> None:
    """Delete all modules but the text decoder and what follows it."""
    body = model.base_model
    if (decoder := model.get_decoder()) is not body:
        for name, part in list(body.named_children()):
            if part is not decoder:
                delattr(body, name)


def module_config(model: nn.Module, name: str) -> Any:
    """Return the text config of a module of transformers."""
    if not isinstance(model, PreTrainedModel):
        kind = type(model).__name__
        hint = " (merge_and_unload() gives it)" if kind.startswith("Peft") else ""
        raise ValueError(f"{name}: it is a {kind}, expected a language model of transformers{hint}")
    return text_config(model.config)


def scheme_in(values: dict[str, Any], what: str) -> Scheme | None:
    """Return how the weights of a config are quantized; None: they are not.

    Raises:
        ValueError: quantized in an unsupported way.
    """
    text = values.get("text_config") or {}
    for config in (values, text if isinstance(text, dict) else {}):
        for key in QUANTIZATION:
            quantization = config.get(key)
            if not isinstance(quantization, dict | None):
                raise ValueError(f"{what} has {key} {quantization!r}, expected an object")
            if not quantization or only_kv_scales(quantization):
                continue
            if is_mxfp4(values):
                return None
            method = str(quantization.get("quant_method") or "a method without a name")
            kinds = [str(quantization[kind]) for kind in ("format", "fmt", "quant_type") if quantization.get(kind)]
            method += f" ({', '.join(kinds)})" if kinds else ""
            try:
                return scheme_of(quantization)
            except Unsupported as error:
                raise ValueError(f"{what} is quantized by {method}, {error}") from None
            except (AttributeError, LookupError, TypeError) as error:  # an entry of another type
                why = f"has a {key} that cannot be read ({in_a_line(error)})"
                raise ValueError(f"{what} {why}, expected one of {method}") from error
    return None


def keeps_experts(scheme: Scheme, model_type: str) -> bool:
    """Return whether experts stay in FP8; others are dequantized to the model's dtype."""
    return scheme.kept is Fp8Weight and model_type in FP8_EXPERTS


def is_mxfp4(values: dict[str, Any]) -> bool:
    """Return whether weights are MXFP4, which transformers dequantizes to bfloat16 exactly."""
    quantization = values.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"


def only_kv_scales(quantization: dict[str, Any]) -> bool:
    """Return whether only KV is quantized: one scale a layer for float8_e4m3fn, which `kv_scales` reads."""
    scheme = quantization.get("kv_cache_scheme")
    wanted = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    if quantization.get("config_groups") or not isinstance(scheme, dict):
        return False
    return all(scheme.get(key) == value for key, value in wanted.items())
