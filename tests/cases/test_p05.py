"""P05: a step whose gradient is not finite moves no schedule, no weight and no moment, on any rank.

Gradients become infinite at loop steps 0, 1 and 3 on the last rank alone. Warm-up 4, base 1e-3: the rate of the update after k
applied ones is 1e-3 x min(1, (k + 1) / 4). Rate, weight decay and the step inside Adam count applied updates; the loop, consumed
samples and the x-axis of metrics.jsonl count turns. The rule is the same in every precision; fp16 has a loss scale besides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from framework.config.schema import Optimizer, Schedule
from framework.engine.engine import PlainEngine, StepOut
from framework.engine.sharded import DeepSpeedEngine
from tests.engine import tiny
from tests.engine.tiny import Form, Layout
from tests.ranks import run_ranks

SKIPPED = (0, 1, 3)
RATES = [2.5e-4, 2.5e-4, 2.5e-4, 5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3]
SCALES = [2.0**power for power in (16, 15, 14, 14, 13, 13, 13, 13)]
APPLIED = [0, 0, 1, 1, 2, 3, 4, 5]
ADAMW = Optimizer(lr=1e-3, weight_decay=0.1, eps=1e-12)
WARM = Schedule("constant", warmup_steps=4)
SAMPLES, SEQUENCE, VOCABULARY = 8, 8, 11
FORMS = tiny.allowed_forms(2)
FAST = {Form("fp16", 1), Form("fp16", 2, "cpu"), Form("fp16", 3), Form("fp16_autocast", 0), Form("fp32", 0)}


@dataclass
class Turn:
    """The state after one turn of the loop on one rank: weights that the forward pass sees, masters, moments, Adam's own counts."""

    out: StepOut
    live: dict[str, Tensor]
    masters: dict[str, Tensor]
    moments: dict[str, Tensor]
    counts: set[int]


@dataclass
class Trail:
    """What one rank has seen: where it started, and its turns."""

    start: dict[str, Tensor]
    turns: list[Turn]


@dataclass
class Infinite:
    """A gradient hook that does harm when it is armed."""

    armed: bool = False

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient * math.inf if self.armed else gradient


def walk(engine: DeepSpeedEngine | PlainEngine, head: nn.Linear, layout: Layout, rank: int) -> Trail:
    infinite = Infinite()
    head.bias.register_hook(infinite)
    trail = Trail(tiny.masters(engine), [])
    for step in range(len(RATES)):
        infinite.armed = rank == layout.ranks - 1 and step in SKIPPED
        batch = tiny.samples(step, SAMPLES, SEQUENCE, VOCABULARY)
        out = engine.step(layout.share(batch, rank), tiny.tokens_of(batch))
        seen = tiny.live_weights(engine), tiny.masters(engine), tiny.moments(engine), tiny.adam_counts(engine)
        trail.turns.append(Turn(out, *seen))
    return trail


def train(rank: int, ranks: int, form: Form) -> Trail:
    layout, module = Layout(ranks, 2, 2), tiny.Bigram(VOCABULARY, 5)
    engine = tiny.sharded(layout.config(form, optimizer=ADAMW, schedule=WARM), layout, rank, module)
    return walk(engine, module.head, layout, rank)


@pytest.fixture(scope="module", params=[pytest.param(form, marks=() if form in FAST else pytest.mark.slow) for form in FORMS], ids=str)
def trails(request: pytest.FixtureRequest) -> tuple[Form, list[Trail]]:
    return request.param, run_ranks(train, 2, request.param)


def test_rate_scale_and_count_follow_applied_updates(trails: tuple[Form, list[Trail]]) -> None:
    form, ranks = trails
    scales = SCALES if form.precision.startswith("fp16") else [1.0] * len(SCALES)
    for trail in ranks:
        outs = [turn.out for turn in trail.turns]
        assert [out.skipped for out in outs] == [step in SKIPPED for step in range(8)]
        assert [out.lr for out in outs] == pytest.approx(RATES, rel=1e-12)
        assert [out.applied for out in outs] == APPLIED
        assert [out.loss_scale for out in outs] == scales


def test_all_ranks_say_the_same(trails: tuple[Form, list[Trail]]) -> None:
    first, second = trails[1]
    for one, other in zip(first.turns, second.turns, strict=True):
        assert repr(one.out) == repr(other.out)  # repr, because a norm that is not a number equals nothing
        assert math.isfinite(one.out.grad_norm) != one.out.skipped
        assert math.isfinite(one.out.loss)


def test_a_skipped_step_leaves_weights_and_moments(trails: tuple[Form, list[Trail]]) -> None:
    for trail in trails[1]:
        check_skips(trail)


def check_skips(trail: Trail) -> None:
    for step, turn in enumerate(trail.turns):
        before = trail.turns[step - 1] if step else None
        if before is None:
            assert same(turn.masters, trail.start)
            assert not any(moment.any() for moment in turn.moments.values())
        elif step in SKIPPED:
            assert same(turn.masters, before.masters)
            assert same(turn.live, before.live)
            assert same(turn.moments, before.moments)
        else:
            assert not any(torch.equal(turn.masters[name], before.masters[name]) for name in turn.masters)


def test_adam_counts_applied_updates(trails: tuple[Form, list[Trail]]) -> None:
    for trail in trails[1]:
        assert [turn.counts - {0} for turn in trail.turns] == [{count} - {0} for count in APPLIED]


def test_the_first_update_is_as_long_as_the_rate_says(trails: tuple[Form, list[Trail]]) -> None:
    """Adam's first update is lr x sign(gradient): the rate that was really used, and no moment left from the steps before."""
    for trail in trails[1]:
        decayed = trail.start["head.weight"] * (1 - RATES[2] * ADAMW.weight_decay)
        change = trail.turns[2].masters["head.weight"] - decayed
        assert change.abs().flatten().tolist() == pytest.approx([RATES[2]] * change.numel(), rel=1e-2)


def test_plain_skips_too() -> None:
    layout, module = Layout(1, 4, 2), tiny.Bigram(VOCABULARY, 5)
    trail = walk(tiny.plain(layout.config(Form("fp32", 0), optimizer=ADAMW, schedule=WARM), module), module.head, layout, 0)
    assert [turn.out.skipped for turn in trail.turns] == [step in SKIPPED for step in range(8)]
    assert [turn.out.applied for turn in trail.turns] == APPLIED
    check_skips(trail)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
