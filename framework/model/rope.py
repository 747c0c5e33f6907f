"""Rotary position embedding (Su et al. 2021) in the rotate-half layout that Llama checkpoints use.

Angles are computed in fp32 in each forward pass and never stored in the module: module.half() and module.bfloat16()
cast buffers, and a position of 4000 in bf16 is off by up to 8.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from framework.config import schema

Rotation = tuple[Tensor, Tensor]
"""cos and sin of the angles, fp32, each [..., seq, 1, head_dim / 2]; the 1 is the axis of heads."""


def frequencies(head_dim: int, theta: float, device: torch.device | None = None) -> Tensor:
    """theta^(-2i / head_dim) for i < head_dim / 2, fp32 (Su et al. 2021, eq. 15). `head_dim` must be even."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    return 1.0 / theta**exponents  # not theta**-exponents, which rounds otherwise than what published weights were trained with


def scaled(turns: Tensor, model: schema.Model) -> Tensor:
    """The frequencies `turns` as the settings stretch them for longer sequences.

    linear: all are divided by rope_factor (Chen et al. 2023, section 2.3). llama3: those whose wave is longer than
    rope_original_positions / rope_low_freq are divided, those shorter than rope_original_positions / rope_high_freq stay, and
    between the two it is a straight line (Grattafiori et al. 2024, section 3.4.2; the formula is that of Meta's released code).
    """
    if model.rope_scaling == "none":
        return turns
    stretched = turns / model.rope_factor
    if model.rope_scaling == "linear":
        return stretched
    waves = model.rope_original_positions * turns / (2 * math.pi)  # of each frequency, in the original length
    share = (waves - model.rope_low_freq) / (model.rope_high_freq - model.rope_low_freq)
    return torch.lerp(stretched, turns, share.clamp(0.0, 1.0))


def rotation(positions: Tensor, turns: Tensor) -> Rotation:
    """Angles position * frequency. `positions` is [..., seq] of integers, `turns` the frequencies [head_dim / 2]."""
    angles = positions.float()[..., None, None] * turns
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of [batch, seq, heads, head_dim] by their angles, in fp32 (eq. 34)."""
    cos, sin = rotation  # fp32, so that the products with half heads are fp32 too
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
