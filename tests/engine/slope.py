"""A model whose true gradient is 0.0100 in every weight, whatever the weights are: what is left is how gradients are summed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from framework.data.pack import MicroBatch
from tests.engine import tiny
from tests.engine.tiny import Form, Layout

TRUE_GRADIENT = 0.01
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Slope(nn.Module):
    """Loss of a token = 0.01 x sum of the weights, as a matrix product, so that autocast takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 3, bias=False)
        nn.init.zeros_(self.linear.weight)  # so that the weights after one step are the gradient, without a subtraction's rounding

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """ids [1, 1] -> the loss sum of its one token, fp32."""
        slopes = torch.full((ids.numel(), 7), TRUE_GRADIENT, dtype=self.linear.weight.dtype)
        return self.linear(slopes).float().sum()


def averaged_gradient(rank: int, ranks: int, form: Form, accumulation: int) -> Tensor:
    """What one SGD step at rate 1 has taken from the weights, fp32 [3, 7], after `accumulation` micro-batches of one token per rank."""
    layout = Layout(ranks, accumulation)
    engine = tiny.sharded(layout.config(form), layout, rank, Slope())
    token = torch.zeros(1, 1, dtype=torch.int64)
    engine.step([MicroBatch(token, token, token[0])] * accumulation, tokens=ranks * accumulation)
    return -tiny.masters(engine)["linear.weight"]


def gradient_in(precision: str) -> float:
    """0.01 as the type of the products holds it. The engine's factors and the loss scale are powers of two: nothing else rounds."""
    return float(torch.tensor(TRUE_GRADIENT, dtype=DTYPES[precision.partition("_")[0]]))


def summed_in(dtype: torch.dtype, accumulation: int) -> float:
    """The averaged gradient that an accumulator of `dtype` would give."""
    addend = (torch.tensor(TRUE_GRADIENT, dtype=torch.float64) / accumulation).to(dtype)
    total = torch.zeros((), dtype=dtype)
    for _ in range(accumulation):
        total += addend
    return float(total)
