"""A language model of transformers from a folder, a hub id or a module: all of it, and nothing that we do not compute.

Whatever this engine would leave out in silence is refused by name: weights quantised in a way that it does not know,
tensors that are missing or left over, layers that something else has replaced. No code of a folder is run.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear  # of an nn.MultiheadAttention: a plain one
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import Mxfp4Config, QuantizationConfigMixin

from ..layers.moe import QuantizedExperts
from ..layers.quantized import Fp8Weight, QuantizedLinear, QuantizedWeight
from .adapters import merge_adapter
from .checkpoint import LANGUAGE_MODEL, expect_kind, load_tensors, local_folder, tensor_names
from .formats import Scheme, Unsupported, fitting_weight, scheme_of
from .kv_scales import SCALE_NAME

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
IN_EIGHT_BITS = (  # types whose families take experts of 8 bits, and round the rows that enter their products
    "afmoe", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "hunyuan_v1_moe", "mixtral", "olmoe",
    "qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text",
)  # fmt: skip
STORED_BY = "specdec_scheme"  # of a model: how its quantised weights are stored
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # what configs call their number
METHOD = "specdec_kernels"  # under which transformers knows how quantised weights are read

# Types with more senses than text that give text alone to the model of their `text_config`, and its states to a head.
# Others may do more: mask or place tokens in a way of their own, look things up, have another head for each sense.
PLAIN_OF_TEXT = (
    "aya_vision", "cohere2_vision", "deepseek_vl", "gemma3", "got_ocr2", "idefics2", "idefics3", "internvl",
    "lighton_ocr", "llava", "llava_next", "llava_next_video", "llava_onevision", "mistral3", "ovis2", "qianfan_ocr",
    "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "video_llama_3", "video_llava", "vipllava",
)  # fmt: skip

# What configs call the tokens in whose places states of other senses are put.
PLACEHOLDERS = tuple(f"{sense}_token_{end}" for end in ("index", "id") for sense in ("audio", "video", "image"))

# Where the classes of a model's modules are defined that our layers read the parameters of.
KNOWN_MODULES = (
    "transformers.models.", "transformers.activations", "torch.nn.modules.", f"{QuantizedLinear.__module__}.",
    f"{QuantizedExperts.__module__}.",
)  # fmt: skip


# Classes of transformers that multiply as an nn.Linear does, rounding once more between product and bias.
PLAIN_LINEARS = ("transformers.models.falcon.modeling_falcon.FalconLinear",)


def config_of(model: str | Path | nn.Module, name: str = "model") -> Any:
    """The config of a folder, hub id or module, which `name` names in errors.

    Raises:
        ValueError: the folder holds something else than a language model, or one that is quantised.
    """
    if isinstance(model, nn.Module):
        return module_config(model, name)
    expect_kind(model, LANGUAGE_MODEL, name)
    values, _ = PretrainedConfig.get_config_dict(str(model))
    scheme_in(values, f"{name}: {model}")
    if values.get("model_type") not in CONFIG_MAPPING:
        raise ValueError(
            f"{name}: {model} has model_type {values.get('model_type')!r}, "
            "expected one that transformers knows (code that comes with a model is not run)"
        )
    return text_config(AutoConfig.from_pretrained(str(model), trust_remote_code=False))


def model_name(model: str | Path | nn.Module) -> str:
    """The last part of a folder's or hub id's name; of a module that of what it was loaded from, or its class."""
    if isinstance(model, nn.Module):
        model = getattr(model.config, "name_or_path", "") or type(model).__name__
    return (Path(model).resolve() if Path(model).is_dir() else Path(model)).name


def text_config(config: Any) -> Any:
    """The part of a config that is the language model's: of most models, all of it.

    Of a model with more senses than text it is a copy. One that does more to text than the model of its `text_config`
    would keeps its own name there, under which there is no family.
    """
    text = config.get_text_config(decoder=True)
    if text is config:
        return config
    text = copy.deepcopy(text)
    text.dtype = text.dtype or config.dtype
    if config.model_type not in PLAIN_OF_TEXT:
        text.model_type = config.model_type
    return text


def placeholders(config: Any) -> dict[int, str]:
    """Of a model's whole config: the tokens in whose places states of other senses than text are put, by their names
    there.
    """
    if config.get_text_config(decoder=True) is config:
        return {}
    tokens = ((getattr(config, name, None), name) for name in PLACEHOLDERS)
    return {token: name for token, name in tokens if isinstance(token, int)}


def keep_text_only(model: Any) -> None:
    """Leaves of a model that was loaded here what text goes through."""
    body = model.base_model
    if (decoder := model.get_decoder()) is not body:
        for name, part in list(body.named_children()):
            if part is not decoder:
                delattr(body, name)


def module_config(model: nn.Module, name: str) -> Any:
    if not isinstance(model, PreTrainedModel):
        kind = type(model).__name__
        hint = " (merge_and_unload() gives it)" if kind.startswith("Peft") else ""
        raise ValueError(f"{name}: it is a {kind}, expected a language model of transformers{hint}")
    return text_config(model.config)


def scheme_in(values: dict[str, Any], what: str) -> Scheme | None:
    """How the weights of a config are stored; None: as they are. ValueError for a way that is not supported, before any
    weights are read.
    """
    for part in (values, values.get("text_config") or {}):
        for key in ("quantization_config", "compression_config"):
            if (quantisation := part.get(key)) and not is_of_kv_alone(quantisation):
                if is_widened(values):
                    return None
                method = quantisation.get("quant_method") or "a method without a name"
                kinds = [str(quantisation[kind]) for kind in ("format", "fmt", "quant_type") if quantisation.get(kind)]
                method += f" ({', '.join(kinds)})" if kinds else ""
                try:
                    return scheme_of(quantisation)
                except Unsupported as error:
                    raise ValueError(f"{what} is quantised by {method}, {error}") from None
    return None


def keeps_experts(scheme: Scheme, model_type: str) -> bool:
    """Whether experts stay in 8 bits; others are widened to the dtype of the model."""
    return scheme.kept is Fp8Weight and model_type in IN_EIGHT_BITS


class Storage(NamedTuple):
    """As what a checkpoint's weights are kept when it is loaded, in words; what is stored in 16 bits is not counted."""

    products: str
    experts: str | None  # None: it has none


