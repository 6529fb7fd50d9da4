"""One request on its way from an engine to another: all that it needs to go on there, as tensors and plain values.

What moves are KV rows, not pages: engines may have pages of different sizes, and hold them at different places. What
follows from the text (counts of penalties, a grammar's state, what an n-gram index knows of it) is made again from it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...models.kv_pools import KvGroup, KvPools
from ...models.weights.checkpoint import readable
from ...models.weights.offload import weights_of
from ...ops import PagePool, write_kv
from ..device.state import EngineState
from ..outputs import TokenLogprob
from ..params import SamplingParams
from ..text.prompts import check_tokens

if TYPE_CHECKING:
    from ..device.executor import Executor
    from ..drafts import Draft
    from ..engine import Engine
    from ..request import BaseRequest

VERSION = 1
# What the values are, as JSON has them, and which of them hold integers alone.
KINDS: dict[str, tuple[type, ...]] = {
    "prompt": (list,), "tokens": (list,), "params": (dict,), "logprobs": (list, type(None)), "counts": (list,),
    "index": (int,), "sample": (int,), "layout": (dict,), "weights": (str,), "first_rows": (dict,),
}  # fmt: skip
INTEGERS = "prompt", "tokens", "counts", "first_rows"
OF_SLOT = "slot."  # names of what the draft keeps begin so
SAMPLED = 32  # numbers of each weight that tell it from another


@dataclass(frozen=True)
class ExportedRequest:
    """A request that has left an engine, for `import_request` of another one: over any transport.

    It can be pickled, and saved as a file of safetensors.

    Attributes:
        tensors: KV rows of target and draft by group of layers, [layers, rows, heads, dim] in the pools' dtype, and
            what the draft keeps of the request; on the engine's device.
        values: all else, as JSON has it: the text, parameters, log-probabilities, counts, and what the engine that it
            goes to must have in common with the one that it comes from.
    """

    tensors: dict[str, Tensor]
    values: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        """Of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def to(self, device: torch.device | str) -> ExportedRequest:
        """The same with tensors on this device."""
        return ExportedRequest({name: tensor.to(device) for name, tensor in self.tensors.items()}, self.values)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes a file of safetensors, which has the values in its metadata."""
        save_file(self.tensors, file, metadata={"request": json.dumps(self.values)})

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> ExportedRequest:
        """Reads what `save` wrote, to host memory.

        Raises:
            ValueError: it is no such file.
        """
        with readable(Path(file)), safe_open(file, "pt") as opened:
            values = json.loads((opened.metadata() or {}).get("request", "null"))
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        if not isinstance(values, dict):
            raise ValueError(f"ExportedRequest: {file} has no request in its metadata, expected one (of `save`)")
        return cls(tensors, values)


class Arrival:
    """The rows that a request brings along to the first slot that it gets.

    Args:
        stream: of the engine that it has come to, which reads them.
    """

    def __init__(self, exported: ExportedRequest, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        # A copy to a GPU from pageable memory waits for what is on the caller's stream, not for the rounds.
        self._tensors: dict[str, Tensor] | None = exported.to(device).tensors
        keep_for(stream, self._tensors)
        self._first_rows: dict[str, int] = exported.values["first_rows"]

    def unpack(
        self, state: EngineState, target: KvPools, draft: Draft, slot: Tensor, chunk: int, num_rows: int
    ) -> dict[str, Tensor] | None:
        """Writes the rows to the slot's pages, and returns what the draft is to be given when the slot is activated.

        `slot` is [1] int32; pools that give back pages behind a window get those of `chunk` rows at a time. None where
        the rows were brought before: a request that comes back from the queue is prefilled as any other.
        """
        tensors, self._tensors = self._tensors, None
        if tensors is None:
            return None
        of_target, of_draft = groups_of(target, draft, num_rows)
        for begin in range(0, num_rows, chunk):
            end = min(begin + chunk, num_rows)
            ends = torch.full_like(slot, end)
            state.make_room_for_chunks(slot, ends)
            for group in of_target:
                self._write(tensors, group, state, slot, begin, end)
            state.seq_lens[slot] = ends
            state.free_behind(slot)
        for group in of_draft:
            self._write(tensors, group, state, slot, 0, group.num_rows)
        return {name.removeprefix(OF_SLOT): tensor for name, tensor in tensors.items() if name.startswith(OF_SLOT)}

    def _write(
        self, tensors: Mapping[str, Tensor], group: Group, state: EngineState, slot: Tensor, begin: int, end: int
    ) -> None:
        """Rows from `begin` to `end`, but for those at the front that were given back."""
        first = self._first_rows.get(group.name, 0)
        start = max(begin, first)
        if start >= end:
            return
        table = pool_of(state, group.kv.window).page_table
        rows = [tensors[f"{group.name}.{part}"][:, start - first : end - first] for part in ("k", "v")]
        for layer, (k, v) in enumerate(zip(*rows, strict=True)):
            write_kv(
                k[None],
                v[None],
                group.kv.k[layer],
                group.kv.v[layer],
                table,
                state.no_rows,
                row_offset=start,
                slots=slot,
                status=state.status,
            )


def keep_for(stream: torch.cuda.Stream | None, tensors: Mapping[str, Tensor]) -> None:
    """Until the stream has read them nobody gets their memory, which is another stream's, whoever lets go of them."""
    if stream is not None:
        for tensor in tensors.values():
            tensor.record_stream(stream)


