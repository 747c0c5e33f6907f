"""Resharding: saved under each ZeRO stage on each number of ranks, loaded under each, through the trainer.

Masters and moments are compared bit for bit, as they lie in live memory before the save and after the load, put together here
without framework/checkpoint. Dropout is 0, so that the losses that follow may be compared with the run that was never stopped.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from torch import Tensor

from framework.config import parameters
from framework.config.compose import compose
from framework.launch.environment import Process
from tests import runs
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from framework.trainer.run import Run, Turn

SAVED, STEPS = 3, 13
GLOBAL_SIZE = 8
WORDS = [*runs.SMALL, f"batch.global_size={GLOBAL_SIZE}", "batch.micro_size=2", "checkpoint=sync", "model.dropout=0", "precision=fp32"]
# Odd sizes, so that parts end inside rows; small vectors stay gathered at stage 3, matrices do not.
WORDS += ["model.hidden_size=26", "model.num_heads=4", "model.num_kv_heads=4", "model.head_dim=14"]
WORDS += ["model.ffn_hidden_size=44", "model.num_layers=4", "model.vocab_size=63", "zero.persistence_threshold=40"]
WORDS += [f"schedule.total_steps={STEPS}", f"steps={STEPS}", "checkpoint.keep_last=0", "data.log_samples=true"]


class Layout(NamedTuple):
    """Stage -1 is the plain engine. `ranks` are all ranks; those that `tensor`, `pipeline` and `context` leave are data ranks."""

    stage: int
    ranks: int
    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    context: int = 1

    def __str__(self) -> str:
        if self.stage < 0:
            return "plain"
        degrees = {"t": self.tensor, "p": self.pipeline, "c": self.context}
        spread = [*(f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1), "s" * self.sequence]
        return f"{self.stage} x {self.ranks} {''.join(spread)}".strip()

    @property
    def words(self) -> list[str]:
        if self.stage < 0:
            return ["engine=plain", "zero=stage0"]
        degrees = [f"parallel.{axis}={getattr(self, axis)}" for axis in ("tensor", "pipeline", "context")]
        return [f"zero=stage{self.stage}", f"parallel.sequence={str(self.sequence).lower()}", *degrees]


class Part(NamedTuple):
    """Elements `start` and on of a rank's tensor, which begins at `offset` of the logical one and has shape `size`."""

    kind: str
    name: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int
    elements: Tensor

    def places(self, shape: tuple[int, ...]) -> Tensor:
        """Where each element lies in the flat logical tensor of `shape`; -1 for padding."""
        numbers = torch.arange(prod(shape)).view(shape)[tuple(slice(o, o + s) for o, s in zip(self.offset, self.size, strict=True))]
        own = torch.full(self.size, -1)
        own[tuple(slice(0, s) for s in numbers.shape)] = numbers
        return own.flatten()[self.start : self.start + len(self.elements)]


@dataclass
class Trail:
    """What one rank has seen of a run: its part of the state after step SAVED, losses and samples of the steps after it."""

    pieces: list[Part]
    losses: dict[int, float]
    samples: dict[int, list[int]]
    optimizer_step: int


# ---------------------------------------------------------------- in the ranks


def pieces(run: Run) -> tuple[list[Part], int]:
    """This rank's part of the state, copied, and the optimizer's count of updates."""
    from framework.engine import state

    collected = [(shard.kind, shard.logical, shard.start, tensor.clone()) for shard, tensor in state.collect(run.engine)]
    found = [Part(kind, logical.name, logical.offset, logical.size, start, tensor) for kind, logical, start, tensor in collected]
    return found, state.counters(run.engine)["optimizer_step"]


def follow(words: Sequence[str], process: Process) -> Trail:
    """Train, and watch from step SAVED on: where the run begins there, before its first step."""
    from framework.base.log import Log
    from framework.trainer.build import build
    from framework.trainer.loop import train
    from framework.trainer.run import Quiet

    class Watch(Quiet):
        def __init__(self) -> None:
            self.trail = Trail([], {}, {}, 0)

        def start(self, run: Run) -> None:
            if run.position.step == SAVED:
                self.trail.pieces, self.trail.optimizer_step = pieces(run)

        def after_step(self, run: Run, turn: Turn) -> None:
            if turn.step == SAVED:
                self.trail.pieces, self.trail.optimizer_step = pieces(run)
            elif turn.step > SAVED:
                self.trail.losses[turn.step] = turn.out.loss
                self.trail.samples[turn.step] = [int(index) for micro in turn.batch for index in micro.indices]

    run, watch = build(compose(list(words)), process, Log()), Watch()
    run.hooks.append(watch)
    train(run)
    return watch.trail


