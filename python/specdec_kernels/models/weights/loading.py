"""Loading a language model of transformers from a folder or hub id, whole.

What this engine would leave out in silence is refused by name: unsupported quantization, missing or unknown tensors,
and modules that something else has replaced. No code of a folder is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear  # of an nn.MultiheadAttention: a plain one
from transformers import GenerationConfig
from transformers.utils.quantization_config import Mxfp4Config

from ..layers.moe import QuantizedExperts
from ..layers.quantized import Fp8Weight, QuantizedLinear
from .adapters import merge_adapter
from .checkpoint import Faults, does_not_fit, does_not_load, float8_tensors, stored_tensors, tensor_names
from .divided_loading import load_divided
from .formats import Scheme
from .kv_scales import SCALE_NAME
from .model_config import StoredConfig, auto_class, check_module, drop_quantization, is_mxfp4
from .mtp_layouts import LEFT_OUT, mtp_prefixes
from .quantized_loading import STORED_BY, QuantizedLinearsConfig, known_as, load_quantized, of_any_expert
from .sharding import DIVISION, Division

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Modules of a known family whose parameters our layers read are defined here.
KNOWN_MODULES = (
    "transformers.models.", "transformers.activations", "torch.nn.modules.", f"{QuantizedLinear.__module__}.",
    f"{QuantizedExperts.__module__}.",
)  # fmt: skip

# Classes of transformers that compute an nn.Linear, rounding once more between GEMM and bias.
PLAIN_LINEARS = ("transformers.models.falcon.modeling_falcon.FalconLinear",)


def load_causal_lm(
    model: str | Path | nn.Module,
    dtype: torch.dtype,
    name: str = "model",
    packages: tuple[str, ...] = (),
    adapter: Path | None = None,
    any_module: bool = False,
    draft_prefixes: tuple[str, ...] = (),
    division: Division | None = None,
) -> Any:
    """Return the module of a folder or hub id, or the given one.

    Args:
        model: a folder, a hub id or a loaded module.
        dtype: of the loaded parameters.
        name: of the model in errors.
        packages: where modules may be defined, apart from transformers.
        any_module: modules may be defined anywhere, because their own code runs.
        adapter: the folder of a LoRA, which is merged into the weights.
        draft_prefixes: tensors of the checkpoint under these prefixes are a draft's, and are left to it.
        division: how a rank divides the model; None: it stays whole.

    Raises:
        ValueError: tensors that are missing, unknown or of another shape; modules that this engine does not know; what
            `merge_adapter` raises.
    """
    by_layer = division if adapter is None else None  # an adapter is merged into whole weights
    module = model if isinstance(model, nn.Module) else from_folder(model, dtype, name, draft_prefixes, by_layer)
    if not any_module:
        check_modules(module, name, packages)
    if adapter is not None:
        merge_adapter(module, adapter)
    if division is not None and not hasattr(module, DIVISION):
        division.divide(module)
    return module


def place(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Move the module to the device, and cast its parameters to `dtype`.

    Buffers (rotations) keep their dtype, and so do parameters that transformers keeps in float32 (routers).
    """
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    with torch.inference_mode(False):  # the module may be trained later, whatever mode the caller is in
        make_ordinary(model)
        model.to(device=device)
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and not any(part in name for part in kept):
                parameter.data = parameter.data.to(dtype)


