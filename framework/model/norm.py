"""RMSNorm and LayerNorm over the last axis, computed in fp32 whatever the type of weights and activations.

tests/model/test_norm.py holds values and gradients to it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from framework.config import schema


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019, eq. 4)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] -> [..., width], in the type that came in."""
        # Takes half types and computes in fp32 inside; a fused kernel then keeps no fp32 copy of the input for the backward pass.
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class HeadNorm(RMSNorm):
    """An RMS norm over each head by itself, one weight for all heads (Dehghani et al. 2023, section 2.1).

    A class of its own because tensor ranks have some of the heads each: its gradient there is a part of the sum.
    """


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias (Ba et al. 2016, eq. 4)."""

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] -> [..., width], in the type that came in."""
        # Cast, because for half types torch's CPU kernel keeps mean and root in half precision for the backward pass.
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(hidden.float(), self.weight.shape, self.weight.float(), bias, self.eps).to(hidden.dtype)


def make_norm(model: schema.Model) -> RMSNorm | LayerNorm:
    """The norm that the settings ask for, over the residual stream."""
    if model.norm == "rmsnorm":
        return RMSNorm(model.hidden_size, model.norm_eps)
    return LayerNorm(model.hidden_size, model.norm_eps, model.bias)
