"""The resources that an engine provides for a draft, known before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ...models.families import kv_heads_of, largest, latent_row_of, pool_dim_of


class AttentionCall(NamedTuple):
    """The static part of a call of `tree_attention`, or of `mla_tree_attention`, in a round.

    Attributes:
        q_rows: query rows of each request; a tree of fewer nodes has as many as nodes. None: packed rows, the nodes of
            all requests.
        q_heads, kv_heads, head_dim: as the tensors have them.
        follows_kv_dtype: its pools have the engine's `kv_dtype`; else the dtype of the weights.
        per_round: such calls of a round: layers times passes.
        latent_dim: elements of the value in a latent row of `head_dim` elements; None: `tree_attention`.
        in_8_bits: its pools are in 8 bits, whatever the engine's are.
    """

    q_rows: int | None
    q_heads: int
    kv_heads: int
    head_dim: int
    follows_kv_dtype: bool
    per_round: int = 1
    latent_dim: int | None = None
    in_8_bits: bool = False

    @classmethod
    def of(cls, config: Any, q_rows: int | None, follows_kv_dtype: bool, per_round: int | None = None) -> AttentionCall:
        """Return the call of the layers of a model with this config; `per_round` None: one pass through them."""
        heads = largest(config, "num_attention_heads") or 0, kv_heads_of(config)
        latent_dim = config.kv_lora_rank if latent_row_of(config) else None
        count = per_round or config.num_hidden_layers
        return cls(q_rows, *heads, pool_dim_of(config), follows_kv_dtype, count, latent_dim)


@dataclass(frozen=True)
class Needs:
    """The resources that an engine provides for a draft.

    Attributes:
        num_nodes: N, most nodes of a tree, the root included: 1 to 256.
        accept_width: S, most tokens that a round can emit: the nodes of the longest path, the root included.
        feature_layers: layers of the target whose input hidden states `prefill` and `extend` receive, concatenated in
            this order; the number of layers itself names the state that enters the final norm.
        tensor_prefixes: tensors of the target's checkpoint under these prefixes are the draft's; the target leaves
            them out.
        scratch_rows: KV rows after the committed ones that `propose` writes into the draft's own pools.
        kv_numbers: elements of a KV row in the draft's own pools, keys and values of all layers together; 0: it has no
            pools, and pages that have left the windows of the target's layers may be freed.
        kv_windows: sliding windows of the layers that these pools are of; None: a layer sees all rows.
        attention: the attention calls of `propose` and `extend`, by which captured rounds are split into KV buckets. A
            call that is not named here is correct too, but may run the kernel for longer KV.
        max_idle_rounds: rounds that a slot's draft can be idle before it must catch up (`Idleable`); 0: never idle.
        num_steps: levels of its deepest tree, where each level is a forward pass of a model: rounds with few rows for
            each request ask for trees of at most as many levels. 0: depth costs nothing.
        lookahead: row i of its own pools depends on tokens 0 to i + lookahead.
        scored_before_draw: of a `sampled` draft, whether a drawn node's score depends on the tokens before it alone,
            and not on its own. Then rounds may cut chains by their scores; else all requests have as many nodes.
    """

    num_nodes: int
    accept_width: int
    feature_layers: tuple[int, ...] = ()
    tensor_prefixes: tuple[str, ...] = ()
    scratch_rows: int = 0
    kv_numbers: int = 0
    kv_windows: tuple[int | None, ...] = (None,)
    attention: tuple[AttentionCall, ...] = ()
    max_idle_rounds: int = 0
    num_steps: int = 0
    lookahead: int = 1
    scored_before_draw: bool = False