def save_under(rank: int, ranks: int, layouts: Sequence[Layout], cwd: str) -> list[Trail]:
    """An uninterrupted run under each layout of this number of ranks; each has a seed, and so a State, of its own."""
    os.chdir(cwd)
    process = Process(rank, rank, ranks, ranks)
    return [follow([*WORDS, *one.words, f"name={name(one)}", seed(one), f"checkpoint.every={SAVED}"], process) for one in layouts]


def load_under(rank: int, ranks: int, pairs: Sequence[tuple[Layout, Layout]], cwd: str) -> list[Trail]:
    """Go on from each saved layout under a layout of this number of ranks, in one process after the other."""
    os.chdir(cwd)
    process = Process(rank, rank, ranks, ranks)
    trails = []
    for saved, loaded in pairs:
        path = f"resume=runs/{name(saved)}/checkpoints/step_{SAVED:08d}"
        words = [*WORDS, *loaded.words, f"name={name(saved)}_as_{name(loaded)}", seed(saved), path, "checkpoint.every=0"]
        trails.append(follow(words, process))
    return trails


def name(layout: Layout) -> str:
    return str(layout).replace(" x ", "-").replace(" ", "")


def seed(layout: Layout) -> str:
    return f"seed={10000 * layout.context + 1000 * layout.pipeline + 100 * layout.tensor + 10 * layout.ranks + layout.stage + 1}"


# ---------------------------------------------------------------- around them


def assemble(trails: Iterable[Trail]) -> dict[tuple[str, str], Tensor]:
    """Whole flat tensors by (kind, name); fails unless every element is there exactly once over all ranks."""
    model = compose(WORDS).model
    shapes = {entry.name: entry.shape for entry in parameters.table(model) if entry.tied_to is None}
    whole = {(kind, name): torch.zeros(prod(shape)) for name, shape in shapes.items() for kind in ("master", "exp_avg", "exp_avg_sq")}
    counts = {key: torch.zeros(len(tensor), dtype=torch.int64) for key, tensor in whole.items()}
    for part in (part for trail in trails for part in trail.pieces):
        places = part.places(shapes[part.name])
        inside = places >= 0
        whole[part.kind, part.name][places[inside]] = part.elements[inside]
        counts[part.kind, part.name][places[inside]] += 1
    assert [key for key, count in counts.items() if not bool((count == 1).all())] == []
    return whole


@dataclass
class Verdict:
    """What one pair has shown; `drift` is the greatest relative difference of a loss."""

    equal: bool
    drift: float
    samples: bool


def judge(saved: list[Trail], loaded: list[Trail]) -> Verdict:
    one, other = assemble(saved), assemble(loaded)
    equal = all(torch.equal(one[key], other[key]) for key in one) and {trail.optimizer_step for trail in [*saved, *loaded]} == {SAVED}
    straight = saved[0].losses
    drift = max(abs(trail.losses[step] / straight[step] - 1) for trail in loaded for step in straight)
    read = {step: sorted({index for trail in loaded for index in trail.samples[step]}) for step in straight}
    right = {step: list(range(GLOBAL_SIZE * (step - 1), GLOBAL_SIZE * step)) for step in range(SAVED + 1, STEPS + 1)}
    return Verdict(equal, drift, read == right)


def reshard(cwd: Path, save: Sequence[Layout], load: Sequence[Layout]) -> dict[tuple[Layout, Layout], Verdict]:
    """Every pair; one start of ranks for each number of them."""
    saved: dict[Layout, list[Trail]] = {}
    for ranks in sorted({layout.ranks for layout in save}):
        layouts = [layout for layout in save if layout.ranks == ranks]
        columns = zip(*run_ranks(save_under, ranks, layouts, str(cwd), timeout=1200), strict=True)
        saved.update((layout, list(trails)) for layout, trails in zip(layouts, columns, strict=True))
    verdicts = {}
    for ranks in sorted({layout.ranks for layout in load}):
        pairs = [(one, other) for one in save for other in load if other.ranks == ranks]
        columns = zip(*run_ranks(load_under, ranks, pairs, str(cwd), timeout=3600), strict=True)
        verdicts.update((pair, judge(saved[pair[0]], list(trails))) for pair, trails in zip(pairs, columns, strict=True))
    return verdicts


