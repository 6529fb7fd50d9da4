"""Multi-token-prediction (MTP) layers in checkpoints of language models: a value for each layout that is published.

An MTP layer predicts token i+2 from the embedding of token i+1 and a state of position i. Both are normalized and
concatenated; a projection makes them the input of one decoder layer. docs/heads.md has the source of each fact.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .checkpoint import does_not_fit

LEFT_OUT = "specdec_left_out"  # attribute of a target: prefixes of tensors in its checkpoint that it leaves out

# Modules of an `MtpHead`.
EMBEDDING_NORM, STATE_NORM, PROJECTION = "embedding_norm", "state_norm", "fc"
# Modules of the language model in it, which some families call otherwise.
LAYERS, FINAL_NORM, EMBEDDING, LM_HEAD = "model.layers", "model.norm", "model.embed_tokens", "lm_head"


@dataclass(frozen=True)
class MtpLayout:
    """Names of an MTP layer's modules in a checkpoint, and what no tensor shows about it.

    Names follow `prefix`. "{layer}" in the prefix stands for the number of the target's layers, "{last}" in a name for
    the index of the last layer in the block.

    Attributes:
        prefix: of all its tensors.
        index: a pattern of names, whose group is the index of an MTP layer.
        embedding_norm, state_norm, projection, block: modules; the block is the decoder layer, "" if its parts follow
            the prefix.
        has_layers: the block is a list of layers, with an index in their names.
        final_norm: the norm before the LM head; None: the target's.
        embedding, lm_head: modules of its own, in checkpoints that have them; None: it shares the target's.
        state_first: the projection reads [state, embedding] instead of [embedding, state].
        zeroes_first_embedding: the embedding is zero at position 0.
        reads_normed_state: the first draft step reads the target's state after its final norm, instead of before it.
        passes_normed_state: the next draft step reads the layer's state after the final norm, instead of before it.
        has_chains: several layers are a chain: layer m drafts at depth m + 1, from the state of layer m - 1.
    """

    prefix: str
    index: str
    embedding_norm: str
    state_norm: str
    projection: str
    block: str
    final_norm: str | None
    embedding: str | None = None
    lm_head: str | None = None
    state_first: bool = False
    has_layers: bool = False
    zeroes_first_embedding: bool = False
    reads_normed_state: bool = True
    passes_normed_state: bool = True
    has_chains: bool = False

    @property
    def modules(self) -> dict[str, str]:
        """Return our name of each module that has one of its own in the checkpoint, by the name there."""
        named = {
            self.embedding_norm: EMBEDDING_NORM,
            self.state_norm: STATE_NORM,
            self.projection: PROJECTION,
            self.final_norm: FINAL_NORM,
            self.embedding: EMBEDDING,
            self.lm_head: LM_HEAD,
        }
        return {stored: own for stored, own in named.items() if stored is not None}

    @property
    def own_block(self) -> str:
        """Our name of the block."""
        return LAYERS if self.has_layers else f"{LAYERS}.0"

    def own_name(self, key: str) -> str:
        """Return our name of a tensor whose name under the prefix is `key`."""
        module, _, parameter = key.rpartition(".")
        if module in self.modules:
            return f"{self.modules[module]}.{parameter}"
        block = f"{self.block}." if self.block else ""
        return f"{self.own_block}.{key.removeprefix(block)}" if key.startswith(block) else key

    def stored_name(self, own: str) -> str:
        """Return the name under the prefix of a tensor that we call `own`."""
        module, _, parameter = own.rpartition(".")
        stored = next((stored for stored, ours in self.modules.items() if ours == module), None)
        if stored is not None:
            return f"{stored}.{parameter}"
        block = f"{self.block}." if self.block else ""
        return own.replace(f"{self.own_block}.", block, 1)

    def prefix_of(self, num_layers: int) -> str:
        """Return the prefix in a checkpoint of a target with `num_layers` layers."""
        return self.prefix.format(layer=num_layers)

    def fits(self, names: Iterable[str], num_layers: int) -> bool:
        """Return whether a checkpoint with tensors of these names has an MTP layer of this layout, if only in part.

        One of the projection and the norms before it may be missing. The projection alone may be an EAGLE head's.
        """
        modules = {self.projection, self.state_norm, self.embedding_norm}
        wanted = {f"{self.prefix_of(num_layers)}{module}.weight" for module in modules}
        return len(wanted.intersection(names)) >= 2

    def has_final_norm(self, names: Iterable[str], num_layers: int) -> bool:
        """Return whether a checkpoint has the norm before the LM head, by which layouts of the same prefix differ."""
        return f"{self.prefix_of(num_layers)}{self.final_norm}.weight" in names

    def layers(self, names: Iterable[str], num_layers: int) -> list[int]:
        """Return the indices of MTP layers, increasing."""
        indices = {int(match[1]) for name in names if (match := re.match(self.index, name))}
        return sorted(index for index in indices if "{layer}" not in self.prefix or index >= num_layers)

    def prefixes(self, names: Iterable[str], num_layers: int) -> tuple[str, ...]:
        """Return the prefixes of all MTP layers."""
        if "{layer}" not in self.prefix:
            return (self.prefix,)
        return tuple(self.prefix.format(layer=index) for index in self.layers(names, num_layers))


# GLM-4.5, 4.6 and 4.7, and other checkpoints in DeepSeek-V3's layout with attention that the target's family has.
NEXTN = MtpLayout(
    prefix="model.layers.{layer}.",
    index=r"model\.layers\.(\d+)\.",
    embedding_norm="enorm",
    state_norm="hnorm",
    projection="eh_proj",
    block="",
    final_norm="shared_head.norm",
    embedding="embed_tokens",
    lm_head="shared_head.head",
    has_chains=True,
)

# Hunyuan 3 (HY3), whose layer shares the target's embedding and LM head.
HY_V3 = replace(NEXTN, final_norm="final_layernorm", embedding=None, lm_head=None, has_chains=False)

# Step-3.5, whose layers pass their states on before the norm, each with an LM head of its own.
STEP = replace(
    NEXTN,
    final_norm="transformer.shared_head.norm",
    embedding=None,
    lm_head="transformer.shared_head.output",
    reads_normed_state=False,
    passes_normed_state=False,
)

MIMO = MtpLayout(
    prefix="model.mtp_layers.",
    index=r"model\.mtp_layers\.(\d+)\.",
    embedding_norm="0.token_layernorm",
    state_norm="0.hidden_layernorm",
    projection="0.input_proj",
    block="0",
    final_norm="0.final_layernorm",
    state_first=True,
    zeroes_first_embedding=True,
)

ERNIE = MtpLayout(
    prefix="model.mtp_",
    index=r"model\.mtp_block\.(\d+)\.",
    embedding_norm="emb_norm.0",
    state_norm="hidden_norm.0",
    projection="linear_proj.0",
    block="block.0",
    final_norm=None,
    zeroes_first_embedding=True,
)

# Qwen3-Next and Qwen3.5; K-EXAONE has the same names.
QWEN = MtpLayout(
    prefix="mtp.",
    index=r"mtp\.layers\.(\d+)\.",
    embedding_norm="pre_fc_norm_embedding",
    state_norm="pre_fc_norm_hidden",
    projection="fc",
    block="layers.0",
    final_norm="norm",
    embedding="embed_tokens",
    lm_head="lm_head",
)

# Nemotron-H, whose MTP layer is a few layers of one part each.
NEMOTRON = MtpLayout(
    prefix="mtp.",
    index=r"mtp\.layers\.(\d+)\.eh_proj\.",
    embedding_norm="layers.0.enorm",
    state_norm="layers.0.hnorm",
    projection="layers.0.eh_proj",
    block="layers",
    final_norm="layers.{last}.final_layernorm",
    has_layers=True,
)

LAYOUTS = (NEXTN, HY_V3, STEP, MIMO, ERNIE, QWEN, NEMOTRON)

# Names of tensors in MTP layers that are not computed here, by what they show.
OTHERS = {
    "LongCat-Flash's MTP layer": r"model\.mtp\.layers\.\d+\.[eh]norm\.m\.weight",
    "MiMo-V2's MTP layers": r"model\.mtp\.layers\.\d+\.eh_proj\.weight",
    "HY-V4's MTP layers": r"model\.mtp_layers\.\d+\.eh_proj\.weight",
    "a DSpark drafter": r"mtp\.(.*\.)?(main_proj|markov_head|confidence_head)\..*",
}


def layout_of(names: Iterable[str], num_layers: int) -> MtpLayout | None:
    """Return the layout of a checkpoint's MTP layer, by its tensors' names; None: it has no layer that we know."""
    names = set(names)
    fitting = [layout for layout in LAYOUTS if layout.fits(names, num_layers)]
    return max(fitting, key=lambda layout: layout.has_final_norm(names, num_layers), default=None)


def mtp_prefixes(names: Iterable[str], num_layers: int) -> tuple[str, ...]:
    """Return the prefixes of a checkpoint's MTP layers; none if it has none."""
    names = set(names)
    layout = layout_of(names, num_layers)
    return () if layout is None else layout.prefixes(names, num_layers)


