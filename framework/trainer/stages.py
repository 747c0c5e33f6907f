"""The stages of a pipeline as a run has them: where the blocks are cut, and a line of events.jsonl about how fast they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from framework.config.schema import Config
from framework.engine.instructions import bubble, idle_share, replay
from framework.engine.pipelined import PipelinedEngine
from framework.parallel.probe import Probe, plain_block
from framework.planner.partition import Bounds, costs, cut, joined
from framework.topology.grid import Grid
from framework.topology.groups import Groups
from framework.trainer.folder import resolved
from framework.trainer.run import Quiet, Run, Turn

RESOLVED = "parallel.partition"
WARM = 4
"""Steps of a start before the one that is recorded."""


def make_bounds(config: Config, groups: Groups, grid: Grid, device: torch.device) -> Bounds:
    """The blocks of each stage, the same on every rank. What was measured at an earlier start holds, for as many stages."""
    method = config.parallel.partition
    if method != "measured":
        return tuple(cut(costs(config.model, method), grid.pipeline))
    kept = resolved(config, groups, RESOLVED)
    if kept is not None and len(kept) == grid.pipeline and kept[-1][1] == config.model.num_layers:
        return tuple((start, stop) for start, stop in kept)
    times = groups.gather(Probe(config, plain_block(config, device)).times())[0]  # of the first rank, so that all cut alike
    return tuple(cut(joined(times.embedding, [times.block] * config.model.num_layers, times.head), grid.pipeline))


class StageTimes(Quiet):
    """Records one step of a start, once it is warm. One on every rank; `event` writes on the first."""

    def __init__(self, engine: PipelinedEngine, groups: Groups, event: Callable[[dict[str, Any]], None]) -> None:
        self.engine, self.groups, self.event = engine, groups, event
        self.turns = 0

    def after_step(self, run: Run, turn: Turn) -> None:
        self.turns += 1
        if self.turns == WARM:
            self.recorder = self.engine.record()
        elif self.turns == WARM + 1:
            self.engine.stop_recording()
            with run.clock.aside("pipeline"):
                self._tell(turn)

    def _tell(self, turn: Turn) -> None:
        """The first pipeline's stages: they stand for the other data and tensor ranks'."""
        place = self.groups.place
        mine = None if place.data + place.context + place.tensor else (place.pipeline, self.recorder)
        stages = [recorder for _, recorder in sorted(filter(None, self.groups.gather(mine)), key=lambda found: found[0])]
        works = [recorder.work for recorder in stages]
        spans = [recorder.exchange_s + sum(work.seconds for work in recorder.work) for recorder in stages]
        self.event({
            "event": "pipeline",
            "step": turn.step,
            "stages": [
                {"blocks": list(blocks), "forward_s": stage.seconds("forward"), "backward_s": stage.seconds("backward"),
                 "exchange_s": stage.exchange_s, "update_s": stage.update_s}
                for blocks, stage in zip(self.engine.bounds, stages, strict=True)
            ],
            "bubble": idle_share(works),
            "bubble_formula": bubble(self.engine.stages, self.engine.micros),
            "backend_s": max(spans) - replay(works),
        })  # fmt: skip
