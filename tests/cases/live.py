"""A live run to look into: one single-process training in this process, and everything that was seen of it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from framework.base.log import Log
from framework.config.check import check
from framework.config.compose import compose
from framework.launch.environment import Process
from framework.monitor.sinks import read_lines
from framework.trainer.build import build
from framework.trainer.loop import train
from framework.trainer.run import Quiet, Run, Turn
from framework.trainer.saving import Saver

SWITCH: list[bool] = []
"""What DeepSpeed's switch for its shared-memory collectives said whenever the process group was started in this process."""


class Watch(Quiet):
    """Keeps every turn, and what leaves the first query projection."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.activation = torch.float32

    def start(self, run: Run) -> None:
        layer = whole_model(run).layers[0].attention.q_proj
        layer.register_forward_hook(lambda _module, _inputs, output: setattr(self, "activation", output.dtype))

    def after_step(self, run: Run, turn: Turn) -> None:
        self.turns.append(turn)


@dataclass
class Seen:
    """A run that has ended (or was only built), and what was seen of it."""

    run: Run
    watch: Watch
    screen: str = ""
    windows: list[list[int]] = field(default_factory=list)
    first_std: float = 0.0

    @property
    def model(self) -> Any:
        return whole_model(self.run)

    @property
    def block(self) -> Any:
        return self.model.layers[0]

    @property
    def zero(self) -> Any:
        """DeepSpeed's optimizer, at stages 1 to 3."""
        return self.run.engine.optimizer

    @property
    def group(self) -> dict[str, Any]:
        """torch's optimizer's own settings for matrices."""
        return self.run.engine.optimizer.param_groups[0]

    @property
    def rates(self) -> list[float]:
        return [turn.out.lr for turn in self.watch.turns]

    @property
    def corpora(self) -> Any:
        return self.run.feed.stream._corpus

    @property
    def loader(self) -> Any:
        reader = self.run.feed.stream._reader
        assert reader is not None
        return reader._loader

    def lines(self, name: str) -> list[dict[str, Any]]:
        return list(read_lines(self.run.folder / name))

    def hook(self, kind: type) -> Any:
        return next(hook for hook in self.run.hooks if isinstance(hook, kind))


def whole_model(run: Run) -> Any:
    engine: Any = run.engine
    return engine.model if hasattr(engine, "model") else engine.engine.module


def drive(words: Sequence[str], trains: bool = True) -> Seen:
    """Build the run that `words` describe and train it; what it shows is caught."""
    import deepspeed

    config = compose(words)
    check(config, 1, 1)

    init = deepspeed.init_distributed

    def with_helper_off(*args: Any, **options: Any) -> Any:
        SWITCH.append(deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"])
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for minutes
        return init(*args, **options)

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = True
    deepspeed.init_distributed = with_helper_off
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen):
        run = build(config, Process(), Log())
        seen = Seen(run, Watch())
        seen.first_std = float(seen.model.embed_tokens.weight.detach().float().std()) if config.zero.stage < 3 else 0.0
        run.hooks.append(seen.watch)
        watch_windows(run, seen.windows)
        if config.checkpoint.busy == "skip":  # a writer that never finishes, until it is waited for
            saver = seen.hook(Saver)
            saver._at_work = lambda: True
        if trains:
            train(run)
    deepspeed.init_distributed = init
    seen.screen = screen.getvalue()
    return seen


def watch_windows(run: Run, windows: list[list[int]]) -> None:
    """Keep the ids that the engine is asked to go on from."""
    logits = run.engine.logits

    def kept(ids: torch.Tensor) -> torch.Tensor:
        windows.append(ids[0].tolist())
        return logits(ids)

    run.engine.logits = kept  # type: ignore[method-assign]
