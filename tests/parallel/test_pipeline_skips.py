"""A gradient that is not finite on one stage: every stage passes over the step, and says the same."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from framework.config.schema import Config
from framework.engine.engine import StepOut
from tests.engine import tiny
from tests.engine.tiny import ADAMW, Form
from tests.parallel.spread import SAMPLES, SEQUENCE, Held, engine_of
from tests.parallel.stages import LLAMA, Stages, live
from tests.ranks import run_ranks

STAGES = Stages(1, 1)


def walk(rank: int, ranks: int, config: Config, poisoned: bool) -> tuple[list[StepOut], Held, Held]:
    """Three steps; `poisoned`: one weight of the last stage is infinite before the first, and mended after it."""
    engine = engine_of(config, STAGES, rank)
    weight = [parameter for parameter in engine.engine.module.parameters() if parameter.logical.name == "final_norm.weight"]
    before, steps = live(engine), []
    for step in range(3):
        for parameter in weight if poisoned else ():
            parameter.data[0] = torch.inf if step == 0 else 1.0
        batch = tiny.samples(step, SAMPLES, SEQUENCE, LLAMA.vocab_size)
        steps.append(engine.step(STAGES.layout.share(batch, 0), tiny.tokens_of(batch)))
        if step == 0:
            after = live(engine)
    return steps, before, after


def others(found: Held) -> dict[str, torch.Tensor]:
    return {name: tensor for name, (logical, tensor) in found.items() if logical.name != "final_norm.weight"}


@pytest.mark.parametrize("form", [Form("fp32", 0), Form("fp16", 1)], ids=str)
def test_a_step_that_no_stage_takes(form: Form) -> None:
    """In fp16 a loss scale of 2^32 overflows, until it has been halved often enough; in fp32 the weight is infinite once."""
    config = STAGES.config(form, LLAMA, ADAMW, clip=0.5)
    config = replace(config, precision=replace(config.precision, initial_scale_power=32))
    ranks = run_ranks(walk, 2, config, form.precision == "fp32", env=tiny.ONE_THREAD)
    first = ranks[0][0]
    for steps, before, after in ranks:
        assert repr(steps) == repr(first)  # nan is not equal to itself
        assert steps[0].skipped
        assert not math.isfinite(steps[0].grad_norm)
        assert all(torch.equal(others(before)[name], others(after)[name]) for name in others(before))
    if form.precision == "fp32":
        assert [out.skipped for out in first] == [True, False, False]
        assert first[-1].applied == 2
    else:
        assert first[1].loss_scale == first[0].loss_scale / 2
