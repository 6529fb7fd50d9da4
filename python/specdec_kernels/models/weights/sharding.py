"""Dividing a module among ranks: which part of each tensor a rank keeps, and what makes partial outputs whole.

Families say how their modules are divided where the plan in a config, or the names that all families share, do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..cache_division import CacheDivision
from ..layers.moe import QuantizedExperts
from ..layers.quantized import QuantizedLinear, QuantizedWeight
from ..layers.reduction import Columns, Reduction
from ..shard import Shard, query_heads

DIVISION = "specdec_division"  # attribute of a divided model

# Styles of modules and parameters by the ends of their paths, for names that mean the same in all families.
COMMON = {
    "q_proj": "heads", "k_proj": "kv_heads", "v_proj": "kv_heads", "o_proj": "rowwise",
    "q_b_proj": "heads", "kv_b_proj": "heads", "self_attn.gate_proj": "heads", "sinks": "heads",
    "gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise",
    "gate_up_proj": "halves", "input_linear": "halves", "output_linear": "rowwise",
    "experts": "experts",
    "q_norm": "norm", "k_norm": "kv_norm",
}  # fmt: skip

# Names in transformers' plans of linears that are divided in the same way.
ALIASES = {"colwise_gather_output": "colwise", "rowwise_split_input": "rowwise"}


class Cut(NamedTuple):
    """The part of a tensor that a rank keeps: ranges of a dimension, next to each other."""

    dim: int
    ranges: tuple[range, ...]
    is_zero: bool = False  # a bias that another rank adds

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return a copy of the part."""
        if self.is_zero:
            return torch.zeros_like(tensor)
        parts = [tensor.narrow(self.dim, part.start, len(part)) for part in self.ranges]
        return parts[0].clone(memory_format=torch.contiguous_format) if len(parts) == 1 else torch.cat(parts, self.dim)

    def of_quantized(self, weight: QuantizedWeight) -> QuantizedWeight:
        """Return a copy of the part of a quantized weight.

        Raises:
            ValueError: a boundary cuts a group of elements with one scale.
        """
        if self.dim:
            return weight.slice_columns(self.ranges[0])
        rows = [row for part in self.ranges for row in part]
        return weight.pick_rows(torch.tensor(rows, device=weight.device))

    def local(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return where whole indices of the dimension are in the part (0 for others), and which of them are there."""
        local, begin = torch.full_like(indices, -1), 0
        for own in () if self.is_zero else self.ranges:
            local = torch.where((indices >= own.start) & (indices < own.stop), indices - own.start + begin, local)
            begin += len(own)
        return local.clamp(min=0), local >= 0


class Kept(NamedTuple):
    """The part of a tensor that a rank keeps."""

    cut: Cut
    shape: tuple[int, ...]  # of the whole


def prefix_of(model: Any) -> str:
    """Return what the names of a model's tensors begin with, before their paths in its decoder."""
    decoder = model.get_decoder()
    return next(f"{path}." if path else "" for path, module in model.named_modules() if module is decoder)


class Division:
    """The division of a module by one rank.

    Args:
        config: of the whole model.
        styles: of the family, by pattern; see `Family.division`.
        shard: the rank's.
        reduction: makes partial outputs whole.
        name: of the model in errors.

    Attributes:
        kept: what this rank keeps of divided parameters, of quantized linears (by their paths, as [out, in]) and of
            the buffers of quantized experts.
        tied_head: the name of the LM head's weight, if it is a view of rows of the embedding.
    """

    def __init__(
        self, config: Any, styles: Mapping[str, Any], shard: Shard, reduction: Reduction, name: str = "model"
    ) -> None:
        self.config, self.shard, self.reduction, self.name = config, shard, reduction, name
        self.kept: dict[str, Kept] = {}
        self.tied_head: str | None = None
        self._norms = set[str]()  # paths of norms whose rows are divided
        self._divided = set[str]()  # paths of quantized modules that are divided
        self._conv = next((parts for path, parts in styles.items() if path.endswith(".conv1d")), ())
        plan = getattr(config, "base_model_tp_plan", None) or {}
        self._styles = [(pattern_of(path, ends=True), style) for path, style in {**COMMON, **styles}.items()][::-1]
        self._styles += [(pattern_of(path, ends=False), ALIASES.get(style, style)) for path, style in plan.items()]

    @property
    def caches(self) -> CacheDivision:
        """Return how ranks divide what the model keeps of a sequence."""
        heads = getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        return CacheDivision(self.shard, self.reduction, heads, self._conv)

    def divide(self, model: Any) -> None:
        """Keep this rank's part of each tensor of a module's decoder, in place, and of an LM head of its own."""
        cuts = self.cuts(model)
        with torch.no_grad():
            for name, cut in cuts.items():
                tensor = model.get_parameter(name)
                tensor.data = cut(tensor.data)
        self.divide_quantized(model)
        self.attach(model)

    def divide_quantized(self, model: Any) -> None:
        """Keep this rank's part of the quantized linears and experts that have been loaded since the last call."""
        prefix = prefix_of(model)
        for path, module, style in self._styled(model.get_decoder()):
            is_quantized = isinstance(module, QuantizedLinear | QuantizedExperts)
            if is_quantized and path not in self._divided and any(True for _ in module.buffers(recurse=False)):
                self._divide_quantized(f"{prefix}{path}", path, module, style)
                self._divided.add(path)

    def cuts(self, model: Any) -> dict[str, Cut]:
        """Return the cuts of a module's parameters, by name.

        Raises:
            ValueError: a module that cannot be divided, by name.
        """
        decoder, cuts, prefix = model.get_decoder(), dict[str, Cut](), prefix_of(model)
        for path, module, style in self._styled(decoder):
            if self._divides_rows(path, module, style):
                self._norms.add(path)
            for leaf, parameter in module.named_parameters(recurse=False):
                if cut := self._cut(f"{self.name}: {path}", style, leaf, parameter):
                    cuts[f"{prefix}{path}.{leaf}"] = cut
        for path, parameter in decoder.named_parameters():
            style = None if ".experts." in path else self._style(path)
            if style is not None and (cut := self._cut(f"{self.name}: {path}", style, "", parameter)):
                cuts[f"{prefix}{path}"] = cut
        head = model.get_output_embeddings()
        if head.weight is not model.get_input_embeddings().weight:
            path = next(path for path, module in model.named_modules() if module is head)
            cuts |= {f"{path}.{leaf}": Cut(0, (self._vocabulary(len(t)),)) for leaf, t in head.named_parameters()}
        self.kept |= {name: Kept(cut, tuple(model.get_parameter(name).shape)) for name, cut in cuts.items()}
        return cuts

    def attach(self, model: Any) -> None:
        """Give modules with partial outputs their reductions, and linears their sizes."""
        setattr(model, DIVISION, self)
        for path, module, style in self._styled(model.get_decoder()):
            if style in ("experts", "rowwise"):
                module.reduction = self.reduction
            if style == "rowwise" and self.shard.rank:
                module.bias = None
            if path in self._norms:
                module.reduction = self.reduction
            if isinstance(module, nn.Linear | QuantizedLinear):
                module.out_features, module.in_features = module.weight.shape
            elif style == "experts":
                self._expect_known_experts(path, module)

    def divide_tied_head(self, model: Any) -> None:
        """Let an LM head whose weight is the embedding's have a view of this rank's rows."""
        head = model.get_output_embeddings()
        vocab = len(model.get_input_embeddings().weight)
        if len(head.weight) == vocab and head.weight is model.get_input_embeddings().weight:
            cut = Cut(0, (self._vocabulary(vocab),))
            path = next(path for path, module in model.named_modules() if module is head)
            self.tied_head = f"{path}.weight"
            self.kept[self.tied_head] = Kept(cut, tuple(head.weight.shape))
            head.weight = nn.Parameter(head.weight.data, head.weight.requires_grad)
            self.tie_head(model)
            if head.bias is not None:
                self.kept[f"{path}.bias"] = Kept(cut, tuple(head.bias.shape))
                head.bias = nn.Parameter(cut(head.bias.data), head.bias.requires_grad)
        head.reduction = Columns(self.reduction, self._vocabulary(vocab), vocab)

    def tie_head(self, model: Any) -> None:
        """Let the weight of a tied LM head be a view of the embedding's rows, after that has got other memory."""
        if self.tied_head is not None:
            rows, table = self.kept[self.tied_head].cut.ranges[0], model.get_input_embeddings().weight.data
            model.get_output_embeddings().weight.data = table[rows.start : rows.stop]

    def untie_head(self, model: Any) -> None:
        """Let the weight of a tied LM head hold no memory of the embedding's, until `tie_head`."""
        if self.tied_head is not None:
            weight = model.get_output_embeddings().weight
            weight.data = weight.data.new_empty(1).expand(weight.shape)

    def of_expert(self, path: str, part: str) -> Kept | None:
        """Return what this rank keeps of an expert's "gate", "up" or "down" [out, in]; None: all.

        Args:
            path: of the module of all experts, which keeps them as [experts, out, in].
            part: of the expert.
        """
        down = self.kept.get(f"{path}.down") or self.kept.get(f"{path}.down_proj")
        if down is None:
            return None
        _, hidden, inner = down.shape
        is_down = part == "down"
        return Kept(Cut(int(is_down), down.cut.ranges), (hidden, inner) if is_down else (inner, hidden))

    def _divide_quantized(self, name: str, path: str, module: Any, style: Any) -> None:
        """Keep this rank's part of a quantized linear or of quantized experts, called `name` in the model.

        Raises:
            ValueError: a boundary cuts a group of elements with one scale.
        """
        what = f"{self.name}: {path}"
        try:
            if isinstance(module, QuantizedExperts):
                shapes = {leaf: tuple(buffer.shape) for leaf, buffer in module.named_buffers(recurse=False)}
                divided = module.divide(self._even(shapes["down"][2], f"{what}.intermediate_size"))
                for leaf, (dim, ranges) in divided.items():
                    self.kept[f"{name}.{leaf}"] = Kept(Cut(dim, ranges), shapes[leaf])
            elif isinstance(module, QuantizedLinear):
                weight = module.weight
                like = torch.empty(weight.shape, device="meta")
                cut = self._cut(what, style, "weight", like)
                if cut is not None:
                    self.kept[name] = Kept(cut, weight.shape)
                    module.store(cut.of_quantized(weight))
        except ValueError as error:
            raise error if str(error).startswith(what) else ValueError(f"{what}: {error}") from None

    def _vocabulary(self, count: int) -> range:
        rows = -(-count // self.shard.size)
        if (self.shard.size - 1) * rows >= count:
            raise ValueError(f"{self.name}: vocab_size is {count}, expected some for each of {self.shard.size} ranks")
        return range(self.shard.rank * rows, min((self.shard.rank + 1) * rows, count))

    def _style(self, path: str) -> Any:
        return next((style for pattern, style in self._styles if pattern.fullmatch(path)), None)

    def _styled(self, decoder: Any) -> Iterator[tuple[str, Any, Any]]:
        for path, module in decoder.named_modules():
            style = self._style(path)
            if style is not None and not (isinstance(style, str) and style.startswith(WHOLE_STYLES)):
                yield path, module, style

    def _cut(self, what: str, style: Any, leaf: str, tensor: Tensor) -> Cut | None:
        """Return the cut of a module's parameter `leaf`, or of one with a style of its own; None: it stays whole."""
        if not isinstance(style, str):  # parts of rows: (heads, elements of each)
            return Cut(0, self._parts(what, style, tensor.shape[0]))
        if style == "experts":
            return self._experts_cut(what, leaf, tensor)
        if style in ("norm", "kv_norm"):
            if not self._is_norm_of_heads(style, tensor):
                return None
            style = "heads" if style == "norm" else "kv_heads"
        if style in ("heads", "kv_heads"):
            counts = self._heads(style)
            if len(counts) > 1:  # each can be divided, or `Shard.config` has raised
                return Cut(0, (self._even(tensor.shape[0], f"{what}: heads"),))
            [count] = counts
            return Cut(0, self._parts(what, [(count, tensor.shape[0] // count)], tensor.shape[0]))
        if style == "colwise" or style.startswith(GROUPS):
            dim = next((dim for dim, size in enumerate(tensor.shape) if size > 1), 0)
            return Cut(dim, (self._even(tensor.shape[dim], f"{what}.out_features"),))
        if style == "halves":
            half = tensor.shape[0] // 2
            own = self._even(half, f"{what}.out_features / 2")
            return Cut(0, (own, range(own.start + half, own.stop + half)))
        if style == "rowwise":
            return Cut(1, (self._even(tensor.shape[1], f"{what}.in_features"),)) if leaf == "weight" else None
        if style.startswith(WHOLE_STYLES):
            return None
        raise ValueError(f"{what} is divided by {style!r}, expected colwise, rowwise or a style of the family's")

    def _experts_cut(self, what: str, leaf: str, tensor: Tensor) -> Cut | None:
        """Return the cut of all experts' weights [experts, out, in] or, of gpt-oss, [experts, in, out]."""
        transposed = self.config.model_type == "gpt_oss"
        if leaf == "down_proj_bias":
            return Cut(0, (), is_zero=True) if self.shard.rank else None
        if leaf in ("down_proj", "up_proj"):
            dim = 2 if (leaf == "down_proj") is not transposed else 1
            return Cut(dim, (self._even(tensor.shape[dim], f"{what}.intermediate_size"),))
        if leaf == "gate_up_proj_bias" or (transposed and leaf == "gate_up_proj"):
            # A gate and its up are neighbors.
            own = self._even(tensor.shape[-1] // 2, f"{what}.intermediate_size")
            return Cut(tensor.dim() - 1, (range(2 * own.start, 2 * own.stop),))
        if leaf == "gate_up_proj":
            half = tensor.shape[1] // 2
            own = self._even(half, f"{what}.intermediate_size")
            return Cut(1, (own, range(own.start + half, own.stop + half)))
        raise ValueError(f"{what} has {leaf}, expected gate_up_proj or up_proj, down_proj and their biases alone")

    def _expect_known_experts(self, path: str, module: Any) -> None:
        if not isinstance(module, QuantizedExperts) and not hasattr(module, "down_proj"):
            kind = type(module).__name__
            raise ValueError(f"{self.name}: {path} is a {kind}, expected all experts' weights in one parameter")

    def _is_norm_of_heads(self, style: str, weight: Tensor) -> bool:
        """Return whether a norm has an element for each of a row's heads, and not for those of one head alone."""
        config = self.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // query_heads(config)[0]
        counts = self._heads("heads" if style == "norm" else "kv_heads")
        return any(count > 1 and (weight.dim() == 2 or len(weight) == count * dim) for count in counts)

    def _heads(self, style: str) -> set[int]:
        """Return how many heads a layer has, of queries ("heads") or of keys ("kv_heads"), for all layers."""
        kv_heads = getattr(self.config, "num_key_value_heads", None)
        return {kv_heads} if style == "kv_heads" and kv_heads else set(query_heads(self.config))

    def _divides_rows(self, path: str, module: Any, style: Any) -> bool:
        """Return whether ranks divide the rows that a norm normalizes, so that mean squares are averaged.

        Raises:
            ValueError: some ranks divide a group of heads, and others do not.
        """
        if style in ("norm", "kv_norm"):
            weight: Tensor = module.weight
            return weight.dim() == 1 and self._is_norm_of_heads(style, weight)
        if not isinstance(style, str) or not style.startswith(GROUPS):
            return False
        has_groups = hasattr(module, "group_size") or hasattr(module, "n_groups")
        groups = int(style.removeprefix(GROUPS)) if has_groups else 1
        if groups > 1:
            self.shard.share(groups, f"{self.name}: {path}: groups")
        return groups == 1

    def _parts(self, what: str, parts: Any, total: int) -> tuple[range, ...]:
        """Return the ranges of this rank's heads, for parts of (heads, elements of each) next to each other."""
        if (expected := sum(count * size for count, size in parts)) != total:
            raise ValueError(f"{what} has {total} rows, expected {expected} by the heads of the config")
        return self.shard.ranges(parts, f"{what}: heads")

    def _even(self, count: int, what: str) -> range:
        own = self.shard.share(count, what)
        return range(self.shard.rank * own, (self.shard.rank + 1) * own)


GROUPS = "norm_of_groups:"  # a style, with the number of groups of heads
WHOLE_STYLES = ("replicated", "embedding", "mla_kv_a_proj", "moe_tp_experts", "packed_colwise")


def pattern_of(path: str, ends: bool) -> re.Pattern[str]:
    """Return the pattern of a path in which * is a layer's number, or, if it `ends` paths, of what ends so."""
    escaped = re.escape(path).replace(r"\*", r"\d+")
    return re.compile(rf"(?:.*\.)?{escaped}" if ends else escaped)
