"""Gradients are summed in fp32: 512 micro-batches of true gradient 0.0100, for every precision, stage and offload that is allowed."""

from __future__ import annotations

import pytest
import torch

from tests.engine import slope, tiny
from tests.engine.tiny import Form
from tests.ranks import run_ranks

MICRO_BATCHES = 512
FAST = {Form("bf16", 1), Form("bf16", 2, "cpu"), Form("bf16", 3), Form("fp16", 2), Form("fp16_autocast", 0), Form("bf16_autocast", 0)}


def test_the_forms_come_from_the_rules() -> None:
    forms = set(tiny.allowed_forms(2))
    assert forms >= FAST
    assert {form.precision for form in forms} == set(tiny.PRECISIONS)
    assert {form.stage for form in forms} == set(tiny.STAGES)
    assert not {Form("bf16", 0), Form("fp16", 0), Form("fp16_autocast", 1)} & forms


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_proof_would_see_a_half_accumulator(dtype: torch.dtype) -> None:
    assert abs(slope.summed_in(dtype, MICRO_BATCHES) / slope.TRUE_GRADIENT - 1) > 5e-3
    assert slope.summed_in(torch.float32, MICRO_BATCHES) == pytest.approx(slope.TRUE_GRADIENT, rel=1e-5)


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form in FAST else pytest.mark.slow) for form in tiny.allowed_forms(2)], ids=str
)
def test_micro_batches_are_summed_in_fp32(form: Form) -> None:
    for gradient in run_ranks(slope.averaged_gradient, 2, form, MICRO_BATCHES):
        assert gradient.dtype == torch.float32
        assert bool((gradient / slope.TRUE_GRADIENT - 1).abs().max() <= 5e-3)
        assert gradient.tolist() == pytest.approx(torch.full((3, 7), slope.gradient_in(form.precision)), rel=1e-5)
