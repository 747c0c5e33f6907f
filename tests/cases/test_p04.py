"""P04: a low-precision accumulator behind an fp32 promise. 1024 micro-batches, for every allowed form."""

from __future__ import annotations

import pytest

from tests.engine import slope, tiny
from tests.engine.tiny import Form
from tests.ranks import run_ranks

MICRO_BATCHES = 1024
FAST = {Form("bf16", 2), Form("fp16", 1)}


def test_the_right_value_is_arithmetic() -> None:
    assert slope.gradient_in("bf16") == 0.010009765625


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form in FAST else pytest.mark.slow) for form in tiny.allowed_forms(2)], ids=str
)
def test_the_average_of_many_micro_batches_does_not_fade(form: Form) -> None:
    for gradient in run_ranks(slope.averaged_gradient, 2, form, MICRO_BATCHES):
        assert bool((gradient / slope.TRUE_GRADIENT - 1).abs().max() <= 5e-3)
        if form.precision == "bf16":
            assert bool((gradient == 0.010009765625).all())
