"""What all draft heads over a target's states are: one decoder layer with KV pools of its own."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .attention import KvPools, Rows, attach_pools, resize_pools
from .causal_lm import SUPPORTED_HEAD_DIMS, CausalLM, head_dim_of
from .layers import Layer, rotations_of


class Features(NamedTuple):
    """A feature for each row, of the target's or the head's own output."""

    table: Tensor  # [F, H]
    rows: Tensor | None = None  # [T] int32, of the table; None: row by row


class HeadOutput(NamedTuple):
    """Of each row [T, H]."""

    hidden: Tensor  # the feature of a recursive row
    normed: Tensor  # what `logits` takes


class DraftHead(nn.Module):
    """Proposes token i+2 from token i+1 and a feature of position i: the target's, or for its own tokens its output.

    Its parameters carry the checkpoint's names. `id_map` [Vd] int32 translates draft ids to target ids (None: the
    vocabularies are one).
    """

    id_map: Tensor | None
    pools: KvPools

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("id_map", None, persistent=False)

    @property
    def decoder(self) -> Any:
        """The module that holds the one layer's parameters."""
        raise NotImplementedError

    def prepare(self, target: CausalLM, num_pages: int, page_size: int) -> None:
        """Makes ready for `forward`: on the target's device and in its dtype, with KV pools of its page geometry."""
        weight, config = target.embedding.weight, self.config
        head_dim, attention = head_dim_of(config), self.decoder.self_attn
        self.to(device=weight.device, dtype=weight.dtype).requires_grad_(False).eval()
        self.rotations = rotations_of(LlamaRotaryEmbedding(config), target.max_len, weight.device)
        kv_heads = attention.k_proj.out_features // head_dim
        self._layer = Layer(self.decoder)
        self.pools = attach_pools([attention], kv_heads, head_dim, num_pages, page_size, like=weight)

    def resize_pools(self, num_pages: int) -> None:
        """Other pools, empty, with another number of pages."""
        self.pools = resize_pools([self.decoder.self_attn], self.pools, num_pages)

    def join(self, features: Tensor) -> Tensor:
        """One feature [..., H] from the target's states side by side [..., n * H]."""
        raise NotImplementedError

    def forward(
        self, tokens: Tensor, features: Features, positions: Tensor, rows: Rows, only: Tensor | None = None
    ) -> HeadOutput:
        """The head's one layer.

        Args:
            tokens: [B, Q]. features: of all B * Q rows.
            positions: [B, Q], where rows are rotated.
            only: [R], of all B * Q rows those that have an output, after the KV of all is written; None: all.
        """
        raise NotImplementedError

    def logits(self, normed: Tensor) -> Tensor:
        """[..., Vd] from [..., H]."""
        raise NotImplementedError


class AttentionParameters(nn.Module):
    """The parameters of an attention that reads rows of `inputs` numbers."""

    def __init__(self, config: Any, inputs: int, bias: bool) -> None:
        super().__init__()
        self.head_dim = head_dim_of(config)
        query, key = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(inputs, query, bias=bias)
        self.k_proj = nn.Linear(inputs, key, bias=bias)
        self.v_proj = nn.Linear(inputs, key, bias=bias)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=config.attention_bias)


def check_head(name: str, config: Any, target: CausalLM) -> None:
    """ValueError for a head that one layer of ours cannot express, or that does not fit the target."""
    if config.num_hidden_layers != 1:
        raise ValueError(f"{name} head: num_hidden_layers is {config.num_hidden_layers}, expected 1")
    if head_dim_of(config) not in SUPPORTED_HEAD_DIMS:
        raise ValueError(f"{name} head: head_dim is {head_dim_of(config)}, expected one of {SUPPORTED_HEAD_DIMS}")
    width = target.embedding.weight.shape[1]
    if config.hidden_size != width:
        raise ValueError(f"{name} head: hidden_size is {config.hidden_size}, expected the target's {width}")


def load_parameters(name: str, head: DraftHead, tensors: dict[str, Tensor], shared: dict[str, nn.Module]) -> None:
    """Every tensor must find its place; modules of `shared`, by parameter name, stand in for those that are missing."""
    missing, unexpected = head.load_state_dict(tensors, strict=False)
    missing = [parameter for parameter in missing if parameter not in shared]
    if missing or unexpected:
        raise ValueError(f"{name} head: tensors are missing {missing} or unknown {unexpected}, expected neither")
    for parameter, module in shared.items():
        if parameter not in tensors:
            setattr(head, parameter.removesuffix(".weight"), module)
