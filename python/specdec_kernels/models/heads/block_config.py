"""The configs of block drafters (DFlash, DFlash2, DSpark, JetSpec), as their checkpoints publish them.

An entry stands at the top of the config, or in `dflash_config`, `dspark_config` or `eagle_config` there. Each entry
that no config of a language model has is read here, or refused by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from transformers import LlamaConfig

NESTED = "dspark_config", "dflash_config", "eagle_config"  # the first that has an entry counts, then the top
SLIDING, FULL = "sliding_attention", "full_attention"
MASKS = "is_causal", "causal", "causal_head"
ROTATIONS = "rope_is_neox_style", "is_neox_style"
# Layers of the target whose input states are injected; the second name is vLLM's.
ENTERED = "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"
MARKOV_HEADS = "vanilla", "gated", "rnn"
MOST_ROWS = 63  # of a block: their bits are one word of a mask, above 0

# Entries that say how a drafter was trained or saved, not what it computes.
UNREAD = {
    "auto_map",
    "block_size_train",
    "has_lm_head",  # as the tensors show
    "has_own_lm_head",
    "has_embed_tokens",
    "loss_type",
    "mask_token",  # the name of mask_token_id
    "num_anchors",
    "num_target_layers",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "target_hidden_size",
    "target_model_type",
    "tie_word_embeddings",
    "transformers_version",
    "use_cache",
    "verifier",
}

# Entries that are computed in one way alone.
COMPUTED = {
    "attention_value_scale": 1.0,
    "projector_type": "dspark",
    "use_aux_hidden_state": True,
    "use_gemma_norm": False,
    "logit_scale": 1.0,
}


@dataclass
class Entries:
    """The entries of a config, and which of them have been read."""

    config: LlamaConfig
    name: str  # of the head, in errors
    read: set[str] = field(default_factory=set)

    def get(self, key: str, default: Any = None) -> Any:
        """Return an entry; None where it is left out counts as left out."""
        self.read.add(key)
        for part in (*self.nested.values(), vars(self.config)):
            if part.get(key) is not None:
                return part[key]
        return default

    def number(self, key: str, default: int | None = None, low: int = 1, high: int = 2**31) -> int:
        """Return an entry that is an integer from `low` to `high`.

        Raises:
            ValueError: it is none, or it is left out without a default.
        """
        value = self.get(key, default)
        if type(value) is not int or not low <= value <= high:
            expected = f"{low} to {high}" if high < 2**31 else f"a number from {low} on"
            raise ValueError(f"{self.name}: {key} is {value!r}, expected {expected}")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool | None:
        """Return an entry that is true or false; ValueError for another value."""
        value = self.get(key, default)
        if value is not None and type(value) is not bool:
            raise ValueError(f"{self.name}: {key} is {value!r}, expected true or false")
        return value

    def factor(self, key: str, default: float) -> float:
        """Return an entry that is a finite number; ValueError for another value."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ValueError(f"{self.name}: {key} is {value!r}, expected a finite number")
        return float(value)

    def layer_ids(self, key: str) -> list[int] | None:
        """Return an entry that lists layers of the target; ValueError for another value."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not value or any(type(layer) is not int for layer in value):
            raise ValueError(f"{self.name}: {key} is {value!r}, expected integers")
        return list(value)

    @property
    def nested(self) -> dict[str, dict[str, Any]]:
        """The configs within the config."""
        found = {key: getattr(self.config, key, None) for key in NESTED}
        for key, value in found.items():
            if value is not None and not isinstance(value, dict):
                raise ValueError(f"{self.name}: {key} is {value!r}, expected a config")
        return {key: value for key, value in found.items() if value}

    def expect_all_read(self) -> None:
        """Raise a ValueError for an entry that changes what is computed, or may, and has not been read."""
        for key, computed in COMPUTED.items():
            if (value := self.get(key, computed)) != computed:
                raise ValueError(f"{self.name}: {key} is {value!r}, expected {computed!r} (not supported)")
        of_models = {key for key in LlamaConfig().to_dict() if not key.startswith("_")} | {"dtype", "torch_dtype"}
        at_top = {key for key, value in vars(self.config).items() if value is not None and not key.startswith("_")}
        given = (at_top - of_models - set(NESTED)) | {key for part in self.nested.values() for key in part}
        if unknown := sorted(given - self.read - UNREAD):
            raise ValueError(f"{self.name}: config has {', '.join(unknown)}, expected no entries that are unknown here")


@dataclass(frozen=True)
class BlockConfig:
    """The computation of a block drafter beyond the layers of its language model.

    Attributes:
        block_size: rows of a block, the root's included.
        from_root: the root's row predicts the first token, as in DSpark; else the first mask's row does.
        feature_layers: layers of the target whose input states are injected.
        mask_token: the token of all rows but the root's.
        causal: for each layer, whether a row of the block sees only those before it.
        windows: for each layer, the rows of its sliding window; None: all.
        markov: of DSpark, the kind of its serial head; empty: none.
        rank: of transitions; 0: none.
        top_k: candidates at each position that the drafter was trained for; 0: any.
        conv_taps, conv_group: of DFlash2's convolutions; 0: none.
        logit_scale, soft_cap: of logits.
        input_scale: of embeddings.
        has_sinks: attention has a sink for each head.
        with_markov: the confidence head reads the Markov embedding; None: as the width of its weight shows.
        interleaved: RoPE rotates neighbors, elements 2i and 2i + 1 of a head.
    """

    block_size: int
    from_root: bool
    feature_layers: tuple[int, ...]
    mask_token: int
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    markov: str = ""
    rank: int = 0
    top_k: int = 0
    conv_taps: int = 0
    conv_group: int = 0
    logit_scale: float = 1.0
    soft_cap: float | None = None
    input_scale: float = 1.0
    has_sinks: bool = False
    with_markov: bool | None = None
    interleaved: bool = False

    @property
    def depth(self) -> int:
        """The positions that a block predicts."""
        return self.block_size - (0 if self.from_root else 1)

    @classmethod
    def of(cls, config: LlamaConfig, num_target_layers: int, name: str, kind: str) -> BlockConfig:
        """Read a config over a target with this number of layers.

        Args:
            config: of the head.
            num_target_layers: of the target.
            name: of the head, in errors.
            kind: "dflash", "dflash2" or "dspark".

        Raises:
            ValueError: an entry that is missing, is no value that it can have, or is not supported, by name.
        """
        entries = Entries(config, name)
        expect_architecture(config, name, kind)
        is_dspark = kind == "dspark"
        speculators = getattr(config, "speculators_model_type", None) is not None
        from_root = predicts_from_root(entries, is_dspark and not speculators)
        block_size = entries.number("block_size", 7 if is_dspark else 16, low=1 if from_root else 2, high=MOST_ROWS)
        causal, windows = attention_of(entries, speculators and not is_dspark)
        mask_token = entries.number("mask_token_id", low=0)
        markov, rank = "", 0
        if is_dspark:
            rank = entries.number("markov_rank")
            markov = str(entries.get("markov_head_type", "vanilla")).lower()
            if markov not in MARKOV_HEADS:
                raise ValueError(f"{name}: markov_head_type is {markov!r}, expected one of {', '.join(MARKOV_HEADS)}")
            entries.get("enable_confidence_head")  # as the tensors show
        elif kind == "dflash2":
            rank = entries.number("selector_rank")
        taps = entries.number("conv_kernel_size", 0, low=0)
        group = entries.number("conv_group_size", 0, low=0)
        if (taps > 0) != (group > 0) or (group and config.hidden_size % group):
            raise ValueError(
                f"{name}: conv_kernel_size is {taps} with conv_group_size {group}, "
                f"expected none, or both with groups that divide {config.hidden_size}"
            )
        cap = entries.factor("final_logit_softcapping", 0.0)
        found = cls(
            block_size=block_size,
            from_root=from_root,
            feature_layers=feature_layers(entries, num_target_layers),
            mask_token=mask_token,
            causal=causal,
            windows=windows,
            markov=markov,
            rank=rank,
            top_k=entries.number("selector_top_k") if kind == "dflash2" else 0,
            conv_taps=taps,
            conv_group=group,
            logit_scale=entries.factor("output_multiplier", 1.0),
            soft_cap=cap or None,
            input_scale=entries.factor("input_embedding_scale", 1.0),
            has_sinks=bool(entries.flag("attention_sink_bias", entries.flag("add_swa_attention_sink_bias"))),
            with_markov=entries.flag("confidence_head_with_markov") if is_dspark else None,
            interleaved=rotates_neighbors(entries),
        )
        for key in ("draft_vocab_size", "tie_word_embeddings"):
            entries.get(key)  # as the tensors show
        entries.expect_all_read()
        return found


LFM2 = "Lfm2DSparkDraftModel"
# The architectures of each kind whose layers are Qwen3's or Llama's.
ARCHITECTURES = {
    "dflash": {"DFlashDraftModel"},
    "dflash2": {"DFlash2DraftModel", "DFlash2BeamDraftModel"},
    "dspark": {
        "DSparkDraftModel",
        LFM2,
        "LingDSparkModel",
        "Qwen3DSparkModel",
        "Qwen3OmniDSparkModel",
    },
}


def expect_architecture(config: Any, name: str, kind: str) -> None:
    """Raise a ValueError for a checkpoint of another architecture; speculators' folders name theirs in another way."""
    written = getattr(config, "speculators_model_type", None)
    if written is not None:
        if written != kind:
            raise ValueError(f"{name}: speculators_model_type is {written!r}, expected {kind!r}")
        return
    architectures, known = getattr(config, "architectures", None), ARCHITECTURES[kind]
    given = architectures if isinstance(architectures, list) else []
    if architectures and not any(isinstance(each, str) and each in known for each in given):
        raise ValueError(
            f"{name}: architectures is {architectures}, expected one of {', '.join(sorted(known))} (not supported)"
        )


