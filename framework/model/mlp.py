"""The feed-forward half of a block: gated SiLU or GELU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from framework.config import schema
from framework.model.fork import Fork


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, eq. 6)."""

    def __init__(self, model: schema.Model) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(model.hidden_size, model.ffn_hidden_size, bias=model.bias)
        self.up_proj = nn.Linear(model.hidden_size, model.ffn_hidden_size, bias=model.bias)
        self.down_proj = nn.Linear(model.ffn_hidden_size, model.hidden_size, bias=model.bias)
        self.fork = Fork(self.gate_proj, self.up_proj)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        return self.down_proj(self.activate(*self.fork(hidden)))

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        """[..., ffn], twice -> [..., ffn]."""
        return F.silu(gate) * up


class GELU(nn.Module):
    """down(gelu(up(x))) with the tanh approximation, as in GPT-2 (Hendrycks & Gimpel 2016, section 2)."""

    def __init__(self, model: schema.Model) -> None:
        super().__init__()
        self.up_proj = nn.Linear(model.hidden_size, model.ffn_hidden_size, bias=model.bias)
        self.down_proj = nn.Linear(model.ffn_hidden_size, model.hidden_size, bias=model.bias)
        self.fork = Fork(self.up_proj)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        return self.down_proj(self.activate(*self.fork(hidden)))

    def activate(self, up: Tensor) -> Tensor:
        """[..., ffn] -> [..., ffn]."""
        return F.gelu(up, approximate="tanh")


def make_mlp(model: schema.Model) -> SwiGLU | GELU:
    """The feed-forward layer that the settings ask for."""
    return SwiGLU(model) if model.mlp == "swiglu" else GELU(model)
