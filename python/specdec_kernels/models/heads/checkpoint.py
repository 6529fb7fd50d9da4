"""Checkpoints of draft heads: a folder of a head's own, or tensors under a prefix of the target's checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, LlamaConfig

from ..weights.checkpoint import Kind, expect_kind, load_tensors, local_folder, read_json, tensor_names
from ..weights.config_entries import check_entries, made_of

LAYER = re.compile(r"(?:midlayer|transformer|layers\.(\d+))\.")

# Other names of a head's own parts: EAGLE-3's paper has "midlayer", the first format of speculators the others.
OWN_NAMES = {"midlayer.": "layers.0.", "transformer.": "layers.0.", "fusion_fc.": "fc."}

# Entries of a config that are positive numbers; a head_dim may be missing.
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)

LATENT = "self_attn.kv_a_proj_with_mqa.weight"  # of layers with latent attention

# Tensors that a head does not compute with: rotations, which follow from the config, and speculators' copies of the
# target's modules, for training.
UNUSED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")


@dataclass(frozen=True)
class HeadCheckpoint:
    """The place where a draft head is stored.

    Attributes:
        source: a folder or hub id.
        prefix: of the names of the head's tensors in a target's checkpoint, such as "mtp."; the head's config is the
            target's then. Empty: the folder is the head's own.
    """

    source: str | Path
    prefix: str = ""

    def open(self, kind: Kind, name: str) -> OpenCheckpoint:
        """Find the folder, and read its config.

        Args:
            kind: what a folder of the head's own must hold.
            name: of the head, in errors.

        Raises:
            ValueError: a folder that holds something else; a config that is none; no tensor has the prefix.
        """
        folder = local_folder(self.source, f"{kind.draft}: head")
        if not self.prefix:
            expect_kind(folder, kind, name)
        opened = OpenCheckpoint(folder, self.prefix, name)
        if self.prefix and not opened.names:
            raise ValueError(f"{name}: {folder} has no tensor under {self.prefix!r}, expected the head's there")
        return opened


@dataclass(frozen=True)
class OpenCheckpoint:
    """A head's checkpoint whose folder is local.

    Attributes:
        folder, prefix: as of `HeadCheckpoint`.
        name: of the head, in errors.
    """

    folder: Path
    prefix: str
    name: str

    @property
    def names(self) -> list[str]:
        """Return the head's own names of its tensors, without reading any."""
        return [own_name(name, self.prefix) for name in tensor_names(self.folder) if name.startswith(self.prefix)]

    @property
    def num_layers(self) -> int:
        return len({match[0] for name in self.names if (match := LAYER.match(name))})

    def tensors(self) -> tuple[dict[str, Tensor], Callable[[str], str]]:
        """Return the tensors by the head's own names, and a function that makes the folder's names of these.

        Raises:
            ValueError: its layers are not numbered from 0 on.
        """
        tensors = load_tensors(self.folder, lambda key: key.startswith(self.prefix) and not key.endswith(UNUSED))
        short = {short_name(key, self.prefix) for key in tensors}
        layers = {match[0]: int(match[1] or 0) for key in short if (match := LAYER.match(key))}
        if sorted(layers.values()) != list(range(len(layers))) or not layers:
            found = ", ".join(sorted(layer.rstrip(".") for layer in layers)) or "no layer"
            raise ValueError(f"{self.name}: {self.folder} has {found}, expected layers from layers.0 on, none missing")
        others = {own: other for other, own in OWN_NAMES.items() if any(name.startswith(other) for name in short)}

        def stored_name(own: str) -> str:
            begin = next((begin for begin in others if own.startswith(begin)), "")
            return self.prefix + others.get(begin, "") + own.removeprefix(begin)

        return {own_name(key, self.prefix): tensor for key, tensor in tensors.items()}, stored_name

    def config(self) -> LlamaConfig:
        """Return the config of the head's layers, together with the head's own entries.

        In the format of speculators (`speculators_model_type`) the layers' part is `transformer_layer_config`, and in
        vLLM's it is `model`; entries that it leaves out have the defaults of its own model type.

        Raises:
            ValueError: an entry that is no config, a size that is no positive number, or what transformers refuses.
        """
        values = read_json(self.folder / "config.json")
        inner = next((key for key in ("transformer_layer_config", "model") if key in values), "")
        layer = values.get(inner, values)
        if not isinstance(layer, dict):
            raise ValueError(f"{self.name}: {self.folder} has {inner} {layer!r}, expected a config")
        for size in SIZES:
            value = layer.get(size, 1)
            if (type(value) is not int or value < 1) and not (size == "head_dim" and value is None):
                raise ValueError(f"{self.name}: {size} is {value!r}, expected a number from 1 on ({self.folder})")
        is_latent = any(name.endswith(LATENT) for name in self.names)

        def read(values: dict[str, Any]) -> LlamaConfig:
            layer = values[inner] if inner else values
            if not is_latent:  # the target's, as some exporters leave it
                layer = {key: value for key, value in layer.items() if key != "kv_lora_rank"}
            if inner:
                layer = AutoConfig.for_model(**({"model_type": "llama"} | layer)).to_dict()
            others = {key: value for key, value in values.items() if key not in (inner, "kv_lora_rank")}
            return LlamaConfig.from_dict(with_plain_rope(others | layer | {"model_type": "llama"}))

        what = f"{self.name}: {self.folder}"
        config: LlamaConfig = made_of(values, read, what)
        check_entries(config, what)
        return config


def with_plain_rope(values: dict[str, Any]) -> dict[str, Any]:
    """Return a config's entries with a plain rotation in place of one by three axes, which are equal for text."""
    plain = dict(values)
    for key in ("rope_scaling", "rope_parameters"):
        given = values.get(key)
        if isinstance(given, dict) and "mrope" in (given.get("rope_type"), given.get("type")):
            kept = {name: value for name, value in given.items() if not name.startswith("mrope") and name != "type"}
            plain[key] = kept | {"rope_type": "default"}
    return plain


def short_name(key: str, prefix: str = "") -> str:
    """Return a checkpoint's name of a tensor without the prefix, or the "model." that some exporters write."""
    return key.removeprefix(prefix).removeprefix("model.")


def own_name(key: str, prefix: str = "") -> str:
    """Return the head's own name of a checkpoint's tensor, which is that of speculators."""
    name = short_name(key, prefix)
    begin = next((begin for begin in OWN_NAMES if name.startswith(begin)), "")
    return OWN_NAMES.get(begin, "") + name.removeprefix(begin)


def target_ids(name: str, d2t: Tensor, draft_vocab: int, vocab: int) -> Tensor:
    """Return the target's id of each draft id, [Vd] int32. A checkpoint's d2t holds the distances between the two.

    Raises:
        ValueError: a draft token is no token of the target, or two are the same one.
    """
    if list(d2t.shape) != [draft_vocab] or d2t.is_floating_point():
        got = f"shape {list(d2t.shape)} and {d2t.dtype}"
        raise ValueError(f"{name}: d2t has {got}, expected [{draft_vocab}] integers, one for each draft token")
    ids = torch.arange(draft_vocab) + d2t.long()
    for worst in (int(ids.min()), int(ids.max())):
        if not 0 <= worst < vocab:
            raise ValueError(f"{name}: d2t leads to token {worst}, expected 0 to {vocab - 1} (the target's)")
    if len(set(ids.tolist())) != draft_vocab:
        raise ValueError(f"{name}: d2t leads to a token twice, expected another one for each draft token")
    return ids.to(torch.int32)
