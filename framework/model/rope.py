"""Rotary position embedding (Su et al. 2021) in the rotate-half layout that Llama checkpoints use.

Angles are computed in fp32 in each forward pass and never stored in the module: module.half() and module.bfloat16()
cast buffers, and a position of 4000 in bf16 is off by up to 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]
"""cos and sin of the angles, fp32, each [..., seq, 1, head_dim / 2]; the 1 is the axis of heads."""


def rotation(positions: Tensor, head_dim: int, theta: float) -> Rotation:
    """Angles position * theta^(-2i / head_dim) for i < head_dim / 2 (Su et al. 2021, eq. 15).

    `positions` is [..., seq] of integers; `head_dim` must be even.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.float()[..., None, None] * theta**-exponents
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of [batch, seq, heads, head_dim] by their angles, in fp32 (eq. 34)."""
    cos, sin = rotation  # fp32, so that the products with half heads are fp32 too
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
