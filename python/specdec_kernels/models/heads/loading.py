"""Loading draft heads from checkpoints, and questions about them that read no weight."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from huggingface_hub import hf_hub_download
from torch import Tensor, nn
from transformers import LlamaConfig

from ...plans import HEAD_DIMS
from ..families import head_dim_of
from ..families.latent import check_row
from ..language_model import LanguageModel
from ..weights.checkpoint import Faults, readable
from ..weights.loading import DTYPES
from .base import DraftHead, HeadStorage
from .checkpoint import LATENT, HeadCheckpoint, OpenCheckpoint, target_ids

H = TypeVar("H", bound=DraftHead)
PLAIN = HeadStorage()


class SharingTarget(Protocol):
    """The parts of the target that a head's checkpoint is checked against, and may share."""

    @property
    def config(self) -> Any: ...

    @property
    def embedding(self) -> nn.Embedding: ...

    @property
    def lm_head(self) -> nn.Linear: ...


def open_checkpoint(kind: type[DraftHead], head: str | Path | HeadCheckpoint) -> OpenCheckpoint:
    """Find a head's folder; see `HeadCheckpoint.open`."""
    checkpoint = head if isinstance(head, HeadCheckpoint) else HeadCheckpoint(head)
    return checkpoint.open(kind.kind, f"{kind.name} head")


def config_of_head(kind: type[H], head: str | Path | HeadCheckpoint | H) -> LlamaConfig:
    """Return the config of a checkpoint or of a loaded head.

    Raises:
        ValueError: a folder that holds something else; an unsupported variant, by name.
    """
    if isinstance(head, DraftHead):
        return head.config
    config = open_checkpoint(kind, head).config()
    kind.check_config(config)
    return config


def num_layers_of(kind: type[H], head: str | Path | HeadCheckpoint | H) -> int:
    """Return the number of layers, each of which has KV."""
    return len(head.layers) if isinstance(head, DraftHead) else open_checkpoint(kind, head).num_layers


def own_vocabulary(kind: type[H], head: str | Path | HeadCheckpoint | H) -> bool:
    """Return whether the head has a draft vocabulary of its own, a part of the target's."""
    return head.id_map is not None if isinstance(head, DraftHead) else "d2t" in open_checkpoint(kind, head).names


def has_confidence(kind: type[H], head: str | Path | HeadCheckpoint | H) -> bool:
    """Return whether a block drafter estimates the acceptance of its tokens."""
    if isinstance(head, DraftHead):
        return getattr(head, "confidence_head", None) is not None
    return any(name.startswith("confidence_head.") for name in open_checkpoint(kind, head).names)


def frequent_tokens(file: str | Path, vocab: int, name: str) -> list[int]:
    """Return the token ids, in increasing order, of a file that FR-Spec publishes (arXiv 2502.14856).

    Args:
        file: a path, or a file of a hub id ("thunlp/LLaMA3-Instruct-8B-FR-Spec/freq_32768.pt"): a list or a tensor that
            torch saved. No code of it is run.
        vocab: the target's vocabulary size.
        name: of the argument in errors.

    Raises:
        ValueError: anything but ids of the target's tokens, each once.
        FileNotFoundError: no such file.
    """
    path = Path(file)
    if not path.is_file():
        parts = str(file).split("/")
        if isinstance(file, Path) or len(parts) != 3 or parts[0] in ("", ".", ".."):
            raise FileNotFoundError(f"{name} is {file}, expected an existing file or a file of a hub id")
        path = Path(hf_hub_download("/".join(parts[:2]), parts[2]))
    with readable(path):
        ids = torch.as_tensor(torch.load(path, map_location="cpu", weights_only=True))
    if ids.dim() != 1 or len(ids) == 0 or ids.is_floating_point() or ids.dtype == torch.bool:
        got = f"shape {list(ids.shape)} and {ids.dtype}"
        raise ValueError(f"{name}: {file} has {got}, expected [tokens] integers, the ids of the target's tokens")
    for worst in (int(ids.min()), int(ids.max())):
        if not 0 <= worst < vocab:
            raise ValueError(f"{name}: {file} has token {worst}, expected 0 to {vocab - 1} (the target's)")
    tokens: list[int] = sorted(set(ids.tolist()))
    if len(tokens) != len(ids):
        raise ValueError(f"{name}: {file} has a token twice, expected each once")
    return tokens