def make_ordinary(model: nn.Module) -> None:
    """Replace parameters that were made in inference mode by ordinary ones, shared as before.

    Moved to another device, inference parameters would fail in every linear.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_inference():
                if parameter not in made:
                    made[parameter] = nn.Parameter(parameter.clone(), parameter.requires_grad)
                setattr(module, name, made[parameter])


def from_folder(
    source: str | Path,
    dtype: torch.dtype,
    name: str,
    draft_prefixes: tuple[str, ...] = (),
    division: Division | None = None,
) -> Any:
    """Return the module of a folder or hub id, whose every tensor is loaded; see `load_causal_lm`.

    Tensors of MTP layers are left out. With a division it is a rank's part, unless experts are MXFP4.
    """
    if (Path(source) / "generation_config.json").exists():
        # from_pretrained drops a broken one, and its stop tokens.
        eos = GenerationConfig.from_pretrained(str(source)).eos_token_id
        if not all(isinstance(token, int) for token in (eos if isinstance(eos, list) else [eos or 0])):
            raise ValueError(f"{name}: {source} has eos_token_id {eos!r} in its generation config, expected token ids")
    stored = StoredConfig.read(source, name)
    config, what, scheme = stored.whole, stored.what, stored.scheme
    kind = auto_class(config, what)
    num_layers = stored.text.num_hidden_layers
    mxfp4 = stored.values["quantization_config"] if is_mxfp4(stored.values) else None
    drop_quantization(config)
    if division is not None and not mxfp4:
        return load_divided(stored, dtype, division, draft_prefixes)
    own: dict[str, Any] = {}
    if mxfp4:
        config.quantization_config, own = mxfp4, {"quantization_config": Mxfp4Config(dequantize=True)}
    linears, theirs, other_experts, filled = set[str](), set[str](), set[str](), set[str]()
    if scheme is not None:
        folder = stored.folder()
        draft_prefixes += mtp_prefixes(tensor_names(folder), num_layers)
        names = {tensor for tensor in tensor_names(folder) if not tensor.startswith(draft_prefixes)}
        linears = scheme.linears(names)
        theirs = {tensor for path in linears for tensor in scheme.tensors_of(path)} & names
        # Transformers does not report these, as it is asked to ignore those of all experts of a layer.
        read = {of_any_expert(tensor) for tensor in theirs}
        other_experts = {tensor for tensor in names - theirs if of_any_expert(tensor) in read}
        own = {"quantization_config": QuantizedLinearsConfig(linears, theirs)}
    options = {"config": config, "dtype": dtype, "trust_remote_code": False} | own
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    try:
        model, info = kind.from_pretrained(str(source), **options)
    except OSError:
        raise
    except Exception as error:  # sizes that no module has; experts that do not fit each other
        check_module(stored.values, what)
        tensors = stored_tensors(Path(source)) if Path(source).is_dir() else {}
        raise does_not_load(what, "model", {name: each.shape for name, each in tensors.items()}, error) from error
    draft_prefixes += mtp_prefixes(info["unexpected_keys"], num_layers)
    setattr(model, LEFT_OUT, draft_prefixes)
    known = known_as(theirs, model)
    if scheme is not None:
        filled = load_quantized(model, folder, scheme, linears, theirs, what)
        setattr(model, STORED_BY, scheme)
    unexpected = (set(info["unexpected_keys"]) - known) | other_experts
    others = sorted(
        name for name in unexpected - filled if not SCALE_NAME.fullmatch(name) and not name.startswith(draft_prefixes)
    )
    missing = sorted(set(info["missing_keys"]) - filled)
    Faults(missing, others, sorted(info["mismatched_keys"])).check(what, model, "model")
    if scheme is not None:
        check_scales(scheme, (float8_tensors(folder) & names) - theirs, what)
    elif mxfp4 is None and Path(source).is_dir():
        check_floats(Path(source), unexpected, what)
    return model


def check_floats(folder: Path, left_out: set[str], what: str) -> None:
    """Refuse weights of integers in a folder that is not quantized: transformers would take them for values.

    Raises:
        ValueError: one of them.
    """
    for tensor, stored in sorted(stored_tensors(folder).items()):
        if tensor.endswith(".weight") and tensor not in left_out and not stored.dtype.startswith(("F", "BF")):
            raise ValueError(
                f"{what} has {tensor} of {stored.dtype}, "
                "expected floats (its config names no way in which it is quantized)"
            )


def check_scales(scheme: Scheme, others: set[str], what: str) -> None:
    """Refuse float8 tensors that belong to no quantized linear: their elements mean nothing without scales.

    Raises:
        ValueError: what is missing next to one, or that its dtype is none of the format's.
    """
    for tensor in sorted(others):
        path = tensor.removesuffix(".weight")
        if scheme.kept is Fp8Weight and path != tensor:
            raise does_not_fit(what, f"lacks {path}.{scheme.marks}")
        raise ValueError(f"{what} has {tensor} in float8, expected float32, float16 or bfloat16")


def check_modules(model: nn.Module, name: str = "model", packages: tuple[str, ...] = ()) -> None:
    """Refuse a module whose forward pass our layers would not repeat.

    Raises:
        ValueError: a module that is quantized, adapted, wrapped or not loaded, by its path.
    """
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
    """Refuse a linear with other tensors than a loaded weight and bias of floats; see `check_modules`."""
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
