"""The general way: a model of transformers as it stands, with our paged tree attention behind its attention interface.

The module's own code computes everything but attention. It reads position ids and knows no cache; where it calls an
attention function, ours writes the keys and values to the layer's pages and attends over them. Which rows a layer sees
(all, a sliding window, a chunk) it says by the mask that it asks for: ours is a marker without a mask's size, and what
was asked for is learnt once, by a probe. Parts of ours stand in for what is theirs alike (`stand_ins`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils.generic import ModelOutput

from ...plans import HEAD_DIMS
from ..families import check_length
from ..kv_pools import KeyValueLayout, KvPools, LayerKv
from ..layers.head_layout import pool_dim
from ..layers.paged_batch import LastRows, PagedBatch
from ..layers.rope import constant_len
from ..options import ModelOptions
from ..shard import WHOLE
from ..weights.loading import config_of, load_causal_lm, place
from .base import HeldModel
from .module_swaps import EXPERTS, StandIns, is_rotation_of_halves, route_rotations
from .native import Prefilled, States

NAME = "specdec_paged_tree"  # of our attention, among transformers'
PROBED_TOKENS = 3

# What models pass to an attention function beside what ours takes that has no bearing on it.
NEUTRAL = (
    "position_ids",
    "cache_position",
    "position_embeddings",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
)


class Seen(NamedTuple):
    """Which rows of its path a row sees in a layer: all, the last `size`, or those of its own chunk of `size`."""

    kind: str  # "all", "window" or "chunk"
    size: int = 0


class Call(NamedTuple):
    """What is fixed about one attention call of a pass; calls come in the same order in each."""

    module: nn.Module
    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    seen: Seen
    is_rotated: bool  # what comes just before it is a rotation that `rope_qkv_write_kv` does as well

    @property
    def head_dim(self) -> int:
        """Of the pools: the next that our kernels have, or where there is none the longest row itself."""
        return pool_dim(max(self.k_dim, self.v_dim))

    @property
    def is_gathered(self) -> bool:
        """Whether our kernel cannot express it, and plain products over gathered KV do."""
        return self.seen.kind == "chunk" or self.head_dim not in HEAD_DIMS

    @property
    def kv_layout(self) -> KeyValueLayout:
        return KeyValueLayout(self.kv_heads, self.head_dim, self.head_dim, self.window)

    @property
    def window(self) -> int | None:
        return self.seen.size if self.seen.kind == "window" else None


class Refused(ValueError):
    """What this way cannot do; the message says what the model does, for an error that names the model."""


class Attends(Protocol):
    """What attention calls and masks go to while a module runs."""

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor: ...

    def mask(self, options: dict[str, Any]) -> Tensor: ...

    def rotate(
        self, own: Callable[..., Any], q: Tensor, k: Tensor, *arguments: Any, **named: Any
    ) -> tuple[Tensor, Tensor]: ...


_running: ContextVar[Attends] = ContextVar("specdec_paged_tree")


@contextmanager
def attending(attends: Attends) -> Iterator[None]:
    token = _running.set(attends)
    try:
        yield
    finally:
        _running.reset(token)


def attention_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """The attention function of transformers: [1, T, heads, D] of query [1, heads, T, D]."""
    return _running.get().attend(module, query, key, value, attention_mask, options), None


def mask_function(**options: Any) -> Tensor:
    return _running.get().mask(options)


def rotation_function(own: Callable[..., Any], q: Tensor, k: Tensor, *arguments: Any, **named: Any) -> Any:
    return _running.get().rotate(own, q, k, *arguments, **named)


AttentionInterface.register(NAME, attention_function)
AttentionMaskInterface.register(NAME, mask_function)


def seen_by(function: Callable[..., Tensor], size: int | None) -> Seen:
    """What a mask function of transformers lets a row see, by its values around multiples of the size."""
    size = size or 0
    edges = {0, 1, 2, 5, *(n * size + d for n in (1, 2, 3) for d in (-1, 0, 1))}
    places = torch.tensor(sorted(edge for edge in edges if edge >= 0))
    q, kv = places[:, None], places[None, :]
    zero = torch.zeros((), dtype=torch.long)
    try:
        given = function(zero, zero, q, kv).expand(len(places), len(places))
    except (IndexError, RuntimeError) as error:
        raise Refused("has an attention mask that depends on more than positions") from error
    causal = kv <= q
    kinds = {Seen("all"): causal}
    if size:
        kinds[Seen("window", size)] = causal & (kv > q - size)
        kinds[Seen("chunk", size)] = causal & (kv // size == q // size)
    for seen, expected in kinds.items():
        if torch.equal(given, expected):
            return seen
    if (given & ~causal).any():
        raise Refused("attends to tokens that come later")
    raise Refused("has an attention mask that is neither causal nor a sliding window nor chunks")


class Probe:
    """Learns what is fixed about the attention calls of a pass; what it attends to means nothing."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._seen: dict[int, Seen | Refused] = {}
        self._masks: list[Tensor] = []
        self._rotated: list[tuple[Tensor, Tensor] | None] = []  # since the last call; None: in a way of its own

    def rotate(
        self, own: Callable[..., Any], q: Tensor, k: Tensor, *arguments: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = own(q, k, *arguments, **named)
        self._rotated.append(out if is_rotation_of_halves(q, k, out, arguments, named) else None)
        return out

    def mask(self, options: dict[str, Any]) -> Tensor:
        marker = marker_like(options["device"], options["dtype"])
        self._masks.append(marker)  # whose storage stays its own
        try:
            seen: Seen | Refused = seen_by(options["mask_function"], options.get("local_size"))
        except Refused as refused:  # by a layer that uses it: some models make masks of windows that none has
            seen = refused
        self._seen[marker.untyped_storage().data_ptr()] = seen
        return marker

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        kind = type(module).__name__
        if k.shape[2] != q.shape[2] or k.shape[0] != q.shape[0]:
            raise Refused(f"attends to other rows than its own tokens' ({kind})")
        for name, value in options.items():
            if isinstance(value, Tensor) and name not in (*NEUTRAL, "s_aux"):
                raise Refused(f"gives its attention {name}, which ours does not know ({kind})")
        if mask is None:
            size = options.get("sliding_window")
            seen = Seen("window", size) if size else Seen("all")
        elif (found := self._seen.get(mask.untyped_storage().data_ptr())) is None:
            raise Refused(f"makes attention masks of its own ({kind})")
        elif isinstance(found, Refused):
            raise found
        else:
            seen = found
        # Nothing happens to the rotated ones in between.
        is_rotated = [out is not None and out[0] is q and out[1] is k for out in self._rotated] == [True]
        self._rotated.clear()
        call = Call(module, q.shape[1], k.shape[1], k.shape[3], v.shape[3], seen, False)
        fits = not call.is_gathered and call.k_dim == call.v_dim == call.head_dim
        self.calls.append(call._replace(is_rotated=is_rotated and fits))
        return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def marker_like(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Stands for a mask: nothing reads it."""
    return torch.zeros(1, 1, 1, 1, device=device, dtype=dtype)


class Pass:
    """One pass over rows [B, Q], or packed ones [M], of the model's pools."""

    def __init__(
        self, calls: Sequence[Call], kv: Sequence[LayerKv], marker: Tensor, shape: torch.Size, rows: PagedBatch
    ):
        self._calls, self._kv, self._marker, self._shape, self._rows = calls, kv, marker, shape, rows
        self._next = 0
        self._angles: tuple[Tensor, Tensor] | None = None  # cosines and sines, as they were given
        self._table, self._places = marker, marker  # of these: what `rope_qkv_write_kv` reads, and where

    def mask(self, options: dict[str, Any]) -> Tensor:
        return self._marker

    def rotate(
        self, own: Callable[..., Any], q: Tensor, k: Tensor, *arguments: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        if self._next == len(self._calls) or not self._calls[self._next].is_rotated:
            out: tuple[Tensor, Tensor] = own(q, k, *arguments, **named)
            return out
        cosines, sines = arguments
        if self._angles is None or self._angles[0] is not cosines or self._angles[1] is not sines:
            self._angles, half = (cosines, sines), q.shape[-1] // 2
            self._table = torch.cat([cosines[0, :, :half], sines[0, :, :half]], -1).float()
            self._places = torch.arange(len(self._table), dtype=torch.int32, device=q.device).view(self._shape)
        return q, k  # which `rope_qkv_write_kv` will rotate

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        call, kv = self._calls[self._next], self._kv[self._next]
        assert module is call.module
        self._next += 1
        rows = self._rows
        scale = options.get("scaling") or k.shape[3] ** -0.5
        sink, soft_cap = options.get("s_aux"), options.get("softcap")

        queries = (
            self._rotated_and_written(q, k, v, kv) if call.is_rotated else self._written(q, k, v, kv, call.head_dim)
        )
        if call.is_gathered:
            out = gathered_attention(queries, call.seen, kv, rows, scale, soft_cap, sink)
        else:
            sinks = None if sink is None else sink.float()
            out = rows.attend(queries, kv, scale=scale, window=call.window, soft_cap=soft_cap, sinks=sinks)
        return out.flatten(0, -3)[None, ..., : call.v_dim].to(q.dtype).contiguous()

    def _rotated_and_written(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKv) -> Tensor:
        """The queries [*shape, heads, head_dim], rotated, of q [1, heads, T, D]; the others' rows are in the pool."""
        qkv = torch.cat([x[0].transpose(0, 1) for x in (q, k, v)], 1).to(self._marker.dtype)
        return self._rows.rope_and_write(qkv.view(*self._shape, *qkv.shape[1:]), self._table, self._places, kv)

    def _written(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKv, head_dim: int) -> Tensor:
        """The queries [*shape, heads, head_dim] of q [1, heads, T, D]; the others' rows are in the pool."""

        def laid_out(x: Tensor) -> Tensor:
            """[*shape, heads, head_dim] of x [1, heads, T, D]."""
            x = x[0].transpose(0, 1).to(self._marker.dtype)
            if x.shape[2] < head_dim:  # to pad by nothing would be a copy
                x = functional.pad(x, (0, head_dim - x.shape[2]))
            return x.reshape(*self._shape, *x.shape[1:])

        self._rows.write(kv, laid_out(k), laid_out(v))
        return laid_out(q)


def gathered_attention(
    q: Tensor, seen: Seen, kv: LayerKv, rows: PagedBatch, scale: float, soft_cap: float | None, sink: Tensor | None
) -> Tensor:
    """What `tree_attention` computes of q [B, Q, heads, D] or [M, heads, D], and chunks, by plain products over the KV
    of one request after the other, gathered from its pages. Rows that count for nobody are finite.
    """
    ends = rows.cu_seqlens_q
    if ends is None:
        assert rows.tail_len is not None
        tails = torch.full_like(rows.slots, rows.tail_len)
        return gathered_rows(q, tails, rows.mask, seen, kv, rows, scale, soft_cap, sink)
    # As [B, Q], where Q is what any request may have; rows that are not its own are left out again.
    tails = ends[1:] - ends[:-1]
    most = len(q) if q.is_cuda else int(tails.max())  # where reading lengths is no wait
    places = (ends[:-1, None] + torch.arange(most, device=q.device)).clamp(0, len(q) - 1)
    mask = None if rows.mask is None else rows.mask[places]
    out = gathered_rows(q[places], tails, mask, seen, kv, rows, scale, soft_cap, sink)
    at = torch.arange(len(q), device=q.device)
    request = torch.searchsorted(ends[1:].contiguous(), at.to(ends.dtype), right=True).clamp(max=len(tails) - 1)
    return out[request, (at - ends[request]).clamp(0, most - 1)]


def gathered_rows(
    q: Tensor,
    tails: Tensor,
    mask: Tensor | None,
    seen: Seen,
    kv: LayerKv,
    rows: PagedBatch,
    scale: float,
    soft_cap: float | None,
    sink: Tensor | None,
) -> Tensor:
    """[B, Q, heads, D] of q [B, Q, heads, D], of which request b sees tails[b] rows behind its prefix."""
    batch, length, heads, _ = q.shape
    num_pages, page_size = kv.pools[0].shape[:2]
    table = rows.table_of(kv)
    capacity = table.shape[1] * page_size
    width = min(capacity, rows.max_kv_len or capacity)
    if not q.is_cuda:
        width = min(width, max(1, int(rows.prefix_lens.max()) + int(tails.max())))
    at = torch.arange(width, device=q.device)
    slots = rows.slots.long().clamp(0, len(rows.prefix_lens) - 1)
    outs = []
    for b in range(batch):
        prefix = rows.prefix_lens[slots[b]].long()
        pages = table[slots[b], : -(-width // page_size)].long().clamp(0, num_pages - 1)
        k, v = (
            (pool[pages].flatten(0, 1)[:width].to(q.dtype) * number).repeat_interleave(heads // pool.shape[2], 1)
            for pool, number in zip(kv.pools, kv.scales, strict=True)
        )
        node = at - prefix
        if mask is None:
            before = 0 if rows.cu_seqlens_q is not None else tails[b] - length
            on_path = node <= torch.arange(length, device=q.device)[:, None] + before
        else:
            words = mask[b][:, node.clamp(0, 64 * mask.shape[2] - 1) // 64]
            on_path = (words >> (node.clamp(min=0) % 64) & 1).bool()
        visible = (node < 0) | (on_path & (node < tails[b]))
        # A path's rows rise along it: a row's position is the number of visible ones before it.
        place = visible.cumsum(1) - 1
        last = place[:, -1:]
        if seen.kind == "window":
            visible = visible & (place > last - seen.size)
        elif seen.kind == "chunk":
            visible = visible & (place // seen.size == last // seen.size)
        # A row that nobody wrote may hold anything.
        used = visible.any(0)[:, None, None]
        k, v = k.where(used, 0), v.where(used, 0)
        scores = torch.einsum("qhd,khd->hqk", q[b], k).float() * scale
        if soft_cap is not None:
            scores = soft_cap * (scores / soft_cap).tanh()
        scores = scores.masked_fill(~visible, -torch.inf)
        if sink is not None:
            scores = torch.cat([scores, sink.float()[:, None, None].expand(-1, length, 1)], 2)
        shares = scores.softmax(2)[:, :, :width].nan_to_num(0).to(q.dtype)
        outs.append(torch.einsum("hqk,khd->qhd", shares, v))
    return torch.stack(outs)


class Given(nn.Module):
    """Stands where a model has its body, for the sake of what comes behind: its output is the states it was given."""

    def __init__(self, output: type[ModelOutput]) -> None:
        super().__init__()
        self.output = output
        self.hidden: Tensor | None = None

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.output(last_hidden_state=self.hidden)


class TransformersLM(HeldModel):
    """A causal language model of transformers over paged KV; what it offers is what `CausalLM` does.

    Its modules are copies that share all parameters and buffers with the model's own, which stays as it is.

    Args:
        model, options: as for `CausalLM`.

    Attributes:
        calls: the attention calls of a pass.
        stand_ins: how many modules of each kind ours stand in for.

    Raises:
        ValueError: a model whose attention does not go through transformers' interface, or that carries more from token
            to token than keys and values; one whose logits are not those of its own forward pass; what
            `models.loading` refuses.
    """

    def __init__(self, model: str | Path | nn.Module, options: ModelOptions) -> None:
        from .self_check import check_against_itself

        name, dtype, device = options.name, options.dtype, options.device
        if options.shard != WHOLE:
            raise ValueError(f"{name}: shard is {options.shard}, expected {WHOLE} with implementation='transformers'")
        self._config = config_of(model, name)
        check_length(self._config, options.max_len, name)
        self.model = load_causal_lm(model, dtype, name, adapter=options.adapter, any_module=True)
        place(self.model, dtype, device)
        self.max_len, self.dtype, self.device = options.max_len, dtype, device
        self.feature_layers = tuple(options.feature_layers)
        self._kept: dict[int, Tensor] = {}
        self._marker = marker_like(device, dtype)
        try:
            self._open_modules(options.max_len)
            if self.feature_layers:
                self._keep_features()
        except Refused as refused:
            raise ValueError(
                f"{name}: {type(self.model).__name__} {refused}, expected a decoder with causal attention "
                "through transformers' attention interface"
            ) from refused
        shapes = [call.kv_layout for call in self.calls]
        self._hold(KvPools.allocate(shapes, 16 + -(-64 // options.page_size), options.page_size, dtype, device))
        check_against_itself(self, name)
        self._make_pools(model, shapes, options)

    @torch.inference_mode()
    def _open_modules(self, max_len: int) -> None:
        """The body, which makes hidden states, and what comes behind it, learnt from one pass."""
        whole = shared_copy(self.model)
        whole.set_attn_implementation(NAME)
        whole.set_experts_implementation(EXPERTS)
        route_rotations(whole, rotation_function)
        check_serial_state(whole, self._config)
        freeze_rotations(whole, self._config, max_len)
        outputs: dict[str, Any] = {}
        widths: dict[nn.Module, int] = {}

        def note(path: str, module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            outputs[path] = output
            if given and isinstance(given[0], Tensor) and given[0].is_floating_point():
                widths[module] = given[0].shape[-1]

        hooks = [module.register_forward_hook(partial(note, path)) for path, module in whole.named_modules() if path]
        probe = Probe()
        tokens = torch.zeros(1, PROBED_TOKENS, dtype=torch.long, device=self.device)
        arguments = self._arguments(tokens, torch.arange(PROBED_TOKENS, device=self.device)[None])
        try:
            with attending(probe):
                whole(**accepted(whole, arguments))
        except Refused:
            raise
        except Exception as error:
            said = str(error).partition("\n")[0]
            raise Refused(f"does not run with another attention ({type(error).__name__}: {said})") from error
        finally:
            for hook in hooks:
                hook.remove()
        if not probe.calls:
            raise Refused("does not use the attention interface")
        self.calls = probe.calls
        check_convolutions(whole, self.calls)
        attended = {path for path, module in whole.named_modules() for call in self.calls if module is call.module}
        bodies = [
            path
            for path, output in outputs.items()
            if getattr(output, "last_hidden_state", None) is not None
            and all(each.startswith(path + ".") for each in attended)
        ]
        if not bodies:
            raise Refused("has no body with hidden states")
        path = min(bodies, key=len)
        self._body = whole.get_submodule(path)
        self.hidden_size: int = outputs[path].last_hidden_state.shape[-1]  # its layers' own may be another
        self._parts = StandIns(whole, widths)
        self.stand_ins = self._parts.counts
        if rotated := sum(call.is_rotated for call in self.calls):
            self.stand_ins["rotations"] = rotated
        if "position_ids" not in accepted(self._body, arguments):
            raise Refused("takes no position_ids")
        self._behind = copy.copy(whole)
        # Only the modules on the way to the body are other ones: what is behind it is shared.
        parent, parts = self._behind, path.split(".")
        for part in parts[:-1]:
            parent._modules = dict(parent._modules)
            child = copy.copy(parent._modules[part])
            parent._modules[part] = child
            parent = child
        parent._modules = dict(parent._modules)
        self._given = Given(type(outputs[path]))
        parent._modules[parts[-1]] = self._given

    def _arguments(self, tokens: Tensor, positions: Tensor) -> dict[str, Any]:
        # With a mask of ones nothing looks for packed sequences in the positions, which would wait for the device.
        ones = torch.ones_like(tokens)
        return {"input_ids": tokens, "attention_mask": ones, "position_ids": positions, "use_cache": False}

    def _keep_features(self) -> None:
        """Hooks that keep the states entering the feature layers while a pass runs."""
        layers = self._layers()
        count = len(layers)

        def keep(index: int) -> Callable[..., None]:
            def entering(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
                self._kept[index] = arguments[0] if arguments else named["hidden_states"]

            return entering

        def leaving(_: nn.Module, __: Any, output: Any) -> None:
            self._kept[count] = output if isinstance(output, Tensor) else output[0]

        for index in set(self.feature_layers):
            if index < count:
                layers[index].register_forward_pre_hook(keep(index), with_kwargs=True)
            else:
                layers[-1].register_forward_hook(leaving)

    def _layers(self) -> nn.ModuleList:
        """The list of the model's layers, each of which has one of the attention modules."""
        modules = [call.module for call in self.calls]
        for _, module in self._body.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == self._config.num_hidden_layers:
                within = [set(layer.modules()) for layer in module]
                if all(any(each in of for of in within) for each in modules):
                    return module
        raise Refused("has no list of layers for feature_layers")

    def _hold(self, pools: KvPools) -> None:
        super()._hold(pools)
        self._kv = pools.layers

    @torch.inference_mode()
    def refresh(self) -> None:
        self._parts.refresh()

    def _drop_parts(self) -> None:
        super()._drop_parts()
        self._parts.drop()

    def _make_parts(self) -> None:
        self._parts.make()

    def forward(self, tokens: Tensor, positions: Tensor, rows: PagedBatch) -> States:
        """A pass over tokens [B, Q], or packed ones [M], at positions of that shape, as one sequence of all rows."""
        # Tables of positions end at the longest text. Rows behind it, of deep nodes and padding, give no token.
        places = positions.reshape(1, -1).long().clamp(0, self.max_len - 1)
        arguments = accepted(self._body, self._arguments(tokens.reshape(1, -1).long(), places))
        running = Pass(self.calls, self._kv, self._marker, tokens.shape, rows)
        with attending(running):
            hidden = self._body(**arguments).last_hidden_state
        features = None
        if self.feature_layers:
            kept = [self._kept[layer] for layer in self.feature_layers]
            self._kept.clear()
            features = torch.cat(kept, -1).view(*tokens.shape, -1)
        return States(hidden.view(*tokens.shape, -1), features)

    def prefill(self, tokens: Tensor, positions: Tensor, rows: PagedBatch, last: LastRows | None = None) -> Prefilled:
        """`forward` for the sake of the rows' KV, of the features and of the hidden states of the last rows."""
        hidden, features = self.forward(tokens, positions, rows)
        return Prefilled(None if last is None else hidden.flatten(0, -2)[last.indices], features)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] from hidden states [..., H], with all that the model does to its logits."""
        self._given.hidden = hidden.reshape(1, -1, hidden.shape[-1])
        tokens = torch.zeros(self._given.hidden.shape[:2], dtype=torch.long, device=hidden.device)
        try:
            out: Tensor = self._behind(**accepted(self._behind, {"input_ids": tokens, "use_cache": False})).logits
        finally:
            self._given.hidden = None
        return out.view(*hidden.shape[:-1], -1).to(hidden.dtype)


def accepted(module: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that the module's forward pass takes by name."""
    parameters = inspect.signature(module.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def shared_copy(model: nn.Module) -> Any:
    """The model's modules and config once more, ready to infer, over the same parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    with torch.inference_mode(False):
        return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}).eval()


def check_serial_state(model: nn.Module, config: Any) -> None:
    """Refused for layers that carry a state from token to token, which a tree of tokens would need once for each path.

    What this does not know by name is found when the logits are compared.
    """
    if any(path.endswith(".encoder_attn") for path, _ in model.named_modules()):
        raise Refused("attends to an encoder")
    serial = ("mamba", "linear", "conv", "recurrent", "delta")
    for kind in dict.fromkeys(getattr(config, "layer_types", None) or ()):
        if any(word in kind for word in serial):
            raise Refused(f"has layers of {kind}, whose state goes from token to token")


def check_convolutions(model: nn.Module, calls: Sequence[Call]) -> None:
    """Refused for layers with convolutions over tokens beside the attention of these calls."""
    attends = {call.module for call in calls}
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList) and not attends.isdisjoint(layers.modules()):
            for module in layers.modules():
                if isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1 and module.groups > 1:
                    raise Refused("has convolutions over tokens, whose state goes from token to token")


def freeze_rotations(model: nn.Module, config: Any, max_len: int) -> None:
    """Refused for rotations that change with the length of the text up to `max_len`; below, they are plain ones.

    They are made so in these copies, since to look for the longest position waits for the device in every layer.
    """
    limit = constant_len(config)
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        of_layers: dict[str, Any] = types if isinstance(types, dict) else {"": types}  # of types of layers
        changing = [kind for kind in of_layers.values() if kind in ("dynamic", "longrope")]
        if not changing:
            continue
        if limit is not None and max_len > limit:
            raise Refused(
                f"has rotations of rope_type {changing[0]!r} that change behind {limit} tokens (max_len is {max_len})"
            )
        frozen = {layers: "default" if kind in changing else kind for layers, kind in of_layers.items()}
        setattr(module, "rope_type", frozen if isinstance(types, dict) else "default")  # noqa: B010
