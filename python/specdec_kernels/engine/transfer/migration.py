"""A request that moves from one engine to another: exported, checked against the other engine, and resumed there.

Counts for penalties, the state of a grammar and the entries of an n-gram index are not moved: they are derived from the
text again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...models.language_model import LanguageModel
from ...models.weights.checkpoint import readable
from ..config import EngineConfig
from ..device.state import EngineState
from ..drafts import Draft
from ..outputs import TokenLogprob
from ..params import SamplingParams
from ..request import BaseRequest, ResumedRequest
from ..text.prompts import check_tokens
from .kv_transfer import SLOT_PREFIX, MigratedKv, groups_of, layout_of, specs_of

VERSION = 1
# Types of the values, as JSON has them, and the values that hold integers only.
KINDS: dict[str, tuple[type, ...]] = {
    "prompt": (list,), "tokens": (list,), "params": (dict,), "logprobs": (list, type(None)),
    "prompt_logprobs": (list, type(None)), "counts": (list,), "index": (int,), "sample": (int,), "layout": (dict,),
    "weights": (str,), "first_rows": (dict,),
}  # fmt: skip
INTEGERS = "prompt", "tokens", "counts", "first_rows"


@dataclass(frozen=True)
class ExportedRequest:
    """A request that has left an engine, for `import_request` of another engine, over any transport.

    It can be pickled, and saved as a safetensors file.

    Attributes:
        tensors: KV rows of target and draft by group of layers, [layers, rows, heads, dim] in the pools' dtype, the
            state of the target's recurrent layers, and the draft's state of the request; on the engine's device.
        values: everything else as JSON values: the text, parameters, log-probabilities, counts, and what both engines
            must have in common.
    """

    tensors: dict[str, Tensor]
    values: dict[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle tensors of 8-bit floats as bytes: torch loads none that plain pickle wrote."""
        dtypes = {name: tensor.dtype for name, tensor in self.tensors.items() if tensor.itemsize == 1}
        as_bytes = {name: self.tensors[name].view(torch.uint8) for name in dtypes}
        return unpickled, ({**self.tensors, **as_bytes}, dtypes, self.values)

    @property
    def num_bytes(self) -> int:
        """Return the size of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def to(self, device: torch.device | str) -> ExportedRequest:
        """Return the request with its tensors on this device."""
        return ExportedRequest({name: tensor.to(device) for name, tensor in self.tensors.items()}, self.values)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write a safetensors file, with the values in its metadata."""
        save_file(self.tensors, file, metadata={"request": json.dumps(self.values)})

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> ExportedRequest:
        """Read a file that `save` wrote, to host memory.

        Raises:
            ValueError: the file is no such file.
        """
        with readable(Path(file)), safe_open(file, "pt") as opened:
            values = json.loads((opened.metadata() or {}).get("request", "null"))
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        if not isinstance(values, dict):
            raise ValueError(f"ExportedRequest: {file} has no request in its metadata, expected one (of `save`)")
        return cls(tensors, values)


def unpickled(
    tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], values: dict[str, Any]
) -> ExportedRequest:
    """Return a request from what `ExportedRequest.__reduce__` wrote; `dtypes` are those of tensors written as bytes."""
    viewed = {name: tensor.view(dtypes[name]) if name in dtypes else tensor for name, tensor in tensors.items()}
    return ExportedRequest(viewed, values)


@dataclass(frozen=True)
class MigrationPeer:
    """The side of an engine in a migration: what a request needs there, and what it is checked against."""

    target: LanguageModel
    draft: Draft
    config: EngineConfig
    state: EngineState

    @property
    def layout(self) -> dict[str, Any]:
        """Return what both engines must have in common, as JSON values."""
        return {"model": self.target.config.model_type, **layout_of(self.target, self.draft)}


