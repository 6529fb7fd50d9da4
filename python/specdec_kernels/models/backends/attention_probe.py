"""One pass over a few tokens, from which a model's attention calls and its body are learnt."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .attention_hook import AttentionSpec, MaskKind, UnsupportedModel, marker_like, use_hook
from .module_copy import accepted
from .module_swaps import is_rotation_of_halves

# Arguments of attention functions that do not change the result of ours.
NEUTRAL = (
    "position_ids",
    "cache_position",
    "position_embeddings",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
)


def infer_mask(function: Callable[..., Tensor], size: int | None) -> MaskKind:
    """Return what a mask function of transformers lets a row see, by its values around multiples of the size."""
    size = size or 0
    edges = {0, 1, 2, 5, *(n * size + d for n in (1, 2, 3) for d in (-1, 0, 1))}
    positions = torch.tensor(sorted(edge for edge in edges if edge >= 0))
    q, kv = positions[:, None], positions[None, :]
    zero = torch.zeros((), dtype=torch.long)
    try:
        given = function(zero, zero, q, kv).expand(len(positions), len(positions))
    except (IndexError, RuntimeError) as error:
        raise UnsupportedModel("has an attention mask that depends on more than positions") from error
    causal = kv <= q
    kinds = {MaskKind("all"): causal}
    if size:
        kinds[MaskKind("window", size)] = causal & (kv > q - size)
        kinds[MaskKind("chunk", size)] = causal & (kv // size == q // size)
    for kind, expected in kinds.items():
        if torch.equal(given, expected):
            return kind
    if (given & ~causal).any():
        raise UnsupportedModel("attends to tokens that come later")
    raise UnsupportedModel("has an attention mask that is neither causal nor a sliding window nor chunks")


class AttentionProbe:
    """A hook that records what is fixed about the attention calls of a pass. Its outputs are zeros."""

    def __init__(self) -> None:
        self.specs: list[AttentionSpec] = []
        self._kinds: dict[int, MaskKind | UnsupportedModel] = {}  # by the storage of a mask
        self._masks: list[Tensor] = []  # held, so that their storages stay their own
        self._rotated: list[tuple[Tensor, Tensor] | None] = []  # since the last call; None: another kind of rotation

    def rotate(
        self, own: Callable[..., Any], q: Tensor, k: Tensor, *arguments: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = own(q, k, *arguments, **named)
        self._rotated.append(out if is_rotation_of_halves(q, k, out, arguments, named) else None)
        return out

    def mask(self, options: dict[str, Any]) -> Tensor:
        marker = marker_like(options["device"], options["dtype"])
        self._masks.append(marker)
        try:
            kind: MaskKind | UnsupportedModel = infer_mask(options["mask_function"], options.get("local_size"))
        except UnsupportedModel as unsupported:  # raised by a layer that uses it: some masks are used by none
            kind = unsupported
        self._kinds[marker.untyped_storage().data_ptr()] = kind
        return marker

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        name = type(module).__name__
        if k.shape[2] != q.shape[2] or k.shape[0] != q.shape[0]:
            raise UnsupportedModel(f"attends to other rows than its own tokens' ({name})")
        for option, value in options.items():
            if isinstance(value, Tensor) and option not in (*NEUTRAL, "s_aux"):
                raise UnsupportedModel(f"gives its attention {option}, which ours does not know ({name})")
        kind = self._kind(mask, options, name)
        # Nothing happens to the rotated ones in between.
        is_rotated = [out is not None and out[0] is q and out[1] is k for out in self._rotated] == [True]
        self._rotated.clear()
        spec = AttentionSpec(module, q.shape[1], k.shape[1], k.shape[3], v.shape[3], kind, False)
        fits = not spec.is_gathered and spec.k_dim == spec.v_dim == spec.head_dim
        self.specs.append(spec._replace(is_rotated=is_rotated and fits))
        return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3])

    def _kind(self, mask: Tensor | None, options: dict[str, Any], name: str) -> MaskKind:
        if mask is None:
            size = options.get("sliding_window")
            return MaskKind("window", size) if size else MaskKind("all")
        found = self._kinds.get(mask.untyped_storage().data_ptr())
        if found is None:
            raise UnsupportedModel(f"makes attention masks of its own ({name})")
        if isinstance(found, UnsupportedModel):
            raise found
        return found


class ProbedPass(NamedTuple):
    """The observations of one pass of a model."""

    specs: list[AttentionSpec]
    outputs: dict[str, Any]  # of each module that ran, by its path
    widths: dict[nn.Module, int]  # the row length of each module's input


def probe_pass(model: nn.Module, arguments: dict[str, Any]) -> ProbedPass:
    """Run the model once, and record its attention calls and its modules' inputs and outputs.

    Raises:
        UnsupportedModel: it does not run, or does not use the attention interface.
    """
    outputs: dict[str, Any] = {}
    widths: dict[nn.Module, int] = {}

    def record(path: str, module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        outputs[path] = output
        if given and isinstance(given[0], Tensor) and given[0].is_floating_point():
            widths[module] = given[0].shape[-1]

    handles = [module.register_forward_hook(partial(record, path)) for path, module in model.named_modules() if path]
    probe = AttentionProbe()
    try:
        with use_hook(probe):
            model(**accepted(model, arguments))
    except UnsupportedModel:
        raise
    except Exception as error:
        message = str(error).partition("\n")[0]
        raise UnsupportedModel(f"does not run with another attention ({type(error).__name__}: {message})") from error
    finally:
        for handle in handles:
            handle.remove()
    if not probe.specs:
        raise UnsupportedModel("does not use the attention interface")
    return ProbedPass(probe.specs, outputs, widths)


def body_path(model: nn.Module, probed: ProbedPass) -> str:
    """Return the path of the outermost module that returns hidden states and has all attention modules.

    Raises:
        UnsupportedModel: there is none.
    """
    attended = {path for path, module in model.named_modules() for spec in probed.specs if module is spec.module}
    bodies = [
        path
        for path, output in probed.outputs.items()
        if getattr(output, "last_hidden_state", None) is not None
        and all(each.startswith(path + ".") for each in attended)
    ]
    if not bodies:
        raise UnsupportedModel("has no body with hidden states")
    return min(bodies, key=len)
