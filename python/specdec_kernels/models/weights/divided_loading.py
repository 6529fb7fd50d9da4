"""Loading a rank's part of a checkpoint: layer by layer, so that no process holds the whole."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from .checkpoint import does_not_fit, load_tensors, some, tensor_names
from .kv_scales import SCALE_NAME
from .model_config import StoredConfig, check_module, keep_text_only, keeps_experts, own_class
from .mtp_layouts import LEFT_OUT, mtp_prefixes
from .quantized_loading import STORED_BY, expert_of, load_quantized, own_names, replace_linears
from .sharding import Division
from .update import Skeleton

LAYER = re.compile(r"\.(\d+)\.")


def load_divided(
    stored: StoredConfig, dtype: torch.dtype, division: Division, draft_prefixes: tuple[str, ...] = ()
) -> Any:
    """Return the text decoder of a folder or hub id with one rank's part of each tensor.

    Args:
        stored: the config of the folder or hub id, whose tensors are read one layer at a time.
        dtype: of the parameters, but for those that transformers keeps in float32.
        division: of the rank.
        draft_prefixes: tensors under these prefixes are a draft's.

    Raises:
        ValueError: tensors that are missing, unknown or of another shape; what `Division` refuses.
    """
    what, folder, text, scheme = stored.what, stored.folder(), stored.text, stored.scheme
    try:
        with parameters_on_meta():
            model = own_class(stored.whole, what)._from_config(copy.deepcopy(stored.whole), dtype=dtype)
    except Exception:
        check_module(stored.values, what)
        raise
    skeleton = Skeleton(model)
    keep_text_only(model)
    left_out = draft_prefixes + mtp_prefixes(tensor_names(folder), text.num_hidden_layers)
    names = {each for each in tensor_names(folder) if not each.startswith(left_out) and not SCALE_NAME.fullmatch(each)}
    missing = set(model.state_dict())
    linears = set[str]() if scheme is None else scheme.linears(names)
    replace_linears(model, linears)
    cuts = division.cuts(model)
    for group in by_layer(names):
        if scheme is not None and (own := {path for path in linears if f"{path}.{scheme.marks}" in group}):
            theirs = {tensor for path in own for tensor in scheme.tensors_of(path)} & group
            if not keeps_experts(scheme, text.model_type):
                materialize_experts(model, own_names(own, model).values(), dtype)
            filled = load_quantized(model, folder, scheme, own, theirs, what)
            for key, tensor in model.state_dict().items():
                if key in filled & cuts.keys():
                    put(model, key, cuts[key](tensor))
            division.divide_quantized(model)
            missing -= filled
            group -= theirs | filled
        tensors = load_tensors(folder, group.__contains__)
        for key, value in skeleton.placed(tensors, what).items() if tensors else ():
            part = cuts[key](value) if key in cuts else value
            put(model, key, part.to(dtype_of(model, key, dtype)) if part.is_floating_point() else part)
            missing.discard(key)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    model.tie_weights()
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if is_tied and not head.is_meta and not torch.equal(head, embedding):
        raise ValueError(f"{what} has another LM head than its embedding, expected the same with tie_word_embeddings")
    buffers = dict(model.named_buffers())
    expected = model.state_dict()
    ignored = "|".join(getattr(model, "_keys_to_ignore_on_load_missing", None) or ()) or "$^"
    missing = {key for key in missing & expected.keys() if key in buffers or expected[key].is_meta}
    if lacking := sorted(key for key in missing if not re.search(ignored, key)):
        raise does_not_fit(what, f"lacks {some(lacking)}")
    if scheme is not None:
        setattr(model, STORED_BY, scheme)
    setattr(model, LEFT_OUT, left_out)
    division.attach(model)
    return model.eval()


def put(model: Any, key: str, value: Tensor) -> None:
    """Replace a parameter or buffer of a module; nothing for one that was left out with other modalities."""
    path, _, leaf = key.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    elif leaf in module._buffers:
        module._buffers[leaf] = value


def dtype_of(model: Any, key: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter, which is float32 for those that transformers keeps so."""
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return torch.float32 if any(part in key for part in kept) else dtype


def materialize_experts(model: Any, paths: Iterable[str], dtype: torch.dtype) -> None:
    """Give storage to the parameters of all experts among these linears, which are dequantized into it."""
    modules = dict(model.named_modules())
    for path in {expert.path for each in paths if (expert := expert_of(each, modules)) is not None}:
        for name, parameter in modules[path].named_parameters(recurse=False):
            if parameter.is_meta:
                put(model, f"{path}.{name}", torch.empty(parameter.shape, dtype=dtype))


def by_layer(names: set[str]) -> Iterator[set[str]]:
    """Yield the names of each layer's tensors, and of each tensor of no layer."""
    groups: dict[str, set[str]] = {}
    for name in sorted(names):
        match = LAYER.search(name)
        groups.setdefault(name[: match.end()] if match else name, set()).add(name)
    yield from groups.values()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Make modules whose parameters have no storage; buffers, such as angles, are computed."""

    def on_meta(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        return None if parameter.is_meta else nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    # Its annotation leaves out that a hook may return a parameter.
    hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()