def resumed_from(
    exported: ExportedRequest, peer: MigrationPeer, stream: torch.cuda.Stream | None, trusted: bool
) -> ResumedRequest:
    """Return the state of an exported request for an engine, with its tensors on the engine's device."""
    values = exported.values
    # A copy to a GPU from pageable memory waits for the caller's stream, not for the rounds.
    tensors = exported.to(peer.config.machine.device).tensors
    return ResumedRequest(
        tokens=values["tokens"],
        logprobs=logprobs_of(values["logprobs"] or []),
        prompt_logprobs=prompt_logprobs_of(values),
        index=values["index"],
        sample=values["sample"],
        counts=values["counts"],
        kv=MigratedKv(tensors, values["first_rows"], stream),
        trusted=trusted,
    )


# --- checks


def check_values(values: Any, peer: MigrationPeer, checksum: Callable[[], str]) -> None:
    """Raise ValueError for a request that this engine cannot continue exactly.

    Args:
        values: what `export_request` gave, of any type.
        peer: what this engine needs to continue it.
        checksum: returns that of this engine's target weights; called last, since it may read them.
    """
    version = values.get("version") if isinstance(values, dict) else None
    if version != VERSION:
        raise ValueError(f"import_request: request has version {version}, expected {VERSION}")
    if missing := [key for key in KINDS if key not in values]:
        raise ValueError(f"import_request: request lacks {missing[0]}, expected what export_request gave")
    for key, kinds in KINDS.items():
        if not isinstance(values[key], kinds):
            given, names = type(values[key]).__name__, " or ".join(kind.__name__.removesuffix("Type") for kind in kinds)
            raise ValueError(f"import_request: request has {key} of type {given}, expected {names}")
    for key in INTEGERS:
        for number in values[key].values() if isinstance(values[key], dict) else values[key]:
            if type(number) is not int:
                raise ValueError(f"import_request: request has {number!r} among {key}, expected integers")
    if len(values["counts"]) != 4:
        raise ValueError(f"import_request: request has counts of {len(values['counts'])}, expected 4")
    asked = {field.name for field in fields(SamplingParams)}
    for name in sorted(asked ^ values["params"].keys(), key=str):
        what = "lacks {}, expected it" if name in asked else "has {}, expected none"
        raise ValueError(f"import_request: request {what.format(name)} among params")
    begun = values["params"]["generated_token_ids"]
    if not isinstance(begun, list) or values["tokens"][: len(begun)] != begun:
        raise ValueError(f"import_request: request has tokens that do not begin with its generated_token_ids {begun}")
    logprobs, num_scored = values["logprobs"], len(values["tokens"]) - len(begun)
    if logprobs is not None and not (len(logprobs) == num_scored and all(map(is_logprob, logprobs))):
        raise ValueError("import_request: request has other logprobs than one and the best with it for each token")
    scored = values["prompt_logprobs"]
    is_whole = scored is None or (len(scored) == len(values["prompt"]) and scored[0] is None)
    if not is_whole or not all(map(is_logprob, (scored or [])[1:])):
        raise ValueError("import_request: request has other prompt_logprobs than null and one for each token after it")
    ours = json.loads(json.dumps(peer.layout))
    for key, own in ours.items():
        if (theirs := values["layout"].get(key)) != own:
            raise ValueError(f"import_request: request has {key} {theirs}, expected this engine's {own}")
    if values["weights"] != (own := checksum()):
        raise ValueError(f"import_request: request is of weights {values['weights']}, expected this engine's {own}")
    text, sizes = [*values["prompt"], *values["tokens"]], (peer.config.max_len, peer.target.config.vocab_size)
    check_tokens(text, "import_request: request", max_len=sizes[0], vocab_size=sizes[1], placeholders={})


