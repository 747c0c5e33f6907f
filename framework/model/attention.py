"""Causal self-attention with grouped key and value heads (Vaswani et al. 2017; Ainslie et al. 2023)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from framework.config import schema
from framework.model.fork import Fork
from framework.model.norm import HeadNorm
from framework.model.places import Places
from framework.model.rope import rotate


class Attention(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v per head, each position seeing itself and what came before.

    Head counts are read from the widths of the projections' outputs, so that a rank which keeps some of the heads
    runs the same forward.
    """

    def __init__(self, model: schema.Model) -> None:
        super().__init__()
        self.head_dim = model.head_width
        self.core: nn.Module = Core(model.dropout)
        queries, keys = model.num_heads * self.head_dim, model.kv_heads * self.head_dim
        self.q_proj = nn.Linear(model.hidden_size, queries, bias=model.qkv_bias)
        self.k_proj = nn.Linear(model.hidden_size, keys, bias=model.qkv_bias)
        self.v_proj = nn.Linear(model.hidden_size, keys, bias=model.qkv_bias)
        self.o_proj = nn.Linear(queries, model.hidden_size, bias=model.out_bias)
        self.q_norm = HeadNorm(self.head_dim, model.norm_eps) if model.qk_norm else None
        self.k_norm = HeadNorm(self.head_dim, model.norm_eps) if model.qk_norm else None
        self.fork = Fork(self.q_proj, self.k_proj, self.v_proj)

    def forward(self, hidden: Tensor, places: Places) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        query, key, value = (projected.unflatten(-1, (-1, self.head_dim)) for projected in self.fork(hidden))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if places.rotation is not None:
            query, key = rotate(query, places.rotation), rotate(key, places.rotation)
        return self.o_proj(self.core(query, key, value, places).flatten(-2))


class Core(nn.Module):
    """The attention itself, between the projections: the one place where positions meet."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor, places: Places) -> Tensor:
        """As causal_attention, with dropout while training."""
        return causal_attention(query, key, value, self.dropout if self.training else 0.0, places.mask)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float, mask: Tensor | None = None) -> Tensor:
    """Query [batch, seq, heads, head_dim], key and value [batch, seq, kv_heads, head_dim] -> the shape of query.

    `dropout` is the probability of dropping an attention weight. `mask` [batch, 1, seq, seq], in the type of query, is added to
    the scores, and says all about what a token sees (places.document_mask); without it a token sees itself and all before it.
    """
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and (query.dtype == torch.float32 or mask is not None):
        # The flash kernels take grouped heads but neither fp32 nor a mask; the memory-efficient one takes both but no grouped heads.
        # Left grouped, these would fall back, on an accelerator, to a kernel that keeps all seq x seq weights.
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        groups = 1
    mixed = F.scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=groups > 1)
    return mixed.transpose(1, 2)