def storage_of(model: str | Path, config: Any) -> Storage:
    """Of a folder or hub id, whose `config_of` this is; no weights are read. ValueError as `scheme_in`."""
    values, _ = PretrainedConfig.get_config_dict(str(model))
    scheme, count = scheme_in(values, str(model)), next((getattr(config, n) for n in EXPERTS if hasattr(config, n)), 0)
    products = "in the engine's dtype"
    experts = "of MXFP4, widened to the engine's dtype" if is_widened(values) else "in the engine's dtype"
    if scheme is not None:
        rounded = {"none": "", "token": ", rows rounded each", "group": ", rows rounded by groups of 128"}
        how = rounded.get(scheme.activations, ", rows rounded by the checkpoint's scales")
        kept = f"in 8 bits{how}" if scheme.kept is Fp8Weight else "in 4 bits"
        products = f"kept {kept}"
        experts = products if keeps_experts(scheme, config.model_type) else "widened to the engine's dtype"
    return Storage(products, f"{count}, {experts}" if count else None)


def is_widened(values: dict[str, Any]) -> bool:
    """Whether transformers makes 16-bit weights of what is stored: MXFP4, whose numbers bfloat16 can hold."""
    return (values.get("quantization_config") or {}).get("quant_method") == "mxfp4"


def is_of_kv_alone(quantisation: dict[str, Any]) -> bool:
    """Whether the weights are what they are and only KV has scales, one of each layer for float8_e4m3fn: tensors that
    `kv_scales` reads where KV is to be of 8 bits, and that mean nothing else.
    """
    scheme = quantisation.get("kv_cache_scheme") or {}
    wanted = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    return not quantisation.get("config_groups") and all(scheme.get(key) == value for key, value in wanted.items())


def load_causal_lm(
    model: str | Path | nn.Module,
    dtype: torch.dtype,
    name: str = "model",
    packages: tuple[str, ...] = (),
    adapter: Path | None = None,
    any_module: bool = False,
) -> Any:
    """The module itself, or that of the folder or hub id, whole; its modules are of transformers or of these packages,
    or for whom their own code runs, `any_module`. An adapter's folder is merged into what was loaded.

    Raises:
        ValueError: tensors that are missing, unknown or of another shape; modules that this engine does not know; all
            that `merge_adapter` raises.
    """
    module = model if isinstance(model, nn.Module) else from_folder(model, dtype, name)
    if not any_module:
        check_modules(module, name, packages)
    if adapter is not None:
        merge_adapter(module, adapter)
    return module


