"""P09 (pytorch/torchtitan#596): gradients clipped by the norm of the own stage. Right values: the clip value itself, and a single
process's norm.

SGD at rate 1 without decay: the weight change is the clipped gradient. The initial weights are so large that the norm is above 10.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from framework.config.schema import Optimizer
from tests.engine import tiny
from tests.engine.tiny import Form
from tests.parallel.spread import SAMPLES, SEQUENCE, Held, engine_of, whole
from tests.parallel.stages import GPT2, LLAMA, Stages, masters, plain_of
from tests.ranks import run_ranks

SGD = Optimizer(name="sgd", lr=1.0, weight_decay=0.0)
LOUD = {
    "llama": replace(LLAMA, init_std=1.0),
    "gpt2": replace(GPT2, init_std=1.0),
    "gpt2-tied": replace(GPT2, init_std=1.0, tie_embeddings=True),
}
BATCH = tiny.samples(0, SAMPLES, SEQUENCE, LLAMA.vocab_size)


@dataclass
class Push:
    """One step on one rank: the norm that it has logged, its weights before and after."""

    norm: float
    before: Held
    after: Held


def push(rank: int, ranks: int, stages: Stages, stage: int, name: str) -> Push:
    engine = engine_of(stages.config(Form("fp32", stage), LOUD[name], SGD, clip=1.0), stages, rank)
    before = masters(engine)
    out = engine.step(stages.layout.share(BATCH, stages.grid.place(rank).data), tiny.tokens_of(BATCH))
    return Push(out.grad_norm, before, masters(engine))


PIPE, DATA, BOTH, DEEP = Stages(1, 1), Stages(2, 1, pipeline=1), Stages(2, 1), Stages(1, 1, pipeline=4)
FAST = [(PIPE, 0, "llama"), (PIPE, 1, "llama"), (BOTH, 0, "gpt2-tied")]
ALL = [(stages, stage, name) for stages in (PIPE, BOTH, DEEP) for stage in (0, 1) for name in LOUD]
ALL += [(DATA, stage, name) for stage in (0, 1, 2) for name in LOUD] + [(Stages(1, 2), stage, "gpt2-tied") for stage in (0, 1)]


@pytest.mark.parametrize(
    ("stages", "stage", "name"), [*FAST, *(pytest.param(*row, marks=pytest.mark.slow) for row in ALL if row not in FAST)], ids=str
)
def test_the_whole_change_has_the_norm_of_the_clip(stages: Stages, stage: int, name: str) -> None:
    ranks = run_ranks(push, stages.grid.size, stages, stage, name, env=tiny.ONE_THREAD)
    before, after = (whole(getattr(seen, moment) for seen in ranks) for moment in ("before", "after"))
    change = sum(float((after[key] - before[key]).double().norm() ** 2) for key in before) ** 0.5
    assert change == pytest.approx(1.0, rel=1e-4)
    alone = plain_of(Stages(1, 1, pipeline=1).config(Form("fp32", 0), LOUD[name], SGD, clip=1.0))
    norm = alone.step(Stages(1, 1, pipeline=1).layout.share(BATCH, 0), tiny.tokens_of(BATCH)).grad_norm
    assert norm > 10
    assert len({seen.norm for seen in ranks}) == 1
    assert ranks[0].norm == pytest.approx(norm, rel=1e-5)
