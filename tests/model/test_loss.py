"""The loss against float64, with ignored positions and in half precision."""

from __future__ import annotations

import math

import pytest
import torch

from framework.model.loss import IGNORE, token_loss_sum


def test_sum_over_the_positions_that_count() -> None:
    logits = torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(0)) * 4
    targets = torch.tensor([[1, IGNORE, 10], [IGNORE, 0, 5]])
    wanted = 0.0
    for row in range(2):
        for at in range(3):
            if targets[row, at] != IGNORE:
                scores = logits[row, at].tolist()
                wanted += math.log(sum(math.exp(score) for score in scores)) - scores[targets[row, at]]
    assert token_loss_sum(logits, targets).item() == pytest.approx(wanted, rel=1e-6)


def test_nothing_to_learn_is_zero_and_so_is_its_gradient() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = token_loss_sum(logits, torch.full((2, 3), IGNORE))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros(2, 3, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_logits_are_summed_in_fp32(dtype: torch.dtype) -> None:
    """4096 equal tokens over 100 equal logits: 4096 ln 100 = 18863.2, which bf16 knows to 64 and fp16 to 8."""
    loss = token_loss_sum(torch.zeros(4, 1024, 100, dtype=dtype), torch.zeros(4, 1024, dtype=torch.long))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(4096 * math.log(100), rel=1e-6)
