"""Rotary positions against complex multiplication in Python's own floats."""

from __future__ import annotations

import cmath

import pytest
import torch

from framework.model.rope import frequencies, rotate, rotation


def test_pairs_turn_by_position_times_frequency() -> None:
    head_dim, theta, seq = 8, 10000.0, 5
    heads = torch.randn(1, seq, 2, head_dim, generator=torch.Generator().manual_seed(0))
    turned = rotate(heads, rotation(torch.arange(seq), frequencies(head_dim, theta)))
    for position in range(seq):
        for head in range(2):
            for i in range(head_dim // 2):
                pair = complex(heads[0, position, head, i], heads[0, position, head, i + head_dim // 2])
                wanted = pair * cmath.exp(1j * position * theta ** (-2 * i / head_dim))
                got = complex(turned[0, position, head, i], turned[0, position, head, i + head_dim // 2])
                assert got == pytest.approx(wanted, abs=1e-6)


def test_products_depend_on_distance_only() -> None:
    query, key = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(1)).unbind()

    def product(query_at: int, key_at: int) -> float:
        a, b = (rotation(torch.tensor([at]), frequencies(16, 500.0)) for at in (query_at, key_at))
        return (rotate(query, a) * rotate(key, b)).sum().item()

    assert product(3, 1) == pytest.approx(product(103, 101), abs=1e-5)
    assert product(3, 1) != pytest.approx(product(3, 2), abs=1e-3)


def test_each_row_of_a_batch_may_have_its_own_positions() -> None:
    heads = torch.randn(2, 3, 1, 4, generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([[0, 1, 2], [7, 0, 1]])
    together = rotate(heads, rotation(positions, frequencies(4, 100.0)))
    for row in range(2):
        assert torch.equal(together[row : row + 1], rotate(heads[row : row + 1], rotation(positions[row], frequencies(4, 100.0))))


def test_half_heads_keep_their_type_and_far_positions_their_angle() -> None:
    heads = torch.zeros(1, 1, 1, 2, dtype=torch.bfloat16)
    heads[..., 0] = 1.0
    turned = rotate(heads, rotation(torch.tensor([4001]), frequencies(2, 10000.0)))
    assert turned.dtype == torch.bfloat16
    wanted = cmath.exp(4001j)  # in bf16 the position itself would be 4000 and the cosine -0.73 instead of 0.18
    assert complex(*turned.flatten().tolist()) == pytest.approx(wanted, abs=2.0**-8)