class Group(NamedTuple):
    """Layers of the target or the draft whose rows are one tensor of keys and one of values."""

    name: str  # of these tensors, before .k and .v
    kv: KvGroup
    num_rows: int  # that a request has there


def groups_of(target: KvPools, draft: Draft, num_rows: int) -> tuple[list[Group], list[Group]]:
    """Those of the target, where a request has so many rows, and of the draft, where it has one more."""
    of_draft = [
        Group(f"draft.{part}.{number}", group, num_rows + 1)
        for part, pools in enumerate(draft.pools)
        for number, group in enumerate(pools.groups)
    ]
    return [Group(f"target.{number}", group, num_rows) for number, group in enumerate(target.groups)], of_draft


def pool_of(state: EngineState, window: int | None) -> PagePool:
    """The pages of groups with this window of their own; None: of all others."""
    return state.pool if window is None else state.window_pools[window]


@torch.no_grad()
def packed_slot(executor: Executor, slot: int, num_rows: int) -> tuple[dict[str, Tensor], dict[str, int]]:
    """What a slot with so many rows of the target has: copies of its tensors, and the first rows of groups of layers
    that have given back earlier ones. Waits for the device."""
    state, draft = executor.state, executor.draft
    with torch.inference_mode():
        if draft.context.catches_up:
            draft.catch_up(torch.tensor([slot], dtype=torch.int32, device=state.seq_lens.device))
    tensors: dict[str, Tensor] = {}
    first_rows: dict[str, int] = {}
    of_target, of_draft = groups_of(executor.target.pools, draft, num_rows)
    for name, group, count in of_target + of_draft:
        pool = pool_of(state, group.window)
        page_size, begin = pool.page_size, int(pool.page_starts[slot])
        pages = pool.page_table[slot, begin : -(-count // page_size)].long()
        first_rows[name] = first = begin * page_size
        for part, kv in (("k", group.k), ("v", group.v)):
            tensors[f"{name}.{part}"] = kv[:, pages].flatten(1, 2)[:, : count - first].contiguous()
    kept = draft.save(slot).items()
    return tensors | {f"{OF_SLOT}{name}": tensor.clone() for name, tensor in kept}, first_rows


# --- what two engines must have in common


def layout_of(engine: Engine) -> dict[str, Any]:
    """What a request's tensors look like in this engine, as JSON has it."""

    def of_pools(pools: KvPools) -> list[Any]:
        return [
            [*group.shape, list(group.layers), str(group.k.dtype), [list(scales) for scales in group.scales]]
            for group in pools.groups
        ]

    kept = engine.draft.save(0)
    return {
        "model": engine.target.config.model_type,
        "kv": of_pools(engine.target.pools),
        "kv of the draft": [of_pools(pools) for pools in engine.draft.pools],
        "state of the draft": {name: [str(t.dtype), *t.shape] for name, t in sorted(kept.items())},
    }


@torch.no_grad()
def checksum(model: Any) -> str:
    """Of some numbers of each weight: models of one shape that were trained on are told apart."""
    parts = []
    for _, weight in sorted(weights_of(model).items()):
        flat = weight.detach().reshape(-1) if weight.is_contiguous() else weight.detach().t().reshape(-1)
        step = max(1, len(flat) // SAMPLED)
        parts.append(flat[::step][:SAMPLED].contiguous().view(torch.uint8))
    return hashlib.blake2b(torch.cat(parts).cpu().numpy().tobytes(), digest_size=8).hexdigest()


def check_values(values: Any, engine: Engine) -> None:
    """ValueError for a request that this engine cannot go on with exactly."""
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
    for name in sorted(asked ^ values["params"].keys()):
        what = "lacks {}, expected it" if name in asked else "has {}, expected none"
        raise ValueError(f"import_request: request {what.format(name)} among params")
    told = values["logprobs"]
    if told is not None and not (len(told) == len(values["tokens"]) and all(map(is_logprob, told))):
        raise ValueError("import_request: request has other logprobs than one and the best beside it for each token")
    ours = json.loads(json.dumps(layout_of(engine)))
    for key, own in ours.items():
        if (theirs := values["layout"].get(key)) != own:
            raise ValueError(f"import_request: request has {key} {theirs}, expected this engine's {own}")
    if values["weights"] != (own := engine.weights_checksum()):
        raise ValueError(f"import_request: request is of weights {values['weights']}, expected this engine's {own}")
    text, sizes = [*values["prompt"], *values["tokens"]], (engine.config.max_len, engine.target.config.vocab_size)
    check_tokens(text, "import_request: request", max_len=sizes[0], vocab_size=sizes[1], placeholders={})


def check_tensors(exported: ExportedRequest, engine: Engine) -> None:
    """ValueError for tensors that are not what the values say."""
    num_rows = len(exported.values["prompt"]) + len(exported.values["tokens"]) - 1
    vocab_size = engine.target.config.vocab_size
    expected: dict[str, tuple[list[int], torch.dtype]] = {}
    of_target, of_draft = groups_of(engine.target.pools, engine.draft, num_rows)
    for name, group, count in of_target + of_draft:
        window = engine.state.window if group.window is None else group.window
        first, most = exported.values["first_rows"].get(name, 0), 0 if window is None else max(count + 1 - window, 0)
        if not 0 <= first <= most:
            raise ValueError(f"import_request: request has rows of {name} from {first} on, expected 0 to {most}")
        rows = count - first
        for part, kv in (("k", group.k), ("v", group.v)):
            expected[f"{name}.{part}"] = [len(kv), rows, *kv.shape[3:]], kv.dtype
    for name, kept in engine.draft.save(0).items():
        expected[f"{OF_SLOT}{name}"] = list(kept.shape), kept.dtype
    for name, (shape, dtype) in expected.items():
        tensor = exported.tensors.get(name)
        if tensor is None:
            raise ValueError(f"import_request: request lacks {name}, expected a tensor of shape {shape}")
        if (list(tensor.shape), tensor.dtype) != (shape, dtype):
            got = f"shape {list(tensor.shape)} and {tensor.dtype}"
            raise ValueError(f"import_request: request has {name} of {got}, expected {shape} and {dtype}")
        if name.startswith(OF_SLOT) and name.endswith("_ids"):
            low, high = (int(bound) for bound in tensor.aminmax())
            if low < 0 or high >= vocab_size:
                raise ValueError(
                    f"import_request: request has {name} from {low} to {high}, expected 0 to {vocab_size - 1} "
                    "(the model's vocabulary)"
                )


# --- what is plain


def plain_values(request: BaseRequest) -> dict[str, Any]:
    """What a request that has left its engine is, apart from tensors."""
    output, params = request.output, request.params
    given = {field.name: getattr(params, field.name) for field in fields(params)}
    given |= {
        "n": 1,
        "stop_token_ids": list(request.stop_tokens),
        "stop": params.stop_strings,
        "logit_bias": None if params.logit_bias is None else [[key, bias] for key, bias in params.logit_bias.items()],
        "prediction": list(request.prediction) or None,
        "json_schema": params.constraint[1] if params.json_schema is not None else None,
    }
    logprobs = None if output.logprobs is None else [[each.logprob, each.top] for each in output.logprobs]
    return {
        "version": VERSION,
        "prompt": list(output.prompt_tokens),
        "tokens": list(output.tokens),
        "params": given,
        "logprobs": logprobs,
        "counts": [output.stats.rounds, output.stats.drafted, output.stats.accepted, output.cached_tokens],
        "index": output.index,
        "sample": output.sample,
    }


def params_of(values: Mapping[str, Any]) -> SamplingParams:
    given = dict(values["params"])
    if given["logit_bias"] is not None:
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"]}
    return SamplingParams(**given)


def is_logprob(value: Any) -> bool:
    """Whether it is a number, and pairs of a token and a number."""
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[0], float) and isinstance(value[1], list)):
        return False
    return all(isinstance(pair, list | tuple) and [type(each) for each in pair] == [int, float] for pair in value[1])


def logprobs_of(values: Mapping[str, Any]) -> list[TokenLogprob]:
    pairs = cast(list[Any], values["logprobs"] or [])
    return [TokenLogprob(own, [(int(token), logprob) for token, logprob in top]) for own, top in pairs]
