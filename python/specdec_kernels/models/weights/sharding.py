"""Dividing a module among ranks: which part of each tensor a rank keeps, and what makes partial outputs whole.

Families say how their modules are divided where the plan in a config, or the names that all families share, do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layers.moe import QuantizedExperts
from ..layers.quantized import QuantizedLinear
from ..layers.reduction import Columns, Reduction
from ..shard import Shard

IS_DIVIDED = "specdec_divided"  # attribute of a divided model

# Styles of modules and parameters by the ends of their paths, for names that mean the same in all families.
COMMON = {
    "q_proj": "heads", "k_proj": "kv_heads", "v_proj": "kv_heads", "o_proj": "rowwise",
    "q_b_proj": "heads", "kv_b_proj": "heads", "self_attn.gate_proj": "heads", "sinks": "heads",
    "gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise",
    "gate_up_proj": "halves", "input_linear": "halves", "output_linear": "rowwise",
    "experts": "experts",
    "q_norm": "norm", "k_norm": "kv_norm",
}  # fmt: skip

# What transformers' plans call linears that are divided alike.
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


class Division:
    """How one rank divides a module.

    Args:
        config: of the whole model. styles: of the family, by pattern; see `Family.division`.
        shard: the rank's. reduction: makes partial outputs whole.
        name: of the model in errors.
    """

    def __init__(
        self, config: Any, styles: Mapping[str, Any], shard: Shard, reduction: Reduction, name: str = "model"
    ) -> None:
        self.config, self.shard, self.reduction, self.name = config, shard, reduction, name
        self._norms = set[str]()  # paths of norms whose rows are divided
        self._divided = set[str]()  # paths of quantized modules that are divided
        plan = getattr(config, "base_model_tp_plan", None) or {}
        self._styles = [(pattern_of(path, ends=True), style) for path, style in {**COMMON, **styles}.items()][::-1]
        self._styles += [(pattern_of(path, ends=False), ALIASES.get(style, style)) for path, style in plan.items()]

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
        for path, module, style in self._styled(model.get_decoder()):
            is_quantized = isinstance(module, QuantizedLinear | QuantizedExperts)
            if is_quantized and path not in self._divided and any(True for _ in module.buffers(recurse=False)):
                self._divide_quantized(path, module, style)
                self._divided.add(path)

    def cuts(self, model: Any) -> dict[str, Cut]:
        """Return the cuts of a module's parameters, by name.

        Raises:
            ValueError: a module that cannot be divided, by name.
        """
        decoder, cuts = model.get_decoder(), dict[str, Cut]()
        prefix = next(f"{path}." if path else "" for path, module in model.named_modules() if module is decoder)
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
        return cuts

    def attach(self, model: Any) -> None:
        """Give modules with partial outputs their reductions, and linears their sizes."""
        setattr(model, IS_DIVIDED, True)
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
            rows = self._vocabulary(vocab)
            head.weight = nn.Parameter(head.weight.data[rows.start : rows.stop], head.weight.requires_grad)
            if head.bias is not None:
                head.bias = nn.Parameter(head.bias.data[rows.start : rows.stop], head.bias.requires_grad)
        head.reduction = Columns(self.reduction, self._vocabulary(vocab), vocab)

    def _divide_quantized(self, path: str, module: Any, style: Any) -> None:
        """Keep this rank's part of a quantized linear or of quantized experts.

        Raises:
            ValueError: a boundary cuts a group of elements with one scale.
        """
        what = f"{self.name}: {path}"
        try:
            if isinstance(module, QuantizedExperts):
                module.divide(self._even(module.get_buffer("down").shape[2], f"{what}.intermediate_size"))
            elif isinstance(module, QuantizedLinear):
                weight = module.weight
                like = torch.empty(weight.shape, device="meta")
                cut = self._cut(what, style, "weight", like)
                if cut is not None and cut.dim:
                    module.store(weight.slice_columns(cut.ranges[0]))
                elif cut is not None:
                    rows = torch.tensor(
                        [row for part in cut.ranges for row in part], device=module.get_buffer("qweight").device
                    )
                    module.store(weight.pick_rows(rows))
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
        config = self.config
        if style == "experts":
            return self._experts_cut(what, leaf, tensor)
        if style in ("norm", "kv_norm"):
            if not self._is_norm_of_heads(style, tensor):
                return None
            style = "heads" if style == "norm" else "kv_heads"
        if style in ("heads", "kv_heads"):
            heads = config.num_attention_heads
            count = heads if style == "heads" else (getattr(config, "num_key_value_heads", None) or heads)
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
        heads = config.num_attention_heads
        count = heads if style == "norm" else (getattr(config, "num_key_value_heads", None) or heads)
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return count > 1 and (weight.dim() == 2 or len(weight) == count * dim)

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
        begin, ranges = 0, list[range]()
        for count, size in parts:
            own = self.shard.heads(count, f"{what}: heads")
            ranges.append(range(begin + own.start * size, begin + own.stop * size))
            begin += count * size
        if begin != total:
            raise ValueError(f"{what} has {total} rows, expected {begin} by the heads of the config")
        return tuple(ranges)

    def _even(self, count: int, what: str) -> range:
        own = self.shard.share(count, what)
        return range(self.shard.rank * own, (self.shard.rank + 1) * own)


GROUPS = "norm_of_groups:"  # a style, with the number of groups of heads
WHOLE_STYLES = ("replicated", "embedding", "mla_kv_a_proj", "moe_tp_experts", "packed_colwise")


def pattern_of(path: str, ends: bool) -> re.Pattern[str]:
    """Return the pattern of a path in which * is a layer's number, or, if it `ends` paths, of what ends so."""
    escaped = re.escape(path).replace(r"\*", r"\d+")
    return re.compile(rf"(?:.*\.)?{escaped}" if ends else escaped)
