"""What a run writes down about itself, on the first rank: metrics.jsonl, events.jsonl, run.json, the console, the tracker."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console as Screen

from framework.base.errors import FrameworkError
from framework.config.compose import to_dict
from framework.config.identity import meaning_hash
from framework.config.schema import Config
from framework.monitor.alerts import Alert
from framework.monitor.console import Console
from framework.monitor.dashboards import Prometheus, TensorBoard, Webhook
from framework.monitor.meters import TrainRecord, peak_memory_bytes, rate
from framework.monitor.page import Facts, memory_lines
from framework.monitor.runfile import End, RunFile, Start
from framework.monitor.sinks import JsonLines, Sink, Wandb
from framework.planner.work import model_flop
from framework.topology.groups import Groups
from framework.trainer import lock
from framework.trainer.folder import run_folder
from framework.trainer.ledger import Page
from framework.trainer.run import Quiet, Run, Turn


class Records(Quiet):
    """A hook on every rank; the first one has the sinks, the others have none."""

    def __init__(self, config: Config, groups: Groups, facts: Facts) -> None:
        """Begins the start in run.json and shows its head. Raises, on every rank, what the tracker refuses."""
        self.sinks: list[Sink] = []
        self.console: Console | None = None
        self.runfile: RunFile | None = None
        self.events: JsonLines | None = None
        self.flop, self.peak = model_flop(config) * config.batch.global_size, facts.peak
        hosts = sorted(set(groups.gather(socket.gethostname())))
        if groups.rank == 0:
            folder = run_folder(config)
            self.runfile = RunFile(folder / "run.json")
            start = Start(sys.argv, facts.ranks, hosts, meaning_hash(config), facts.first_step, config.steps, self.runfile.resolved)
            self.runfile.begin(start)
            self.events = JsonLines(folder / "events.jsonl")
            self.console = Console(config, facts, Screen(highlight=False), folder / "metrics.jsonl")
            self.sinks = [JsonLines(folder / "metrics.jsonl"), self.console]
        error: FrameworkError | None = None
        try:
            self._show(config, facts.first_step)
            self._track(config)
        except FrameworkError as met:
            error = met
        groups.raise_together(error)

    def event(self, what: dict[str, Any]) -> None:
        """A line of events.jsonl."""
        if self.events is not None:
            self.events.write(what)

    def resolved(self, key: str) -> Any:
        """What an `auto` setting became at an earlier start; None where it has not become anything, or on another rank."""
        return None if self.runfile is None else self.runfile.resolved.get(key)

    def resolve(self, key: str, value: Any) -> None:
        """Keep what an `auto` setting became."""
        if self.runfile is not None:
            self.runfile.resolve(key, value)

    def memory(self, page: Page) -> None:
        """Keep and show a Ledger."""
        if self.runfile is not None and self.console is not None:
            self.runfile.note_memory(page.as_dict())
            self.console.table(memory_lines(page.rank, page.rows, page.peak, page.machine))

    def show(self, lines: Sequence[str]) -> None:
        """A table on the console."""
        if self.console is not None:
            self.console.table(lines)

    def alert(self, step: int, alert: Alert, actions: list[str]) -> None:
        """A line of events.jsonl, and whoever else is to hear of it."""
        self.event({"event": "alert", "step": step, "alert": alert.kind, "value": alert.value, "limit": alert.limit, "rank": alert.rank,
                    "says": alert.says, "change": alert.change, "actions": actions})  # fmt: skip
        for sink in self.sinks:
            sink.alert(step, alert, actions)

    @property
    def tracker_run_id(self) -> str | None:
        """Id of the tracked run, on the first rank."""
        return None if self.runfile is None else self.runfile.tracker_run_id

    def start(self, run: Run) -> None:
        if self.console is not None:
            self.console.begin()

    def after_step(self, run: Run, turn: Turn) -> None:
        if not self.sinks:
            return
        record = TrainRecord(
            step=turn.step,
            loss=turn.out.loss,
            grad_norm=turn.out.grad_norm,
            lr=turn.out.lr,
            tokens=turn.tokens,
            samples=run.config.batch.global_size,
            loss_scale=turn.out.loss_scale,
            skipped=turn.out.skipped,
            step_time_s=turn.step_time_s,
            tokens_per_s=rate(turn.tokens, turn.step_time_s),
            data_wait_s=turn.data_wait_s,
            applied=turn.out.applied,
            consumed_samples=run.position.consumed_samples,
            memory_bytes=peak_memory_bytes(run.engine.device),
            mfu=None if self.peak is None else rate(self.flop, turn.step_time_s) / self.peak,
            hidden_s=turn.split.hidden_s,
            parts=turn.split.parts,
            aside_s=turn.split.aside_s,
        )
        for sink in self.sinks:
            sink.train(record)

    def end(self, run: Run, status: End) -> None:
        for sink in self.sinks:
            sink.close(status)
        if self.runfile is not None:
            self.runfile.finish(status)
            lock.release(self.runfile.path.parent)

    def _show(self, config: Config, first_step: int) -> None:
        """Open the sinks for those who watch from elsewhere."""
        monitor = config.monitor
        if self.runfile is None:
            return
        if monitor.tensorboard:
            self.sinks.append(TensorBoard(run_folder(config) / "tensorboard", first_step))
        if monitor.prometheus is not None:
            page = Prometheus(monitor.prometheus_host, monitor.prometheus, config.name)
            self.sinks.append(page)
            self.event({"event": "prometheus", "address": page.address})
        if monitor.webhook is not None:
            self.sinks.append(Webhook(monitor.webhook, config.name, config.run_dir))

    def _track(self, config: Config) -> None:
        """Open the tracker, if one is wanted; a later start goes on with the same tracked run."""
        if self.runfile is None or not config.monitor.wandb:
            return
        folder = run_folder(config)
        tracker = Wandb(config.monitor.wandb_project, config.name, to_dict(config), folder, None, self.runfile.tracker_run_id)
        self.runfile.track(tracker.run_id)
        self.sinks.append(tracker)