def place(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Moves the module to the device, and casts its parameters alone: rotations would not survive 16 bits, and neither
    would those that transformers keeps in float32 (routers).
    """
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    with torch.inference_mode(False):  # the module may be trained later, whatever mode the caller is in
        make_ordinary(model)
        model.to(device=device)
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and not any(part in name for part in kept):
                parameter.data = parameter.data.to(dtype)


def make_ordinary(model: nn.Module) -> None:
    """Parameters that were made in inference mode become ordinary ones, shared as they were: moved, they would be
    neither, and fail in every product.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_inference():
                if parameter not in made:
                    made[parameter] = nn.Parameter(parameter.clone(), parameter.requires_grad)
                setattr(module, name, made[parameter])


def from_folder(source: str | Path, dtype: torch.dtype, name: str) -> Any:
    if (Path(source) / "generation_config.json").exists():
        GenerationConfig.from_pretrained(str(source))  # broken, it would be left out, and the stop tokens with it
    config = AutoConfig.from_pretrained(str(source), trust_remote_code=False)
    kinds: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText)
    kind = next((kind for kind in kinds if type(config) in kind._model_mapping), None)
    if kind is None:
        raise ValueError(
            f"{name}: {source} has model_type {config.model_type!r}, expected a causal language model of transformers"
        )
    values, _ = PretrainedConfig.get_config_dict(str(source))
    scheme, widened = scheme_in(values, f"{name}: {source}"), is_widened(values) and values["quantization_config"]
    for part in (config, config.get_text_config(decoder=True)):
        for key in ("quantization_config", "compression_config"):
            vars(part).pop(key, None)  # transformers would load the packages that have quantised the weights
    own: dict[str, Any] = {}
    if widened:
        config.quantization_config, own = widened, {"quantization_config": Mxfp4Config(dequantize=True)}
    products, theirs, other_experts, filled = set[str](), set[str](), set[str](), set[str]()
    if scheme is not None:
        folder = local_folder(source, name)
        names = set(tensor_names(folder))
        products = scheme.products(names)
        theirs = {tensor for path in products for tensor in scheme.of_product(path)} & names
        # Which transformers does not report where it is told to leave out those of any expert.
        read = {of_any_expert(tensor) for tensor in theirs}
        other_experts = {tensor for tensor in names - theirs if of_any_expert(tensor) in read}
        own = {"quantization_config": Replaced(products, theirs)}
    loaded: Any = kind.from_pretrained(
        str(source),
        config=config,
        dtype=dtype,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **own,
    )
    model, info = loaded
    known = known_as(theirs, model)
    if scheme is not None:
        filled = fill(model, folder, scheme, products, theirs, f"{name}: {source}")
        setattr(model, STORED_BY, scheme)
    faults = []
    if missing := sorted(set(info["missing_keys"]) - filled):
        faults.append(f"lacks {some(missing)}")
    unexpected = (set(info["unexpected_keys"]) - known) | other_experts
    if unknown := sorted(name for name in unexpected - filled if not SCALE_NAME.fullmatch(name)):
        faults.append(f"has {some(unknown)}, unknown to {type(model).__name__}")
    for tensor, got, expected in sorted(info["mismatched_keys"])[:1]:
        faults.append(f"has {tensor} of shape {list(got)}, expected {list(expected)}")
    if faults:
        raise ValueError(f"{name}: {source} {' and '.join(faults)}, expected every tensor of the model and no other")
    return model


def own_names(tensors: Iterable[str], model: Any) -> dict[str, str]:
    """What the model calls the tensors that a checkpoint calls so. Experts stand one by one in both."""
    renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    return {tensor: rename_source_key(tensor, renamings, [])[0] for tensor in tensors}


def known_as(tensors: set[str], model: Any) -> set[str]:
    """All names under which transformers may report these tensors: the model's own, and of an expert's scales one that
    the parameter of all experts has.
    """
    own = set(own_names(tensors, model).values())
    names = tensors | own
    for name in own:
        match = re.fullmatch(r"(.*\.experts)\.\d+\.(\w+)\.weight(_\w+)", name)
        if match is not None and match[2] in PARTS:
            names.add(f"{match[1]}.{'down_proj' if PARTS[match[2]] == 'down' else 'gate_up_proj'}{match[3]}")
    return names


def of_any_expert(name: str) -> str:
    """A pattern of this tensor's name and those of the same tensor of other experts of its layer."""
    return re.sub(r"(?<=\bexperts\\\.)\d+(?=\\\.)", r"\\d+", re.escape(name))