def predicts_from_root(entries: Entries, default: bool) -> bool:
    """Return whether the root's row predicts; `dspark_bonus_anchor` is vLLM's word for the opposite."""
    written, bonus = entries.flag("sample_from_anchor"), entries.flag("dspark_bonus_anchor")
    if written is not None and written == bonus:
        raise ValueError(
            f"{entries.name}: dspark_bonus_anchor is {bonus} with sample_from_anchor {written}, expected the opposite"
        )
    return written if written is not None else not bonus if bonus is not None else default


def rotates_neighbors(entries: Entries) -> bool:
    """Return whether RoPE rotates neighboring elements, which the config alone says.

    The default is halves. Published drafters of LFM2 rotate neighbors: engines differ where their config does not say.
    """
    given = {key: value for key in ROTATIONS if (value := entries.flag(key)) is not None}
    if len(set(given.values())) > 1:
        both = " and ".join(f"{key} {value}" for key, value in given.items())
        raise ValueError(f"{entries.name}: config has {both}, expected one rotation")
    if not given and LFM2 in (getattr(entries.config, "architectures", None) or []):
        raise ValueError(f"{entries.name}: rope_is_neox_style is missing, expected it for {LFM2}")
    return not next(iter(given.values()), True)


def feature_layers(entries: Entries, num_target_layers: int) -> tuple[int, ...]:
    """Return the layers of the target whose input states are injected.

    `target_layer_ids` are layers that the states leave; speculators' `aux_hidden_state_layer_ids`, and vLLM's with
    `eagle_` before it, are layers that they enter. All that are written must agree.

    The default is spread from the second layer to the fourth last.
    """
    left = entries.layer_ids("target_layer_ids")
    short, long = (entries.layer_ids(key) for key in ENTERED)
    entered = long if short is None else short
    written = entries.config.to_dict().get("num_target_layers") or next(
        (part["num_target_layers"] for part in entries.nested.values() if part.get("num_target_layers")), None
    )
    if written not in (None, num_target_layers):
        raise ValueError(f"{entries.name}: num_target_layers is {written}, expected the target's {num_target_layers}")
    if left is None and entered is None:
        count = entries.config.num_hidden_layers
        if num_target_layers < 4 and count > 1:
            raise ValueError(f"{entries.name}: target_layer_ids is missing, expected it for a target of few layers")
        if count == 1:
            left = [num_target_layers // 2]
        else:
            left = [round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count)]
    given = left if left is not None else entered
    assert given is not None
    which = "target_layer_ids" if left is not None else ENTERED[short is None]
    layers = tuple(layer + 1 for layer in given) if left is not None else tuple(given)
    for key, other in zip(ENTERED, (short, long), strict=True):
        if other is not None and other != list(layers):
            those, own = (", ".join(map(str, each)) for each in (other, layers))
            raise ValueError(f"{entries.name}: {key} has layers {those}, expected those of {which}, {own}")
    # The state that leaves the last layer is normalized in some exporters' features and not in others'.
    if not all(0 <= layer < num_target_layers for layer in layers):
        most = num_target_layers - (2 if left is not None else 1)
        raise ValueError(f"{entries.name}: {which} is {given}, expected {0 if left is None else -1} to {most}")
    return layers


