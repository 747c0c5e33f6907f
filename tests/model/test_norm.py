"""Norms against the formulas in float64, in half precision too."""

from __future__ import annotations

import pytest
import torch

from framework.model.norm import LayerNorm, RMSNorm

WIDTH, EPS = 96, 1e-5


def filled(kind: str, dtype: torch.dtype) -> RMSNorm | LayerNorm:
    torch.manual_seed(0)
    norm = RMSNorm(WIDTH, EPS) if kind == "rmsnorm" else LayerNorm(WIDTH, EPS, bias=True)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_(1.0, 0.5)
    return norm.to(dtype)


def formula(norm: RMSNorm | LayerNorm, hidden: torch.Tensor) -> torch.Tensor:
    x, weight = hidden.double(), norm.weight.double()
    if isinstance(norm, RMSNorm):
        return x / (x.pow(2).sum(-1, keepdim=True) / WIDTH + EPS) ** 0.5 * weight
    assert norm.bias is not None
    centred = x - x.sum(-1, keepdim=True) / WIDTH
    return centred / (centred.pow(2).sum(-1, keepdim=True) / WIDTH + EPS) ** 0.5 * weight + norm.bias.double()


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_fp32_follows_the_formula(kind: str) -> None:
    norm, hidden = filled(kind, torch.float32), torch.randn(4, 5, WIDTH) * 3 + 1
    torch.testing.assert_close(norm(hidden).double(), formula(norm, hidden), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize(("dtype", "half_step"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
def test_half_weights_round_once(kind: str, dtype: torch.dtype, half_step: float) -> None:
    """Only the result is rounded. A square, mean or product in half precision would be off by several half steps."""
    norm, hidden = filled(kind, dtype), (torch.randn(64, WIDTH) * 3 + 1).to(dtype)
    result, exact = norm(hidden), formula(norm, hidden)
    assert result.dtype == dtype
    assert ((result.double() - exact).abs() <= half_step * exact.abs() + 2e-6).all()


def test_fp16_squares_do_not_overflow() -> None:
    hidden = torch.full((1, WIDTH), 300.0, dtype=torch.float16)  # 300^2 is above the largest fp16, 65504
    torch.testing.assert_close(RMSNorm(WIDTH, EPS).half()(hidden), torch.ones(1, WIDTH, dtype=torch.float16))


def test_layernorm_without_bias_has_one_parameter() -> None:
    assert [name for name, _ in LayerNorm(8, EPS, bias=False).named_parameters()] == ["weight"]


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_half_gradients_are_computed_in_fp32(kind: str) -> None:
    """Of the input and of each weight, a sum over 512 rows: rounding once is 2^-8 at most per element, less in the norm."""
    norm, hidden = filled(kind, torch.bfloat16), (torch.randn(512, WIDTH) * 3 + 1).bfloat16().requires_grad_()
    exact_norm, exact_hidden = filled(kind, torch.bfloat16).double(), hidden.detach().double().requires_grad_()
    slope = torch.randn(512, WIDTH).bfloat16()
    norm(hidden).backward(slope)
    formula(exact_norm, exact_hidden).backward(slope.double())
    for got, wanted in zip((hidden, *norm.parameters()), (exact_hidden, *exact_norm.parameters()), strict=True):
        assert got.grad is not None
        assert wanted.grad is not None
        assert (got.grad.double() - wanted.grad).norm() < 2.0**-8 * wanted.grad.norm()
