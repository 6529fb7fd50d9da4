"""What all draft heads over a target's states are: a few decoder layers with KV pools of their own; and how they load.

A checkpoint's tensors say what a head is made of: how many layers, which biases, norms of queries and keys. Its config
says what no tensor shows. Where one contradicts the other, or holds what nobody here computes, the head is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from huggingface_hub import hf_hub_download
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from ...plans import HEAD_DIMS
from ..families import head_dim_of, window_of
from ..families.llama import gated_mlp
from ..kv_pools import KvPools
from ..language_model import LanguageModel
from ..layers.attention import Attention
from ..layers.decoder_layer import Layer
from ..layers.head_layout import HeadLayout
from ..layers.mixer import attach_caches, kv_layouts_of
from ..layers.norm import rms_norm_of
from ..layers.outputs import LayerOutput
from ..layers.paged_batch import PagedBatch
from ..layers.rope import Rope
from ..weights.checkpoint import Kind, expect_kind, load_tensors, local_folder, read_json, readable, tensor_names
from ..weights.loading import some
from ..weights.offload import offload, onload
from ..weights.update import Update, expect_floats, expect_tensors, write_over

LAYER = re.compile(r"(?:midlayer|layers\.(\d+))\.")

# What a head does not compute with: rotations, which follow from the config, and what speculators keeps of the target
# to train with.
UNUSED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")


class Features(NamedTuple):
    """A feature for each row, of the target's or the head's own output."""

    table: Tensor  # [F, H]
    rows: Tensor | None = None  # [T] int32, of the table; None: row by row


class HeadOutput(NamedTuple):
    """What a head computes, a row [T, H] for each of its input."""

    hidden: Tensor  # the feature of a recursive row
    normed: Tensor  # what `logits` takes


@dataclass(frozen=True)
class Parts:
    """What layers are made of, as tensors show it.

    Attributes:
        num_layers: each with KV of its own.
        biases: the modules that have one.
        qk_norm: a norm of each query and key head, as in Qwen3.
        first_norm: a norm of what enters the first layer; for EAGLE, whose paper has none.
    """

    num_layers: int = 1
    biases: frozenset[str] = frozenset()
    qk_norm: bool = False
    first_norm: bool = False

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Parts:
        return cls(
            num_layers=len({match[0] for key in tensors if (match := LAYER.match(key))}),
            biases=frozenset(key.split(".")[-2] for key in tensors if key.endswith(".bias")),
            qk_norm=any(key.endswith("self_attn.q_norm.weight") for key in tensors),
            first_norm="layers.0.input_layernorm.weight" in tensors,
        )


class HeadLayer(nn.Module):
    """The parameters of one layer, which reads rows of `inputs` numbers and has these norms around its parts."""

    def __init__(self, config: Any, parts: Parts, inputs: int, *norms: str) -> None:
        super().__init__()
        self.self_attn = AttentionParameters(config, parts, inputs)
        config = copy(config)
        config.mlp_bias = "gate_proj" in parts.biases
        self.mlp = LlamaMLP(config)
        for norm in (*norms, "post_attention_layernorm"):
            self.add_module(norm, LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps))


class AttentionParameters(nn.Module):
    """The parameters of an attention that reads rows of `inputs` numbers."""

    def __init__(self, config: Any, parts: Parts, inputs: int) -> None:
        super().__init__()
        self.head_dim = head_dim_of(config)
        query, key = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(inputs, query, bias="q_proj" in parts.biases)
        self.k_proj = nn.Linear(inputs, key, bias="q_proj" in parts.biases)
        self.v_proj = nn.Linear(inputs, key, bias="q_proj" in parts.biases)
        self.o_proj = nn.Linear(query, config.hidden_size, bias="o_proj" in parts.biases)
        for norm in ("q_norm", "k_norm") if parts.qk_norm else ():
            self.add_module(norm, LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps))


class DraftHead(nn.Module):
    """Proposes token i+2 from token i+1 and a feature of position i: the target's, or for its own tokens its output.

    Its parameters carry the checkpoint's names. `id_map` [Vd] int32 translates draft ids to target ids (None: the
    vocabularies are one).
    """

    kind: ClassVar[Kind]
    name: ClassVar[str]  # of the method, in errors
    id_map: Tensor | None
    layers: nn.ModuleList
    fc: nn.Linear
    _parts: Any
    embed_tokens: nn.Embedding
    pools: KvPools
    is_given = False  # whether the parameters are the caller's

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("id_map", None, persistent=False)

    @classmethod
    def made_for(cls, config: LlamaConfig, tensors: Mapping[str, Tensor], draft_vocab: int, num_layers: int) -> Any:
        """A head with room for these tensors, over a target of `num_layers` layers.

        Raises:
            ValueError: tensors and config contradict each other.
        """
        raise NotImplementedError

    @classmethod
    def check_config(cls, config: Any) -> None:
        """ValueError, by name, for a variant that is not computed here."""

    def prepare(self, target: LanguageModel, num_pages: int, page_size: int) -> None:
        """Makes ready for `forward`: on the target's device and in its dtype, with KV pools of its page geometry.

        Another engine may have prepared a head that is given as a module. It is prepared as a shallow copy, which
        shares the parameters and has pools of its own.
        """
        weight = target.embedding.weight
        self.to(device=weight.device, dtype=weight.dtype)
        self._max_len, self._vocab = target.max_len, len(weight)
        of_target = {id(parameter) for parameter in target.model.parameters()}
        self._of_target = {name for name, own in self._named() if id(own) in of_target}
        self._parts = self._make_parts()
        layouts = kv_layouts_of([layer.mixer for layer in self._parts.layers])
        self._hold(KvPools.allocate(layouts, num_pages, page_size, weight.dtype, weight.device))

    def _make_parts(self) -> Any:
        """What `forward` computes with: `layers`, and what is around them."""
        raise NotImplementedError

    def _named(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self.named_parameters(remove_duplicate=False)

    def _make_layers(self) -> list[Layer]:
        device = self.embed_tokens.weight.device
        rotation = Rope.of(LlamaRotaryEmbedding(self.config), self._max_len, device)
        heads = HeadLayout(head_dim_of(self.config), rotation)
        return [self._layer(index, module, heads) for index, module in enumerate(self.layers)]

    def updates(self, weights: Mapping[str, Tensor], name: str) -> list[Update]:
        """What becomes of the head's weights by these, named as checkpoints name them; as of `updates_of`."""
        expect_tensors(weights, name)
        given = {own_name(key): key for key in weights if not key.endswith(UNUSED) and own_name(key) != "t2d"}
        updates, parameters = list[Update](), dict(self._named())
        if "d2t" in given and self.id_map is not None:
            try:
                ids = target_ids(name, weights[given.pop("d2t")].cpu(), len(self.id_map), self._vocab)
            except ValueError as error:
                raise ValueError(str(error).replace(f"{name}: d2t", f"{name}['d2t']")) from None
            updates.append(Update(self.id_map, ids))
        expect_floats({key: weights[key] for key in given.values()}, name)
        for own, key in given.items():
            if own in self._of_target:
                raise ValueError(f"{name} has {key}, which is the target's, expected weights of the head's own")
            if own not in parameters:
                raise ValueError(f"{name} has {key}, unknown to {type(self).__name__}, expected tensors of the head")
            if weights[key].shape != parameters[own].shape:
                shapes = list(weights[key].shape), list(parameters[own].shape)
                raise ValueError(f"{name} has {key} of shape {shapes[0]}, expected {shapes[1]}")
            updates.append(Update(parameters[own].data, weights[key], parameters[own]))
        return updates

    @property
    def weights(self) -> dict[str, Tensor]:
        """Those that are the head's own to put away."""
        own = {} if self.is_given else dict(self.named_parameters())
        return {name: parameter for name, parameter in own.items() if name not in self._of_target}

    def sleep(self, level: int) -> None:
        """Sleep as `PagedModel.sleep` does, after the target."""
        self.resize_pools(0)
        self._device = self.fc.weight.device
        del self._parts
        if level == 2 or self._device.type != "cpu":
            offload(self.weights, drop=level == 2)

    @torch.no_grad()
    def wake(self, level: int, num_pages: int) -> None:
        """Wake as `PagedModel.wake` does, after the target."""
        if level == 2 or self._device.type != "cpu":
            onload(self.weights, self._device, dropped=level == 2)
        self._parts = self._make_parts()
        self.resize_pools(num_pages)

    @torch.inference_mode()
    def refresh(self) -> None:
        """Parts that were made of weights, its own or the target's, follow them."""
        write_over(self._parts, self._make_parts())

    def _layer(self, index: int, module: Any, heads: HeadLayout) -> Layer:
        projections = module.self_attn
        kv_heads = projections.k_proj.out_features // heads.dim
        q_norm, k_norm = (getattr(projections, norm, None) for norm in ("q_norm", "k_norm"))
        attention = Attention(
            qkv=heads.qkv(kv_heads, projections.q_proj, projections.k_proj, projections.v_proj),
            out=heads.out(projections.o_proj),
            rotations=heads.rotations,
            kv_heads=kv_heads,
            head_dim=heads.size,
            q_norm=None if q_norm is None else heads.norm(rms_norm_of(q_norm)),
            k_norm=None if k_norm is None else heads.norm(rms_norm_of(k_norm)),
            window=window_of(self.config, index),
            scale=heads.dim**-0.5,
        )
        norm = getattr(module, "input_layernorm", None)
        return Layer(
            attention,
            rms_norm_of(module.post_attention_layernorm),
            gated_mlp(module.mlp),
            input_norm=None if norm is None else rms_norm_of(norm),
        )

    def _hold(self, pools: KvPools) -> None:
        self.pools = pools
        attach_caches([layer.mixer for layer in self._parts.layers], pools)

    def resize_pools(self, num_pages: int) -> None:
        """Other pools, empty, with another number of pages."""
        self._hold(self.pools.with_pages(num_pages))

    def join(self, features: Tensor) -> Tensor:
        """One feature [..., H] from the target's states side by side [..., n * H]."""
        raise NotImplementedError

    def forward(
        self,
        tokens: Tensor,
        features: Features,
        positions: Tensor,
        batch: PagedBatch,
        only: Tensor | None = None,
        *,
        depth: int = 0,
    ) -> HeadOutput:
        """All layers of the head.

        Args:
            tokens: [B, Q]. features: of all B * Q rows.
            positions: [B, Q], where rows are rotated.
            only: [R], of all B * Q rows those that have an output, after the KV of all is written; None: all.
            depth: of the rows below the roots of their trees; committed rows have 0.
        """
        raise NotImplementedError

    def enter(self, tokens: Tensor, features: Features) -> tuple[Tensor, Tensor]:
        """What the first layer takes: rows [B * Q, ...], normalised where it asks for that, and the residual stream."""
        raise NotImplementedError

    def prefill(self, tokens: Tensor, features: Features, positions: Tensor, batch: PagedBatch) -> None:
        """`forward` for the sake of the rows' KV."""
        normed, state = self.enter(tokens, features)
        for before, layer in pairwise(self._parts.layers):
            normed, state = layer.enter(*before(normed, state, positions, batch))
        self._parts.layers[-1].mixer.write_cache(normed, positions, batch)

    def pass_layers(
        self, normed: Tensor, state: Tensor, positions: Tensor, batch: PagedBatch, only: Tensor | None
    ) -> tuple[LayerOutput, Tensor | None]:
        """What the norm behind the last layer takes, from what the first one does."""
        first, *others = self._parts.layers
        x, residual = first(normed, state, positions, batch, only=None if others else only)
        for layer in others:
            normed, state = layer.enter(x, residual)
            x, residual = layer(normed, state, positions, batch, only=only if layer is others[-1] else None)
        return x, residual

    def logits(self, normed: Tensor) -> Tensor:
        """[..., Vd] from [..., H]."""
        raise NotImplementedError


