"""P05: a step that fp16 skips moves no schedule, no weight and no moment, on any rank.

Gradients become infinite at loop steps 0, 1 and 3 on the last rank alone. Warm-up 4, base 1e-3: the rate of the update after k
applied ones is 1e-3 x min(1, (k + 1) / 4). Rate, weight decay and the step inside Adam count applied updates; the loop, consumed
samples and the x-axis of metrics.jsonl count turns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from framework.config.schema import Optimizer, Schedule
from framework.engine.engine import StepOut
from tests.engine import tiny
from tests.engine.tiny import Form, Layout
from tests.ranks import run_ranks

SKIPPED = (0, 1, 3)
RATES = [2.5e-4, 2.5e-4, 2.5e-4, 5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3]
SCALES = [2.0**power for power in (16, 15, 14, 14, 13, 13, 13, 13)]
APPLIED = [0, 0, 1, 1, 2, 3, 4, 5]
FP16_FORMS = [form for form in tiny.allowed_forms(2) if form.precision.startswith("fp16")]
FAST = {Form("fp16", 1), Form("fp16", 3), Form("fp16_autocast", 0)}


@dataclass
class Turn:
    """One turn of the loop on one rank, with the state after it."""

    out: StepOut
    live: dict[str, Tensor]
    masters: dict[str, Tensor]
    moments: dict[str, Tensor]
    optimizer_steps: set[int]
    skipped_in_deepspeed: int


@dataclass
class Infinite:
    """A gradient hook that does harm when it is armed."""

    armed: bool = False

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient * math.inf if self.armed else gradient


def train(rank: int, ranks: int, form: Form) -> tuple[dict[str, Tensor], list[Turn]]:
    layout = Layout(ranks, 2, 2)
    adamw = Optimizer(lr=1e-3, weight_decay=0.1, eps=1e-12)
    engine = tiny.sharded(layout.config(form, optimizer=adamw, schedule=Schedule("constant", warmup_steps=4)), layout, rank, tiny.Bigram(11, 5))
    infinite = Infinite()
    engine.engine.module.head.bias.register_hook(infinite)
    start, turns = tiny.masters(engine), []
    for step in range(len(RATES)):
        infinite.armed = rank == ranks - 1 and step in SKIPPED
        batch = tiny.samples(step, 8, 8, 11)
        out = engine.step(layout.share(batch, rank), tiny.tokens_of(batch))
        turns.append(
            Turn(
                out,
                tiny.live_weights(engine),
                tiny.masters(engine),
                tiny.moments(engine),
                tiny.adam_steps(engine),
                engine.engine.skipped_steps,
            )
        )
    return start, turns


@pytest.fixture(scope="module", params=[pytest.param(form, marks=() if form in FAST else pytest.mark.slow) for form in FP16_FORMS], ids=str)
def ranks(request: pytest.FixtureRequest) -> list[tuple[dict[str, Tensor], list[Turn]]]:
    return run_ranks(train, 2, request.param)


Ranks = list[tuple[dict[str, Tensor], list[Turn]]]


def test_every_form_with_a_loss_scale_is_tried() -> None:
    assert {(form.precision, form.stage) for form in FP16_FORMS} >= {("fp16", 1), ("fp16", 2), ("fp16", 3), ("fp16_autocast", 0)}


def test_rate_scale_and_count_follow_applied_updates(ranks: Ranks) -> None:
    for _, turns in ranks:
        assert [turn.out.skipped for turn in turns] == [step in SKIPPED for step in range(8)]
        assert [turn.out.lr for turn in turns] == pytest.approx(RATES, rel=1e-12)
        assert [turn.out.loss_scale for turn in turns] == SCALES
        assert [turn.out.applied for turn in turns] == APPLIED


def test_all_ranks_say_the_same(ranks: Ranks) -> None:
    (_, first), (_, second) = ranks
    for one, other in zip(first, second, strict=True):
        assert repr(one.out) == repr(other.out)  # repr, because a norm that is not a number equals nothing
        assert math.isfinite(one.out.grad_norm) != one.out.skipped
        assert math.isfinite(one.out.loss)


def test_a_skipped_step_leaves_weights_and_moments(ranks: Ranks) -> None:
    for start, turns in ranks:
        before = Turn(turns[0].out, {}, start, {}, set(), 0)
        for step, turn in enumerate(turns):
            if step in SKIPPED:
                assert same(turn.masters, before.masters)
                assert same(turn.live, before.live) or step == 0
                assert same(turn.moments, before.moments) or (before.optimizer_steps <= {0} and not any(m.any() for m in turn.moments.values()))
            else:
                assert all(not torch.equal(turn.masters[name], before.masters[name]) for name in turn.masters)
            before = turn


def test_adam_counts_applied_updates(ranks: Ranks) -> None:
    for _, turns in ranks:
        assert [turn.optimizer_steps - {0} for turn in turns] == [{count} - {0} for count in APPLIED]


def test_the_first_update_is_as_long_as_the_rate_says(ranks: Ranks) -> None:
    """Adam's first update is lr x sign(gradient): the rate that was really used, and no moment left from the steps before."""
    for start, turns in ranks:
        decay = 1 - RATES[2] * 0.1
        change = turns[2].masters["head.weight"] - start["head.weight"] * decay
        assert change.abs().flatten().tolist() == pytest.approx([RATES[2]] * change.numel(), rel=1e-2)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
