"""The changes that `specdec doctor` tries, one at a time: of the prompts, the target's KV, or a copy of the draft.

A head is changed in a copy of its folder, whose config.json differs, or whose index takes some tensors from a small
file of its own and all others from the original files. The loader reads both in the same way, so a change that
restores acceptance is a fault that can be corrected in the checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..engine import Draft, Standalone
from ..models.weights.checkpoint import load_tensors, read_json, tensor_files, tensor_names
from .algorithms import draft_class

# Keys of a head's config that select which states are normalized. A loader refuses keys that it does not know.
NORMS = ("norm_before_residual", "norm_before_fc", "norm_output")
LAYERS = "eagle_aux_hidden_state_layer_ids"
NORM = re.compile(r".*norm(?:\.\d+)?\.weight")
SMALL = re.compile(rf"{NORM.pattern}|(?:.*\.)?(?:d2t|t2d|q_proj\.(?:weight|bias))")


@dataclass(frozen=True)
class Prompting:
    """Generation of the texts on which acceptance is measured.

    Attributes:
        template: prompts are conversations in the chat template.
        num_bos: BOS tokens of each prompt; None: those of the tokenizer or the template.
        kv: of the target: "as is", "16 or 32 bit", or "measured": 8-bit KV with measured scales instead of the
            checkpoint's.
    """

    template: bool
    num_bos: int | None = None
    kv: str = "as is"


@dataclass(frozen=True)
class Shift:
    """One change.

    Attributes:
        input: what is changed, one of the names of docs/tuning.md.
        change: what it is changed to.
        remedy: how to make the change permanent.
        draft: creates the draft, which is not open. None: the unchanged one.
        prompting: None: the unchanged one.
        pairing: see `measure`.
    """

    input: str
    change: str
    remedy: str
    draft: Callable[[], Draft] | None = None
    prompting: Prompting | None = None
    pairing: int = 0


@dataclass(frozen=True)
class Head:
    """A checkpoint folder of a head, and changed copies of it.

    Attributes:
        folder: of the head.
        algorithm: EAGLE, EAGLE3 or one of a block drafter.
        num_steps: of the drafted chains.
        scratch: a folder for the copies.
    """

    folder: Path
    algorithm: str
    num_steps: int
    scratch: Path
    tensors: dict[str, Tensor] = field(init=False)  # small tensors, by their names without "model."

    def __post_init__(self) -> None:
        tensors = load_tensors(self.folder, SMALL.fullmatch)
        object.__setattr__(self, "tensors", {name.removeprefix("model."): t for name, t in tensors.items()})

    @property
    def config(self) -> dict[str, Any]:
        """Contents of the head's config.json."""
        config: dict[str, Any] = read_json(self.folder / "config.json")
        return config

    def draft(self, folder: Path | None = None) -> Draft:
        """Return the draft of the head, or of a changed copy."""
        return draft_class(self.algorithm)(folder or self.folder, num_steps=self.num_steps, topk=1)

    def changed(
        self,
        config: dict[str, Any] | None = None,
        tensors: dict[str, Tensor] | None = None,
        without: tuple[str, ...] = (),
    ) -> Callable[[], Draft]:
        """Return a function that creates the draft of a copy with changed config keys or tensors, or `without` some."""

        def make() -> Draft:
            copy = self.scratch / str(len(list(self.scratch.iterdir())))
            copy.mkdir()
            values = {key: value for key, value in (self.config | (config or {})).items() if value is not None}
            (copy / "config.json").write_text(json.dumps(values))
            link(self.folder, copy, tensors or {}, without)
            return self.draft(copy)

        return make