def check_tensors(exported: ExportedRequest, peer: MigrationPeer) -> None:
    """Raise ValueError for tensors that differ from what the values describe."""
    num_rows = len(exported.values["prompt"]) + len(exported.values["tokens"]) - 1
    vocab_size = peer.target.config.vocab_size
    first_rows = exported.values["first_rows"]
    target_groups, draft_groups = groups_of(peer.target, peer.draft, num_rows)
    for name, group, count, _ in target_groups + draft_groups:
        window = peer.state.window if group.window is None else group.window
        first, most = first_rows.get(name, 0), 0 if window is None else max(count + 1 - window, 0)
        if not 0 <= first <= most:
            raise ValueError(f"import_request: request has rows of {name} from {first} on, expected 0 to {most}")
    for name, spec in specs_of(peer.target, peer.draft, num_rows, first_rows).items():
        tensor, shape, dtype = exported.tensors.get(name), spec.shape, spec.like.dtype
        if not isinstance(tensor, Tensor):
            what = f"lacks {name}" if tensor is None else f"has a {type(tensor).__name__} as {name}"
            raise ValueError(f"import_request: request {what}, expected a tensor of shape {shape}")
        if (list(tensor.shape), tensor.dtype) != (shape, dtype):
            got = f"shape {list(tensor.shape)} and {tensor.dtype}"
            raise ValueError(f"import_request: request has {name} of {got}, expected {shape} and {dtype}")
        if name.startswith(SLOT_PREFIX) and name.endswith("_ids"):
            low, high = (int(bound) for bound in tensor.aminmax())
            if low < 0 or high >= vocab_size:
                raise ValueError(
                    f"import_request: request has {name} from {low} to {high}, expected 0 to {vocab_size - 1} "
                    "(the model's vocabulary)"
                )


# --- values


def plain_values(request: BaseRequest) -> dict[str, Any]:
    """Return a request that has left its engine as JSON values."""
    output, params = request.output, request.params
    given = {field.name: getattr(params, field.name) for field in fields(params)}
    given |= {
        "n": 1,
        "stop_token_ids": list(request.stop_tokens),
        "stop": params.stop_strings,
        "constrain_after": list(params.constrain_after),
        "generated_token_ids": list(params.generated_token_ids),
        "logit_bias": None if params.logit_bias is None else [[key, bias] for key, bias in params.logit_bias.items()],
        "prediction": list(request.prediction) or None,
        "json_schema": params.constraint[1] if params.json_schema is not None else None,
    }
    logprobs = None if output.logprobs is None else [[each.logprob, each.top] for each in output.logprobs]
    scored = request.read_prompt_logprobs()
    return {
        "version": VERSION,
        "prompt": list(output.prompt_tokens),
        "tokens": list(output.tokens),
        "params": given,
        "logprobs": logprobs,
        "prompt_logprobs": scored and [each and [each.logprob, each.top] for each in scored],
        "counts": [output.stats.rounds, output.stats.drafted, output.stats.accepted, output.cached_tokens],
        "index": output.index,
        "sample": output.sample,
    }


def params_of(values: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters of an exported request."""
    given = dict(values["params"])
    if (bias := given["logit_bias"]) is not None:
        if not (isinstance(bias, list) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in bias)):
            raise ValueError(f"import_request: request has logit_bias {bias!r}, expected pairs of a token and a number")
        given["logit_bias"] = dict(bias)
    return SamplingParams(**given)


def is_logprob(value: Any) -> bool:
    """Return whether a value is a number and a list of pairs of a token and a number."""
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[0], float) and isinstance(value[1], list)):
        return False
    return all(isinstance(pair, list | tuple) and [type(each) for each in pair] == [int, float] for pair in value[1])


def logprobs_of(pairs: Sequence[Any]) -> list[TokenLogprob]:
    """Return log-probabilities of an exported request."""
    return [TokenLogprob(own, [(int(token), logprob) for token, logprob in top]) for own, top in pairs]


def prompt_logprobs_of(values: Mapping[str, Any]) -> list[TokenLogprob | None] | None:
    """Return the log-probabilities of an exported request's prompt, if it has any."""
    scored = values["prompt_logprobs"]
    return None if scored is None else [None, *logprobs_of(scored[1:])]