def table(verdicts: dict[tuple[Layout, Layout], Verdict]) -> str:
    """Rows: saved under; columns: loaded under; cells: `=` for bit-equal, and the drift of the losses."""
    save, load = (list(dict.fromkeys(pair[side] for pair in verdicts)) for side in (0, 1))
    rows = ["saved | " + " ".join(f"{one!s:>9}" for one in load)]
    for one in save:
        cells = [verdicts[one, other] for other in load]
        rows.append(f"{one!s:>5} | " + " ".join(f"{'=' if cell.equal else 'differs'} {cell.drift:7.1e}" for cell in cells))
    return "\n".join(rows)


def assert_all(verdicts: dict[tuple[Layout, Layout], Verdict], pairs: int) -> None:
    good = [verdict for verdict in verdicts.values() if verdict.equal and verdict.samples and verdict.drift <= 1e-5]
    print(f"\n{len(good)} of {len(verdicts)} equal (stage x ranks)\n{table(verdicts)}")
    assert len(good) == len(verdicts) == pairs


STAGES = [Layout(stage, ranks) for ranks in (1, 2, 4) for stage in (1, 2, 3)]
TENSOR = [Layout(0, 2, 2), Layout(1, 2, 2, True), Layout(3, 2, 2, True), Layout(2, 4, 2), Layout(3, 4, 2)]
PIPELINE = [Layout(stage, ranks, pipeline=2) for stage in (0, 1) for ranks in (2, 4)]
# Of four ranks: data alone, tensor 2 and 4, pipeline 2 and 4, and two of each.
SIX = [Layout(1, 4), Layout(1, 4, 2), Layout(1, 4, 4, True), Layout(1, 4, pipeline=2), Layout(1, 4, 2, True, 2), Layout(1, 4, pipeline=4)]
IN_CONTEXT = [Layout(2, 4, context=2), Layout(1, 4, 2, context=2), Layout(1, 4, pipeline=2, context=2), Layout(3, 4, context=4)]
REST = [Layout(-1, 1), *(Layout(0, ranks) for ranks in (1, 2, 4))]


def test_a_plain_run_goes_on_under_zero_3_on_two_ranks(tmp_path: Path) -> None:
    assert_all(reshard(tmp_path, [Layout(-1, 1)], [Layout(3, 2)]), 1)


@pytest.mark.slow
def test_two_tensor_ranks_with_sequence_parallel_go_on_as_two_data_ranks(tmp_path: Path) -> None:
    assert_all(reshard(tmp_path, [Layout(1, 2, 2, True)], [Layout(2, 2)]), 1)


@pytest.mark.slow
def test_tensor_ranks_and_all_others(tmp_path: Path) -> None:
    assert_all(reshard(tmp_path, TENSOR, [*TENSOR, *STAGES, Layout(-1, 1)]), 75)
    assert_all(reshard(tmp_path, [*STAGES, Layout(-1, 1)], TENSOR), 50)


@pytest.mark.slow
def test_a_plain_run_goes_on_in_two_stages_and_back(tmp_path: Path) -> None:
    assert_all(reshard(tmp_path, [Layout(-1, 1)], [Layout(1, 2, pipeline=2)]), 1)
    assert_all(reshard(tmp_path, [Layout(0, 2, pipeline=2)], [Layout(-1, 1)]), 1)


@pytest.mark.slow
def test_two_context_ranks_go_on_as_two_data_ranks(tmp_path: Path) -> None:
    assert_all(reshard(tmp_path, [Layout(3, 2, context=2)], [Layout(1, 2)]), 1)


@pytest.mark.slow
def test_context_ranks_and_others(tmp_path: Path) -> None:
    assert_all(reshard(tmp_path, IN_CONTEXT, [*IN_CONTEXT, *SIX]), 40)
    assert_all(reshard(tmp_path, SIX, IN_CONTEXT), 24)


@pytest.mark.slow
def test_every_way_to_use_four_ranks(tmp_path: Path) -> None:
    assert_all(reshard(tmp_path, SIX, SIX), 36)


@pytest.mark.slow
def test_pipelines_and_others(tmp_path: Path) -> None:
    others = [Layout(-1, 1), Layout(1, 2), Layout(3, 2)]
    assert_all(reshard(tmp_path, PIPELINE, [*PIPELINE, *others]), 28)
    assert_all(reshard(tmp_path, others, PIPELINE), 12)


@pytest.mark.slow
def test_every_stage_and_number_of_ranks(tmp_path: Path) -> None:
    assert_all(reshard(tmp_path, STAGES, STAGES), 81)


@pytest.mark.slow
def test_without_zero_and_without_deepspeed(tmp_path: Path) -> None:
    """Every pair in which at least one side is stage 0 or the plain engine."""
    assert_all(reshard(tmp_path, REST, [*REST, *STAGES]), 52)
    assert_all(reshard(tmp_path, STAGES, REST), 36)