def link(folder: Path, copy: Path, tensors: dict[str, Tensor], without: tuple[str, ...]) -> None:
    """Link the folder's tensors into the copy, except `tensors` and `without`, named without "model."."""
    linked = {n: f for n, f in tensor_files(folder).items() if n.removeprefix("model.") not in {*tensors, *without}}
    for name in set(linked.values()):
        (copy / f"original-{name}").symlink_to((folder / name).resolve())
    weights = {name: f"original-{name_of_file}" for name, name_of_file in linked.items()}
    if tensors:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, copy / "changed.safetensors")
        weights |= dict.fromkeys(tensors, "changed.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))


def head_shifts(head: Head, layers: tuple[int, ...], num_layers: int, vocab_size: int) -> Iterator[Shift]:
    """Yield all changes of a head.

    `layers` are the layers of the target, `num_layers` in all, whose inputs the head reads; empty if it was refused.
    """
    if head.algorithm == "EAGLE3":
        yield from layer_shifts(head, layers, num_layers)
    yield from position_shifts(head)
    yield from norm_shifts(head)
    yield from vocabulary_shifts(head, vocab_size)
    yield from embedding_shifts(head)


def embedding_shifts(head: Head) -> Iterator[Shift]:
    """Yield the target's embedding, if the checkpoint has one of its own."""
    if own := [n for n in tensor_names(head.folder) if n.removeprefix("model.") == "embed_tokens.weight"]:
        yield Shift(
            "embedding",
            "the target's instead of its own",
            f"leave {own[0]} out of the checkpoint",
            head.changed(without=("embed_tokens.weight",)),
        )


def layer_shifts(head: Head, layers: tuple[int, ...], num_layers: int) -> Iterator[Shift]:
    """Yield other feature layers: all one lower or higher, and low, middle and high.

    Some checkpoints name layers by their inputs, others by their outputs.
    """
    usual = (2, num_layers // 2, num_layers - 3)
    named: dict[tuple[int, ...], str] = {}
    for base, what in ((layers, ""), (usual, "low, middle, high; ")):
        for by, how in ((0, "as entered"), (1, "one higher"), (-1, "one lower")):
            named.setdefault(tuple(layer + by for layer in base), what + how)
    for choice, how in named.items():
        if choice == layers or len(choice) != len(layers or usual) or not all(0 <= n <= num_layers for n in choice):
            continue
        yield Shift(
            "feature layers",
            f"{', '.join(map(str, choice))} ({how})",
            f'config.json: "{LAYERS}": {list(choice)} at the top (layers by their inputs)',
            head.changed({LAYERS: list(choice)}),
        )


def position_shifts(head: Head) -> Iterator[Shift]:
    """Yield shifted positions of queries, and those of `row_shifts`.

    Rotary embeddings depend only on distances, so only positions relative to other rows can be wrong: queries to keys,
    drafted rows to those of the text, and features to tokens.
    """
    for by, how in ((1, "later"), (-1, "earlier")):
        if (rotated := rotated_queries(head, by)) is not None:
            yield Shift(
                "position offset",
                f"queries one position {how} than keys",
                "rotate the head's queries and keys as it was trained",
                head.changed(tensors=rotated),
            )
    yield from row_shifts(head.draft)


def row_shifts(make: Callable[[], Draft]) -> Iterator[Shift]:
    """Yield shifted positions of drafted rows and of features, of a draft that `make` creates."""
    for by, how in ((1, "later"), (-1, "earlier")):
        yield Shift(
            "position offset",
            f"drafted rows one position {how} than the text's",
            f"position_offset of the draft: {by:+d}",
            offset_draft(make, by),
        )
        yield Shift(
            "position offset",
            f"features one token {how}",
            "pair rows in training as drafting does: the token i + 1 with the feature of i",
            pairing=by,
        )


def offset_draft(make: Callable[[], Draft], by: int) -> Callable[[], Draft]:
    """Return a function that creates the draft with shifted positions of drafted rows."""

    def make_offset() -> Draft:
        draft: Any = make()
        draft.position_offset += by
        return draft  # type: ignore[no-any-return]

    return make_offset


def rotated_queries(head: Head, by: int) -> dict[str, Tensor] | None:
    """Return weights whose queries are rotated by `by` positions; None if a norm is between the two."""
    if any(name.endswith("q_norm.weight") for name in head.tensors):
        return None
    config = head.config
    layer = LlamaConfig.from_dict({**config, **config.get("transformer_layer_config", {}), "model_type": "llama"})
    angles = LlamaRotaryEmbedding(layer).inv_freq.double() * by  # [head_dim / 2]
    rotated = {}
    for name, tensor in head.tensors.items():
        if name.endswith(("q_proj.weight", "q_proj.bias")):
            cosine, sine = (f(angles)[:, None] for f in (torch.cos, torch.sin))
            first, second = tensor.double().reshape(-1, 2, len(angles), tensor.numel() // len(tensor)).unbind(1)
            turned = torch.stack([first * cosine - second * sine, second * cosine + first * sine], 1)
            rotated[name] = turned.reshape(tensor.shape).to(tensor.dtype)
    return rotated


def norm_shifts(head: Head) -> Iterator[Shift]:
    """Yield switched normalizations, and norm weights with another offset."""
    config = head.config
    nested = config.get("eagle_config") or {}
    for key in NORMS if head.algorithm == "EAGLE3" else ():
        on = bool(config.get(key, nested.get(key, False)))
        yield Shift(
            "norm", f"{key} {'off' if on else 'on'}", f'config.json: "{key}": {str(not on).lower()}',
            head.changed({key: not on}),
        )  # fmt: skip
    norms = {name: tensor for name, tensor in head.tensors.items() if NORM.fullmatch(name)}
    for by, how in ((1, "less one"), (-1, "plus one")):
        if norms:
            yield Shift(
                "norm",
                f"weights were stored {how}",
                f"{'add 1 to' if by > 0 else 'subtract 1 from'} the weights of the head's norms",
                head.changed(tensors={name: tensor + by for name, tensor in norms.items()}),
            )


def vocabulary_shifts(head: Head, vocab_size: int) -> Iterator[Shift]:
    """Yield other readings of the draft vocabulary."""
    d2t, t2d = head.tensors.get("d2t"), head.tensors.get("t2d")
    if d2t is None:
        return
    own = torch.arange(len(d2t))
    readings = [
        ("d2t as target ids", d2t.long(), "store d2t as distances: target id - draft id"),
        ("identity: draft ids are target ids", own, "leave the map at distances of 0"),
    ]
    if t2d is not None:
        readings.append(("the tokens that t2d marks, in order", t2d.nonzero()[:, 0], "make d2t from t2d"))
    tried = [own + d2t.long()]
    for change, ids, remedy in readings:
        distinct = set(ids.tolist())
        fits = len(ids) == len(own) == len(distinct) and distinct <= set(range(vocab_size))
        if fits and not any(torch.equal(ids, other) for other in tried):
            tried.append(ids)
            yield Shift("vocabulary map", change, remedy, head.changed(tensors={"d2t": ids - own}))


def standalone_shifts(folder: Path, num_steps: int, tokenizer: Any, vocab_size: int) -> Iterator[Shift]:
    """Yield a draft model whose tokenizer has other token ids, with its rows in the target's order."""
    try:
        vocabulary: dict[str, int] = AutoTokenizer.from_pretrained(folder).get_vocab()
    except (OSError, ValueError):  # without one it uses the target's
        return
    if tokenizer is None or vocabulary == (wanted := tokenizer.get_vocab()):
        return
    ids = torch.full((vocab_size,), -1)
    for text, token in wanted.items():
        if token < vocab_size:
            ids[token] = vocabulary.get(text, -1)

    def make() -> Draft:
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
        rows = [in_order(module.weight.detach(), ids) for module in (embedding, output)]
        model.config.vocab_size, model.config.tie_word_embeddings = vocab_size, False
        for module, weight in zip((embedding, output), rows, strict=True):
            module.weight = torch.nn.Parameter(weight, requires_grad=False)
        embedding.num_embeddings = output.out_features = vocab_size
        return Standalone(model, num_steps=num_steps, topk=1)

    yield Shift(
        "vocabulary map", "tokens by their text", "draft with a model that has the target's tokenizer", draft=make
    )


def in_order(weight: Tensor, ids: Tensor) -> Tensor:
    """Return rows [len(ids), H] of the weight; their mean for tokens without a row."""
    there = (ids >= 0) & (ids < len(weight))
    return torch.where(there[:, None], weight[ids.where(there, 0)], weight.mean(0))


def prompting_shifts(as_is: Prompting, has_template: bool, num_bos: int | None, fp8: bool) -> Iterator[Shift]:
    """Yield other templates, BOS tokens and KV dtypes.

    `num_bos` is that of the unchanged prompts; None if the tokenizer has no BOS token.
    """
    if has_template:
        on = not as_is.template
        yield Shift(
            "template", "with the chat template" if on else "without the chat template",
            f"send prompts {'as chat' if on else 'without the template, or correct it'}",
            prompting=Prompting(on),
        )  # fmt: skip
    for count, name in enumerate(("no BOS", "one BOS", "two BOS")):
        if num_bos is not None and count != num_bos:
            yield Shift("template", name, f"give prompts {name}", prompting=Prompting(as_is.template, count))
    if fp8:
        for kv, change, remedy in (
            ("16 or 32 bit", "16 or 32 bit", "no kv_dtype"),
            ("measured", "8 bit with measured scales", "leave the scales out of the checkpoint"),
        ):
            yield Shift("KV dtype", change, remedy, prompting=Prompting(as_is.template, None, kv))
