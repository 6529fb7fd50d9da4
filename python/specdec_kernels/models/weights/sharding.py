"""Dividing the linears of a loaded module among ranks, by the tensor-parallel plan of its config."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from ..layers.reduction import Reduction
from ..shard import Shard


def divide(model: Any, plan: dict[str, str] | None, shard: Shard, reduction: Reduction, name: str = "model") -> None:
    """Keep a shard of each linear in a module's decoder, in place.

    A linear that the plan calls "colwise" keeps its share of output rows. One called "rowwise" keeps its share of input
    columns and owns the reduction of its partial sums; its bias stays with rank 0. Embeddings stay whole.

    Args:
        model: a causal language model of transformers.
        shard: the rank's.
        reduction: sums the partial outputs of linears with divided inputs.
        name: of the model in errors.
        plan: styles by module path, as in `PreTrainedConfig.base_model_tp_plan`.

    Raises:
        ValueError: a module that cannot be divided so, by name.
    """
    if shard.size == 1:
        return
    if not plan:
        raise ValueError(f"{name}: its config has no tensor-parallel plan, expected one for {shard.size} ranks")
    styles = {re.compile(re.escape(path).replace(r"\*", r"\d+")): style for path, style in plan.items()}
    for path, module in model.get_decoder().named_modules():
        style = next((style for pattern, style in styles.items() if pattern.fullmatch(path)), None)
        if style is None or style.startswith(("replicated", "embedding")):
            continue
        what = f"{name}: {path}"
        if style not in ("colwise", "rowwise") or type(module) is not nn.Linear:
            raise ValueError(
                f"{what} is a {type(module).__name__} divided by {style!r}, expected linears, colwise or rowwise"
            )
        linear: Any = module
        if style == "colwise":
            linear.weight.data = shard.slice(linear.weight.data, 0, f"{what}.out_features")
            linear.out_features = len(linear.weight)
            if linear.bias is not None:
                linear.bias.data = shard.slice(linear.bias.data, 0, f"{what}.out_features")
        else:
            linear.weight.data = shard.slice(linear.weight.data, 1, f"{what}.in_features")
            linear.in_features = linear.weight.shape[1]
            linear.reduction = reduction
            if shard.rank:
                linear.bias = None