def attention_of(entries: Entries, non_causal_by_default: bool) -> tuple[tuple[bool, ...], tuple[int | None, ...]]:
    """Return, for each layer, whether the block is causal in it, and its sliding window.

    An entry for all layers counts first. Without one, blocks are causal in layers with a sliding window alone, as vLLM
    and SGLang have it.
    """
    types, count = entries.get("layer_types"), entries.config.num_hidden_layers
    are_known = isinstance(types, list | tuple) and all(kind in (SLIDING, FULL) for kind in types)
    if types is not None and not (are_known and len(types) == count):
        raise ValueError(
            f"{entries.name}: layer_types is {types!r}, expected {SLIDING} or {FULL} for each of {count} layers"
        )
    uses, first = entries.flag("use_sliding_window"), entries.get("max_window_layers", count)
    if uses is False and SLIDING in (types or ()):
        raise ValueError(
            f"{entries.name}: use_sliding_window is False with layers of {SLIDING}, expected True or no such layers"
        )
    if uses and types is None and type(first) is int and first < count:
        raise ValueError(f"{entries.name}: use_sliding_window is True, expected layer_types, or False")
    if entries.flag("use_swa") and SLIDING not in (types or ()):
        types = [SLIDING] * count
    types = types or [FULL] * count
    width = entries.get("swa_window_size", entries.get("sliding_window"))
    if SLIDING in types and (type(width) is not int or width < 1):
        raise ValueError(f"{entries.name}: sliding_window is {width!r}, expected a number from 1 on")
    given = {key: value for key in MASKS if (value := entries.flag(key)) is not None}
    if len(set(given.values())) > 1:
        both = " and ".join(f"{key} {value}" for key, value in given.items())
        raise ValueError(f"{entries.name}: config has {both}, expected one mask within the block")
    for_all = next(iter(given.values()), None)
    if for_all is None and non_causal_by_default:
        for_all = not entries.flag("sliding_window_non_causal", True)
    causal = tuple(kind == SLIDING if for_all is None else for_all for kind in types)
    windows = tuple(width if kind == SLIDING else None for kind in types)
    if any(window is not None and not below for window, below in zip(windows, causal, strict=True)):
        raise ValueError(
            f"{entries.name}: a layer with a sliding window is not causal, expected causal layers there (not supported)"
        )
    return causal, windows