class Replaced(QuantizationConfigMixin):
    """Has transformers leave the place of quantised products to us, and their tensors in the file."""

    def __init__(self, products: set[str], tensors: set[str]) -> None:
        self.quant_method: Any = METHOD  # of transformers' own, or registered
        self.products, self.tensors = products, tensors

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": METHOD}


class Replacement(HfQuantizer):
    """What transformers asks before it reads weights."""

    def _process_model_before_weight_loading(self, model: Any, **_options: Any) -> None:
        config: Any = self.quantization_config
        for path in own_names(config.products, model).values():
            parent, _, leaf = path.rpartition(".")
            try:
                linear = model.get_submodule(path)
            except AttributeError:
                continue  # which is found out when its tensors have no place
            if type(linear) is nn.Linear:
                setattr(model.get_submodule(parent), leaf, QuantizedLinear(linear))
        # Not one by one reported as unknown. Transformers tries all patterns on each such name: there is one for all
        # experts of a layer.
        model._keys_to_ignore_on_load_unexpected = {
            *(model._keys_to_ignore_on_load_unexpected or ()),
            *(f"^{of_any_expert(name)}$" for name in known_as(config.tensors, model)),
        }

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


if METHOD not in AUTO_QUANTIZER_MAPPING:
    register_quantizer(METHOD)(Replacement)


def fill(model: Any, folder: Path, scheme: Scheme, products: set[str], tensors: set[str], what: str) -> set[str]:
    """Puts weights where quantised products and experts of 8 bits stand, and widens those of other experts. The names
    of parameters that it wrote or replaced, and of tensors that say nothing.

    Raises:
        ValueError: a product that is none of the model's, or one that is read as a plain weight elsewhere; tensors that
            are missing or do not fit.
    """
    model.hf_quantizer.remove_quantization_config(model)
    model.config._is_quantized = False
    head = next(path for path, module in model.named_modules() if module is model.get_output_embeddings())
    of_products = {f"{path}.bias" for path in products}
    loaded = load_tensors(folder, (tensors | of_products).__contains__)
    modules = dict(model.named_modules())
    written: dict[str, set[tuple[int, str]]] = {}
    kept: dict[str, QuantizedExperts] = {}  # by the modules in whose places they stand
    filled: set[str] = set()
    # Early GPTQ wrote a bias of zeros for products that have none.
    biases = {name for name in of_products & loaded.keys() if not loaded[name].any()}
    own = own_names({*products, *biases}, model)
    for path in sorted(products):
        of_path = {name: loaded.get(f"{path}.{name}") for name in scheme.tensors | scheme.optional}
        given = {name: tensor for name, tensor in of_path.items() if tensor is not None}
        linear, expert = modules.get(own[path]), expert_of(own[path], modules)
        if not isinstance(linear, QuantizedLinear) and expert is None:
            raise ValueError(f"{what} has a quantised {path}, expected quantised projections and experts alone")
        if own[path] == head:
            raise ValueError(f"{what} has a quantised {path}, expected one of float32, float16 or bfloat16")
        if missing := sorted(scheme.tensors - given.keys()):
            raise ValueError(f"{what} lacks {path}.{missing[0]}, expected every tensor of the model and no other")
        weight = fitting_weight(scheme, given, f"{what} has a quantised {path}")
        if isinstance(linear, QuantizedLinear):
            expected = [linear.out_features, linear.in_features]
        else:
            assert expert is not None
            expected = list(expert.rows.shape)
        if list(weight.shape) != expected:
            raise ValueError(f"{what} has {path} of shape {list(weight.shape)}, expected {expected}")
        if isinstance(linear, QuantizedLinear):
            linear.store(weight)
            if linear.bias is None and f"{path}.bias" in biases:
                filled |= {f"{path}.bias", own[f"{path}.bias"]}
        else:
            assert expert is not None
            in_eight_bits = keeps_experts(scheme, text_config(model.config).model_type)
            put(expert, weight, kept if in_eight_bits else None, f"{what} has a quantised {path}")
            written.setdefault(expert.path, set()).add((expert.number, expert.part))
    filled |= whole_experts(written, modules, what)
    for path, experts in kept.items():
        model.set_submodule(path, experts)
    return filled


class Expert(NamedTuple):
    """A product of an expert, whose weight is a part of what transformers keeps for all of them."""

    path: str  # of the experts' module
    module: Any
    number: int
    part: str  # "gate", "up" or "down"
    weight: nn.Parameter  # of all experts
    rows: Tensor  # [out, in], a view of it