def load_head(
    kind: type[H],
    source: str | Path | HeadCheckpoint | H,
    target: LanguageModel,
    *,
    num_pages: int,
    page_size: int,
    storage: HeadStorage = PLAIN,
) -> H:
    """Return a checkpoint's head, or a copy of a loaded one, with KV pools of the target's page geometry.

    A checkpoint without `embed_tokens` or `lm_head` shares the target's. Every tensor is loaded.

    Raises:
        ValueError: a folder that holds something else; an unsupported variant, or tensors that do not fit, by name.
    """
    head: H = copy(source) if isinstance(source, DraftHead) else load_checkpoint(kind, source, target)
    head.is_given, head.storage = isinstance(source, DraftHead), storage
    head.prepare(target, num_pages, page_size)
    return head


def load_checkpoint(kind: type[H], source: str | Path | HeadCheckpoint, target: SharingTarget) -> H:
    """Return a head with the tensors of a checkpoint; see `load_head`."""
    checkpoint = open_checkpoint(kind, source)
    name, config = checkpoint.name, checkpoint.config()
    kind.check_config(config)
    tensors, stored_name = checkpoint.tensors()
    for key, tensor in tensors.items():
        if key not in ("d2t", "t2d") and tensor.dtype not in DTYPES:
            raise ValueError(
                f"{name}: {checkpoint.folder} has {stored_name(key)} of {tensor.dtype}, expected one of "
                f"{', '.join(map(str, DTYPES))} (heads are not dequantized)"
            )
    check_head(kind, config, tensors, target)
    width = target.embedding.weight.shape[1]
    config.target_hidden_size = width
    d2t = tensors.pop("d2t", None)
    tensors.pop("t2d", None)  # the inverse of d2t, as a bit per target token
    vocab: int = target.embedding.weight.shape[0]
    draft_vocab = len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else vocab
    if d2t is None and draft_vocab != vocab:
        raise ValueError(f"{name}: d2t is missing for a draft vocabulary of {draft_vocab}, expected the tensor")
    if "embed_tokens.weight" in tensors:
        config.vocab_size = len(tensors["embed_tokens.weight"])
    with torch.device("meta"):
        head: H = kind.made_for(config, tensors, draft_vocab, target.config.num_hidden_layers)
    shared: dict[str, nn.Module] = {}
    if config.hidden_size == width:
        shared = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.lm_head}
    faults_of(head, tensors, shared).check(f"{name}: {checkpoint.folder}", head, "head", stored_name)
    for key, module in shared.items():
        if key not in tensors:
            setattr(head, key.removesuffix(".weight"), module)
    head.prefix = checkpoint.prefix
    head.load_state_dict(tensors, strict=False, assign=True)
    if d2t is not None:
        head.id_map = target_ids(name, d2t, draft_vocab, vocab)
    return head


def check_head(kind: type[DraftHead], config: Any, tensors: Mapping[str, Tensor], target: SharingTarget) -> None:
    """Refuse a head that our layers cannot express, or that does not fit the target.

    Raises:
        ValueError: what does not fit, by name.
    """
    name = f"{kind.name} head"
    if (head_dim := head_dim_of(config)) > HEAD_DIMS[-1]:
        raise ValueError(f"{name}: head_dim is {head_dim}, expected at most {HEAD_DIMS[-1]}")
    if any(key.endswith(LATENT) for key in tensors):
        for size in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"):
            if type(value := getattr(config, size, None)) is not int or value < 1:
                raise ValueError(f"{name}: {size} is {value!r}, expected a number from 1 on (its attention is latent)")
        check_row(config, name)
    if config.hidden_act != "silu":
        raise ValueError(f"{name}: hidden_act is {config.hidden_act!r}, expected 'silu'")
    width = target.embedding.weight.shape[1]
    for size in ("target_hidden_size",) if kind.has_own_width else ("hidden_size", "target_hidden_size"):
        if getattr(config, size, None) not in (None, width):
            raise ValueError(f"{name}: {size} is {getattr(config, size)}, expected the target's {width}")
    vocab: int = target.config.vocab_size
    if "embed_tokens.weight" in tensors and len(tensors["embed_tokens.weight"]) < vocab:
        rows = len(tensors["embed_tokens.weight"])
        raise ValueError(f"{name}: embed_tokens.weight has {rows} rows, expected at least the target's {vocab}")


def faults_of(head: DraftHead, tensors: Mapping[str, Tensor], shared: Mapping[str, nn.Module]) -> Faults:
    """Return the tensors that do not fit a head.

    Missing tensors may be those of the `shared` modules, which are given by parameter name.
    """
    expected = {key: parameter.shape for key, parameter in head.state_dict().items()}
    return Faults(
        missing=[key for key in expected if key not in tensors and key not in shared],
        unknown=[key for key in tensors if key not in expected],
        mismatched=[
            (key, tensor.shape, expected[key])
            for key, tensor in tensors.items()
            if key in expected and tensor.shape != expected[key]
        ],
    )