H = TypeVar("H", bound=DraftHead)


def config_of_head(kind: type[H], head: str | Path | H) -> LlamaConfig:
    """The config of a checkpoint folder, a hub id or a head that is loaded.

    Raises:
        ValueError: a folder that holds something else; a variant that is not computed here.
    """
    return head.config if isinstance(head, DraftHead) else read_config(kind, folder_of(kind, head))


def num_layers_of(kind: type[H], head: str | Path | H) -> int:
    """How many layers have KV, without reading a tensor."""
    if isinstance(head, DraftHead):
        return len(head.layers)
    names = (name.removeprefix("model.") for name in tensor_names(folder_of(kind, head)))
    return len({match[0] for name in names if (match := LAYER.match(name))})


def own_vocabulary(kind: type[H], head: str | Path | H) -> bool:
    """Whether it drafts from a part of the target's vocabulary that comes with it, without reading a tensor."""
    if isinstance(head, DraftHead):
        return head.id_map is not None
    return any(name.removeprefix("model.") == "d2t" for name in tensor_names(folder_of(kind, head)))


def frequent_tokens(file: str | Path, vocab: int, name: str) -> list[int]:
    """The token ids, rising, of a file that FR-Spec publishes (arXiv 2502.14856): a list or a tensor that torch saved.

    Args:
        file: a path, or a file of a hub id ("thunlp/LLaMA3-Instruct-8B-FR-Spec/freq_32768.pt"). Nothing of it is run.
        vocab: of the target. name: of the argument in errors.

    Raises:
        ValueError: anything but ids of the target's tokens, each once. FileNotFoundError: no such file.
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


def load_head(kind: type[H], source: str | Path | H, target: LanguageModel, *, num_pages: int, page_size: int) -> H:
    """The head of a checkpoint folder or hub id, or one that is loaded, with KV pools of the target's page geometry.

    A checkpoint without `embed_tokens` or `lm_head` shares the target's. Every tensor must find its place.

    Raises:
        ValueError: a folder that holds something else; a variant that is not computed here, or tensors that do not fit,
            by name.
    """
    head: H = copy(source) if isinstance(source, DraftHead) else load_checkpoint(kind, source, target)
    head.is_given = isinstance(source, DraftHead)
    head.prepare(target, num_pages, page_size)
    return head


def folder_of(kind: type[DraftHead], head: str | Path) -> Path:
    folder = local_folder(head, f"{kind.kind.draft}: head")
    expect_kind(folder, kind.kind, f"{kind.name} head")
    return folder


def load_checkpoint(kind: type[H], source: str | Path, target: LanguageModel) -> H:
    folder, name = folder_of(kind, source), f"{kind.name} head"
    config = read_config(kind, folder)
    tensors, first_layer = head_tensors(name, folder)
    check_head(name, config, tensors, target)
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
    shared: dict[str, nn.Module] = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.lm_head}
    faults = faults_of(head, tensors, shared)
    if faults:
        # A tensor is called what the folder calls it.
        raise ValueError(f"{name}: {folder} {' and '.join(faults)}".replace("layers.0.", first_layer))
    for key, module in shared.items():
        if key not in tensors:
            setattr(head, key.removesuffix(".weight"), module)
    head.load_state_dict(tensors, strict=False, assign=True)
    if d2t is not None:
        head.id_map = target_ids(name, d2t, draft_vocab, vocab)
    return head


def read_config(kind: type[DraftHead], folder: Path) -> LlamaConfig:
    """The config of a head's layers, with all that stands beside it.

    In the format of speculators (`speculators_model_type`) the layers' part is `transformer_layer_config`, and what it
    leaves out are the defaults of its own model type.
    """
    name, values = f"{kind.name} head", read_json(folder / "config.json")
    layer = values.get("transformer_layer_config", values)
    if not isinstance(layer, dict):
        raise ValueError(f"{name}: {folder} has transformer_layer_config {layer!r}, expected a config")
    for size in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"):
        value = layer.get(size, 1)
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}: {size} is {value!r}, expected a number from 1 on ({folder})")
    if layer is not values:
        layer = AutoConfig.for_model(**({"model_type": "llama"} | layer)).to_dict()
    others = {key: value for key, value in values.items() if key != "transformer_layer_config"}
    config = LlamaConfig.from_dict(others | layer | {"model_type": "llama"})
    kind.check_config(config)
    return config


def check_head(name: str, config: Any, tensors: Mapping[str, Tensor], target: LanguageModel) -> None:
    """ValueError for a head that layers of ours cannot express, or that does not fit the target."""
    if (head_dim := head_dim_of(config)) > HEAD_DIMS[-1]:
        raise ValueError(f"{name}: head_dim is {head_dim}, expected at most {HEAD_DIMS[-1]}")
    if config.hidden_act != "silu":
        raise ValueError(f"{name}: hidden_act is {config.hidden_act!r}, expected 'silu'")
    width = target.embedding.weight.shape[1]
    for size in ("hidden_size", "target_hidden_size"):
        if getattr(config, size, None) not in (None, width):
            raise ValueError(f"{name}: {size} is {getattr(config, size)}, expected the target's {width}")
    vocab: int = target.config.vocab_size
    if "embed_tokens.weight" in tensors and len(tensors["embed_tokens.weight"]) < vocab:
        rows = len(tensors["embed_tokens.weight"])
        raise ValueError(f"{name}: embed_tokens.weight has {rows} rows, expected at least the target's {vocab}")


def head_tensors(name: str, folder: Path) -> tuple[dict[str, Tensor], str]:
    """The tensors of a head, named as speculators names them, and what the folder calls the first layer.

    Some exporters write "model." in front, those of the papers "midlayer" for "layers.0" of EAGLE-3.
    """
    tensors = {key.removeprefix("model."): tensor for key, tensor in load_tensors(folder).items()}
    tensors = {key: tensor for key, tensor in tensors.items() if not key.endswith(UNUSED)}
    layers = {match[0]: int(match[1] or 0) for key in tensors if (match := LAYER.match(key))}
    if sorted(layers.values()) != list(range(len(layers))) or not layers:
        found = ", ".join(sorted(layer.rstrip(".") for layer in layers)) or "no layer"
        raise ValueError(f"{name}: {folder} has {found}, expected layers from layers.0 on, none missing")
    first = "midlayer." if "midlayer." in layers else "layers.0."
    return {own_name(key): tensor for key, tensor in tensors.items()}, first


def own_name(key: str) -> str:
    """What the head calls the tensor of a checkpoint."""
    return re.sub(r"^midlayer\.", "layers.0.", key.removeprefix("model."))


def faults_of(head: DraftHead, tensors: Mapping[str, Tensor], shared: Mapping[str, nn.Module]) -> list[str]:
    """Where tensors do not fit a head that was made without storage; modules of `shared`, by parameter name, stand in
    for those that are missing.
    """
    expected = {key: list(parameter.shape) for key, parameter in head.state_dict().items()}
    faults = []
    if missing := [key for key in expected if key not in tensors and key not in shared]:
        faults.append(f"lacks {some(missing)}")
    if unknown := [key for key in tensors if key not in expected]:
        faults.append(f"has {some(unknown)}, which this engine does not know")
    for key, tensor in tensors.items():
        if key in expected and list(tensor.shape) != expected[key]:
            faults.append(f"has {key} of shape {list(tensor.shape)}, expected {expected[key]}")
            break
    return faults


def target_ids(name: str, d2t: Tensor, draft_vocab: int, vocab: int) -> Tensor:
    """[Vd] int32: the target's id of each draft id, which stands in a checkpoint as the distance between the two.

    ValueError unless every draft token is a token of the target, and no two are the same one.
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