def expert_of(path: str, modules: dict[str, Any]) -> Expert | None:
    """The expert's product that this path names, if it is one: of modules with [experts, out, in]."""
    match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)", path)
    if match is None or match[1] not in modules or match[3] not in PARTS:
        return None
    module, part = modules[match[1]], PARTS[match[3]]
    if getattr(module, "is_transposed", True) or not hasattr(module, "gate_up_proj"):
        return None
    number, inner = int(match[2]), module.down_proj.shape[2]
    if number >= experts_in(module):
        return None
    weight = module.down_proj if part == "down" else module.gate_up_proj
    whole = weight.data[number]
    rows = {"gate": whole[:inner], "up": whole[inner:], "down": whole}[part]
    return Expert(match[1], module, number, part, weight, rows)


def experts_in(module: Any) -> int:
    """How many there are by the config: some versions of transformers make room for as many as a checkpoint has."""
    return int(getattr(module, "num_experts", len(module.down_proj)))


def put(expert: Expert, weight: QuantizedWeight, kept: dict[str, QuantizedExperts] | None, what: str) -> None:
    """Stores what an expert has in 8 bits with that of the others of its module; where none is kept so, writes numbers
    of the module's parameter.

    Raises:
        ValueError: activations are rounded in a way that experts cannot be given.
    """
    activations = weight.activations if isinstance(weight, Fp8Weight) else "none"
    others = None if kept is None else kept.setdefault(expert.path, QuantizedExperts(experts_in(expert.module)))
    known = ("none",) if others is None else ("none", "token", "group")
    if activations not in known or (others is not None and others.activations not in (None, activations)):
        raise ValueError(f"{what} whose activations are rounded ({activations}), expected those of all experts alike")
    if others is None:
        expert.rows.copy_(weight.dequantize())
    else:
        assert isinstance(weight, Fp8Weight)
        others.store(expert.number, expert.part, weight)


def whole_experts(written: dict[str, set[tuple[int, str]]], modules: dict[str, Any], what: str) -> set[str]:
    """The names of the parameters that were written, which are wholly so. ValueError where they are in part."""
    for path, parts in written.items():
        for number in range(experts_in(modules[path])):
            for part in ("gate", "up", "down"):
                if (number, part) not in parts:
                    raise ValueError(
                        f"{what} has quantised experts in {path}, but not {part} of {number}, expected all"
                    )
    return {f"{path}.{name}" for path in written for name in ("gate_up_proj", "down_proj")}


def some(names: list[str], most: int = 3) -> str:
    """The first names of many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more tensors" if len(names) > most else "")


def check_modules(model: nn.Module, name: str = "model", packages: tuple[str, ...] = ()) -> None:
    """ValueError for a module whose forward pass ours would not repeat: quantised, adapted, wrapped, or not loaded."""
    known = KNOWN_MODULES + tuple(f"{package}." for package in packages)
    for path, module in model.named_modules():
        kind = type(module)
        full = f"{kind.__module__}.{kind.__name__}"
        is_plain = kind in (nn.Linear, NonDynamicallyQuantizableLinear) or full in PLAIN_LINEARS
        if (isinstance(module, nn.Linear) and not is_plain) or (path and not full.startswith(known)):
            is_product = isinstance(module, nn.Linear) or path.endswith(("_proj", "lm_head"))
            expected = "a plain torch.nn.Linear" if is_product else "a module of transformers"
            raise ValueError(f"{name}: {path} is a {full}, expected {expected}")
        if is_plain:
            check_linear(module, f"{name}: {path}")


def check_linear(linear: nn.Linear, what: str) -> None:
    tensors = dict(linear.named_parameters(recurse=False)) | dict(linear.named_buffers(recurse=False))
    if others := sorted(set(tensors) - {"weight", "bias"}):
        raise ValueError(f"{what} has {others[0]}, expected a weight and a bias alone")
    for name, tensor in tensors.items():
        if type(tensor) is not nn.Parameter:
            raise ValueError(f"{what}.{name} is a {type(tensor).__name__}, expected a plain torch.nn.Parameter")
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise ValueError(f"{what}.{name} is {tensor.dtype}, expected one of {', '.join(map(str, DTYPES))}")
        if tensor.is_meta:
            raise ValueError(f"{what}.{name} is on no device, expected a weight that is loaded")
