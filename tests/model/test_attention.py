"""Causal attention against loops in float64, and the place of its dropout."""

from __future__ import annotations

import math

import pytest
import torch

from framework.model.attention import causal_attention


def weights_by_hand(query: torch.Tensor, key: torch.Tensor, head: int) -> torch.Tensor:
    """Softmax weights [seq, seq] of one head of the first sequence, in float64."""
    groups = query.shape[2] // key.shape[2]
    q, k = query[0, :, head].double(), key[0, :, head // groups].double()
    table = torch.zeros(len(q), len(q), dtype=torch.float64)
    for i in range(len(q)):
        powers = [math.exp(float(q[i] @ k[j]) / math.sqrt(q.shape[-1])) for j in range(i + 1)]
        table[i, : i + 1] = torch.tensor(powers, dtype=torch.float64) / sum(powers)
    return table


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_against_loops(heads: int, kv_heads: int, dtype: torch.dtype, tolerance: float) -> None:
    """Both ways of grouped heads: repeated in fp32, left to the kernel in half precision."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 7, heads, 6, generator=generator).to(dtype)
    key, value = torch.randn(2, 1, 7, kv_heads, 6, generator=generator).to(dtype).unbind()
    mixed = causal_attention(query, key, value, dropout=0.0)
    assert (mixed.shape, mixed.dtype) == (query.shape, dtype)
    for head in range(heads):
        wanted = weights_by_hand(query, key, head) @ value[0, :, head // (heads // kv_heads)].double()
        torch.testing.assert_close(mixed[0, :, head].double(), wanted, rtol=0, atol=tolerance)


def test_dropout_falls_on_the_weights() -> None:
    """With the unit vectors as values the output is the weights: each is 0 or 1 / (1 - p) of what it was."""
    torch.manual_seed(0)
    seq, heads, p = 48, 2, 0.25
    query, key = torch.randn(2, 1, seq, heads, seq).unbind()
    value = torch.eye(seq)[None, :, None].expand(1, seq, heads, seq)
    dropped = causal_attention(query, key, value, dropout=p)
    kept = 0
    for head in range(heads):
        wanted, got = weights_by_hand(query, key, head), dropped[0, :, head].double()
        alive = got != 0
        torch.testing.assert_close(got[alive], wanted[alive] / (1 - p), rtol=1e-4, atol=1e-7)
        kept += int(alive.sum())
    total = heads * seq * (seq + 1) // 2
    assert abs(kept - total * (1 - p)) < 5 * math.sqrt(total * p * (1 - p))