def find_layout(names: Iterable[str], num_layers: int, what: str) -> tuple[MtpLayout, int]:
    """Return the layout of a checkpoint, in errors `what`, and the number of its MTP layers.

    Raises:
        ValueError: no MTP layer, with the prefixes where one would be; one of another layout, by name; several in a
            layout whose chains are not known, or with one missing between them.
    """
    names = set(names)
    for kind, pattern in OTHERS.items():
        for name in sorted(names):
            if re.fullmatch(pattern, name):
                raise ValueError(f"{what} has {name} of {kind}, expected another layout (not supported)")
    layout = layout_of(names, num_layers)
    if layout is None:
        prefixes = list(dict.fromkeys(repr(each.prefix_of(num_layers)) for each in LAYOUTS))
        raise ValueError(
            f"{what} has no MTP layer under {', '.join(prefixes[:-1])} or {prefixes[-1]}, expected one "
            "(some exporters and quantizers drop these tensors)"
        )
    layers = layout.layers(names, num_layers)
    if not layers:
        projection = layout.prefix_of(num_layers) + layout.stored_name(f"{PROJECTION}.weight")
        raise does_not_fit(what, f"lacks {projection}", "layer")
    found = ", ".join(map(str, layers))
    if len(layers) > 1 and not layout.has_chains:
        raise ValueError(f"{what} has MTP layers {found}, expected one alone (a chain of this layout is not supported)")
    if layout.has_chains and layers != [*range(num_layers, num_layers + len(layers))]:
        raise ValueError(f"{what} has MTP layers {found}, expected one after another from {num_layers} on")
    if layout.has_layers and layout.final_norm is not None:
        inside = (re.match(rf"{re.escape(layout.prefix + layout.block)}\.(\d+)\.", name) for name in names)
        last = max(int(match[1]) for match in inside if match)
        layout = replace(layout, final_norm=layout.final_norm.format(last=last))
    return layout, len(layers)
