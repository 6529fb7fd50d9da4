"""Rotary position embeddings, as a model has them (Su et al. 2021, arXiv 2104.09864)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

# Positions past the longest sequence: the deepest node of a tree, and padding.
SPARE_POSITIONS = 320


class Rope(NamedTuple):
    """Cosines and sines of the angles by which pairs of a head's elements are rotated at each position."""

    cos: Tensor  # [num_positions, pairs] float32
    sin: Tensor
    interleaved: bool = False  # pairs are elements 2i and 2i + 1 of a head, not i and i + pairs

    @classmethod
    def of(cls, rotary: Any, max_len: int, device: torch.device, *kind: str, interleaved: bool = False) -> Rope:
        """Return the table of a transformers rotary module, for sequences of up to `max_len` tokens.

        The table ends after `constant_len` positions, and `rope_qkv_write_kv` reads its last row from there on.
        """
        count = min(max_len + SPARE_POSITIONS, constant_len(rotary.config) or max_len + SPARE_POSITIONS)
        positions = torch.arange(count, device=device)[None]
        if hasattr(rotary, "mrope_section") or "mrope_section" in (
            getattr(rotary.config, "rope_parameters", None) or {}
        ):
            positions = positions.expand(3, 1, -1)  # one for each axis, equal for text
        tables = rotary.to(device)(torch.empty(0, dtype=torch.float32, device=device), positions, *kind)
        if isinstance(tables, Tensor):  # complex numbers
            tables = tables.real, tables.imag
        tables = tuple(table.flatten(0, -3) for table in tables)  # some have a row for each axis, equal for text
        # Most modules give each angle twice: next to each other, or half a table apart.
        pairs = len(rotary.inv_freq) if hasattr(rotary, "inv_freq") else tables[0].shape[-1] // 2
        twice = interleaved and torch.equal(tables[0][..., 0::2], tables[0][..., 1::2])
        cos, sin = (table[0, :, 0::2] if twice else table[0, :, :pairs] for table in tables)
        return cls(cos, sin, interleaved)

    @property
    def table(self) -> Tensor:
        """The cosines of each position and then its sines, [num_positions, 2 * pairs]."""
        return torch.cat([self.cos, self.sin], dim=-1)

    @classmethod
    def none(cls, device: torch.device) -> Rope:
        """Return the table of a layer without rotation."""
        return cls(torch.empty(1, 0, device=device), torch.empty(1, 0, device=device))


def constant_len(config: Any) -> int | None:
    """Return the longest sequence in which a position's angle does not depend on the sequence's length; None: any.

    Up to it, longrope uses its short factors (Ding et al. 2024, arXiv 2402.13753), and dynamic NTK is plain RoPE.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    ends = []
    for each in [parameters, *(part for part in parameters.values() if isinstance(part, dict))]:
        if each.get("rope_type") == "longrope":
            ends.append(each.get("original_max_position_embeddings") or config.original_max_position_embeddings)
        if each.get("rope_type") == "dynamic":
            ends.append(config.max_position_embeddings)
    return min(ends, default=None)
