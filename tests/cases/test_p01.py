"""P01 (huggingface/accelerate#2823): the position is restored, but against a different ordering.

The corpus has ten samples, each of which says its own number; a hook writes down what the model was really given. Every cut
is resumed in a process that has nothing of the first one. Right value: the run that was never stopped, and arithmetic.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from framework.config.compose import compose
from framework.data.tokens import write_tokens
from framework.launch.environment import Process
from tests import runs
from tests.ranks import run_ranks

SAMPLES, BATCH, SEQ, STEPS = 10, 2, 16, 12
PER_EPOCH = SAMPLES // BATCH
CUTS = (7, PER_EPOCH, 1)


@dataclass(frozen=True)
class Read:
    """One step: numbers of the samples that this rank's model was given, as it was given them, and the loss."""

    step: int
    samples: list[int]
    loss: float


def read(rank: int, ranks: int, starts: Sequence[Sequence[str]], cwd: str) -> list[list[Read]]:
    """Train once for each of `starts`, one after the other."""
    from framework.base.log import Log
    from framework.trainer.build import build
    from framework.trainer.loop import train
    from framework.trainer.run import Quiet, Run, Turn

    class Reader(Quiet):
        def __init__(self) -> None:
            self.reads: list[Read] = []

        def after_step(self, run: Run, turn: Turn) -> None:
            numbers = [int(row[0]) for micro in turn.batch for row in micro.ids]
            self.reads.append(Read(turn.step, numbers, turn.out.loss))

    os.chdir(cwd)
    found = []
    for words in starts:
        run, reader = build(compose(words), Process(rank, rank, ranks, ranks), Log()), Reader()
        run.hooks.append(reader)
        train(run)
        found.append(reader.reads)
    return found


def words(name: str, steps: int, ranks: int, workers: int) -> list[str]:
    engine = ["engine=plain", "zero=stage0"] if ranks == 1 else []
    rest = [f"batch.global_size={BATCH}", f"data.workers={workers}", "data.log_samples=true", "model.dropout=0.1", "eval.every=-1"]
    corpus = ["data=tokens", "data.files=[corpus]", "data.val_fraction=0", f"data.seq_length={SEQ}"]
    return [*runs.SMALL, *engine, *corpus, *rest, f"name={name}", f"steps={steps}", f"schedule.total_steps={STEPS}", "checkpoint=sync"]


def global_ids(run: Path) -> dict[int, list[int]]:
    """Step -> global sample indices of all ranks, in the order of samples.jsonl."""
    found: dict[int, list[int]] = {}
    for line in runs.lines(run / "samples.jsonl"):
        found.setdefault(line["step"], []).extend(line["ids"])
    return found


@pytest.mark.parametrize(
    ("workers", "ranks"), [(0, 1), (2, 1), pytest.param(0, 2, marks=pytest.mark.slow), pytest.param(2, 2, marks=pytest.mark.slow)]
)
def test_resume_goes_on_in_the_order_of_the_run_that_was_never_stopped(workers: int, ranks: int, tmp_path: Path) -> None:
    write_tokens(tmp_path / "corpus", [np.arange(SAMPLES * SEQ + 1) // SEQ], np.dtype("<u2"))  # token = number of the sample
    first = [words("straight", STEPS, ranks, workers), *(words(f"cut{cut}", cut, ranks, workers) for cut in CUTS)]
    before = run_ranks(read, ranks, first, str(tmp_path), timeout=300)
    after = run_ranks(read, ranks, [words(f"cut{cut}", STEPS, ranks, workers) for cut in CUTS], str(tmp_path), timeout=300)

    for rank in range(ranks):
        straight, *begun = before[rank]
        assert [one.step for one in straight] == list(range(1, STEPS + 1))
        for cut, head, tail in zip(CUTS, begun, after[rank], strict=True):
            assert head == straight[:cut]
            assert tail == straight[cut:]
    for name in ("straight", *(f"cut{cut}" for cut in CUTS)):
        expected = {step: list(range(BATCH * (step - 1), BATCH * step)) for step in range(1, STEPS + 1)}
        assert global_ids(tmp_path / "runs" / name) == expected

    row = [sample for step in range(STEPS) for rank in range(ranks) for sample in before[rank][0][step].samples]
    epochs = [row[at : at + SAMPLES] for at in range(0, 2 * SAMPLES, SAMPLES)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(SAMPLES))] * 2
    assert epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0])
