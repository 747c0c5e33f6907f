"""A sweep: each job a `deepspeed` launch of its own, in a run folder that its overrides name; a table and sweep.csv at the end.

Jobs are composed here once and handed to their ranks as a frozen file. Nothing of a job stays in this process: no group, no port,
no random state. What a job came to is read from its run folder, because launchers lose exit codes. No torch.
"""

from __future__ import annotations

import csv
import hashlib
import math
import re
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table

from framework.base.errors import EXIT_DONE, EXIT_FAULT, EXIT_STOPPED, ConfigError, FrameworkError
from framework.config.check import check
from framework.config.compose import compose
from framework.config.schema import Config
from framework.launch.command import Places, places
from framework.launch.frozen import freeze
from framework.launch.start import ranks_alone
from framework.launch.tree import PORT_TRIES, Share, Tree, free_port, port_taken, shares
from framework.monitor.runfile import RunFile
from framework.monitor.sinks import read_lines
from framework.studies.supervise import shown, start_command

LOOK_S = 0.1
STOP_S = 60.0
"""How long the processes of a job may take to end; then they are killed."""
DRY = "not started"
LONGEST_NAME = 120
OF_NO_MEANING = re.compile(r"(recipe|output_root|name|launch[./].*|hydra[./].*)=")
COLUMNS = ("status", "steps", "final_loss", "best_loss", "eval_loss", "tokens_per_s", "peak_memory_mib", "training_s")


@dataclass
class Job:
    """One job and what has become of it. `config` is None where its words were refused."""

    words: list[str]
    name: str
    config: Config | None
    said: str = ""
    status: str = "waiting"

    @property
    def folder(self) -> Path:
        assert self.config is not None
        return Path(self.config.run_dir)

    @property
    def places(self) -> Places:
        assert self.config is not None
        return places(self.config.launch, ranks_alone(self.config))

    def command(self) -> list[str]:
        assert self.config is not None
        return start_command(self.config, freeze(self.config), self.places, free_port())

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Of metrics.jsonl the lines of one kind, the last one of each step."""
        path = self.folder / "metrics.jsonl"
        found = {line["step"]: line for line in (read_lines(path) if path.exists() else ()) if line["kind"] == kind}
        return [found[step] for step in sorted(found)]

    def row(self) -> dict[str, str | int | float]:
        """Its line of the table, by the names in COLUMNS."""
        if self.config is None:
            return {"status": self.status}
        train, held_out = self.lines("train"), self.lines("eval")
        found: dict[str, str | int | float] = {"status": self.status, "steps": len(train)}
        if train:
            losses = [line["loss"] for line in train]
            found |= {"final_loss": losses[-1], "best_loss": min(losses)}
            found["tokens_per_s"] = round(statistics.median(line["tokens_per_s"] for line in train[len(train) // 5 :]))
            found["training_s"] = round(sum(line["step_time_s"] for line in train), 1)
            found["peak_memory_mib"] = round(max(line["memory_bytes"] for line in train) / 2**20)
        return found | ({"eval_loss": held_out[-1]["loss"]} if held_out else {})

    def judged(self) -> float:
        """launch.objective of a job that is done; NaN otherwise."""
        if self.config is None or self.status != "done":
            return math.nan
        found = self.lines(self.config.launch.objective.partition(".")[0])
        return found[-1]["loss"] if found else math.nan


class Sweep:
    """All jobs of one sweep; a sweeper may bring them in batches."""

    def __init__(self, screen: Console, extra: Path | None = None) -> None:
        """`extra` is one more folder of settings, as in compose."""
        self.screen, self.extra = screen, extra
        self.jobs: list[Job] = []
        self.stopping: str | None = None

    def __enter__(self) -> Sweep:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def run(self, words: Sequence[Sequence[str]]) -> list[float]:
        """Run a batch of jobs, each given by its words; what each is judged by."""
        batch = [self._job(list(one)) for one in words]
        self.jobs += batch
        waiting, slots = list(batch), self._slots(batch)
        running: dict[int, Iterator[None]] = {}
        while waiting or running:
            for slot, share in enumerate(slots):
                if slot not in running and waiting and self.stopping is None:
                    running[slot] = self._drive(waiting.pop(0), share)
            for slot, job in list(running.items()):
                if next(job, "over") == "over":
                    del running[slot]
            if self.stopping is not None:
                waiting.clear()
            time.sleep(LOOK_S)
        return [job.judged() for job in batch]

    def close(self) -> int:
        """Show the table, write sweep.csv, and return the sweep's exit code."""
        numbers = [Column(name.replace("_", " "), justify="right") for name in COLUMNS[1:]]
        table = Table(Column("job", overflow="fold"), "status", *numbers, box=box.SIMPLE)
        alike = set.intersection(*(set(job.words) for job in self.jobs)) if len(self.jobs) > 1 else set()
        for job in self.jobs:
            row = job.row()
            cells = [_shown(name, row.get(name, "")) for name in COLUMNS]
            table.add_row(folder_name([word for word in job.words if word not in alike]), *cells)
        self.screen.print(table)
        for root in {job.folder.parent for job in self.jobs if job.config is not None}:
            self._write_csv(root / "sweep.csv", [job for job in self.jobs if job.config is not None and job.folder.parent == root])
        if self.stopping == "a failed job":
            return EXIT_FAULT
        if self.stopping is not None or any(job.status == "stopped" for job in self.jobs):
            return EXIT_STOPPED
        return EXIT_DONE if all(job.status in ("done", DRY) for job in self.jobs) else EXIT_FAULT

    def _job(self, words: list[str]) -> Job:
        name = folder_name(words)
        try:
            config = compose(words, extra=self.extra)
            config = replace(config, output_root=config.run_dir, name=name)
            job = Job(words, name, config)
            check(config, job.places.ranks, job.places.ranks_per_host)
            if config.launch.supervise or config.launch.print != "none":
                raise ConfigError("launch.supervise, launch.print", "a sweep", "one run", "the job's own command line")
        except FrameworkError as error:
            return Job(words, name, None, error.letter(), "refused")
        return job

    def _slots(self, batch: Sequence[Job]) -> list[Share | None]:
        parts = max((job.config.launch.parallel_jobs for job in batch if job.config is not None), default=1)
        return [None] if parts == 1 else [*shares(parts)]

    def _drive(self, job: Job, share: Share | None) -> Iterator[None]:
        """One job from start to end; yields while it runs."""
        passed_over = ""
        if job.config is None:
            self._tell(job, job.said)
        elif job.config.launch.dry_run:
            job.status = DRY
            self._tell(job, shown(job.config, [word for word in job.words if not word.startswith("launch.dry_run=")], job.places))
        elif _done(job):
            job.status, passed_over = "done", " before"
        else:
            began, output = time.monotonic(), job.folder / "logs" / "launch.log"
            for _ in range(PORT_TRIES):
                yield from self._run_once(job, output, share, began)
                if not port_taken(output):
                    break
            if job.status == "failed":
                self._tell(job, _tail(output))
        self.screen.print(f"{job.name}: {job.status}{passed_over}", soft_wrap=True)
        if job.status in ("failed", "refused") and job.config is not None and job.config.launch.fail_fast:
            self.stopping = "a failed job"

    def _run_once(self, job: Job, output: Path, share: Share | None, began: float) -> Iterator[None]:
        assert job.config is not None
        limit = job.config.launch.job_limit
        ending: float | None = None  # since when it is to end, or its outermost process has ended
        job.status = "running"
        with Tree(job.command(), output, share) as tree:
            while tree.code() is None or tree.pids():
                now = time.monotonic()
                if ending is None and tree.code() is not None:
                    ending = now
                elif ending is None and (self.stopping is not None or (limit is not None and now - began > limit)):
                    ending = now
                    tree.stop()
                elif ending is not None and now - ending > STOP_S:
                    break
                yield
        status = RunFile(job.folder / "run.json").status
        job.status = status if status in ("done", "stopped") else "failed"

    def _tell(self, job: Job, text: str) -> None:
        self.screen.print(f"{job.name}\n{text}", soft_wrap=True, markup=False)

    def _write_csv(self, path: Path, jobs: Sequence[Job]) -> None:
        rows = [["job", "overrides", *COLUMNS]]
        for job in jobs:
            row = job.row()
            rows.append([job.name, " ".join(job.words), *(str(row.get(name, "")) for name in COLUMNS)])
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(rows)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.stopping = self.stopping or signal.Signals(number).name


def folder_name(words: Sequence[str]) -> str:
    """The overrides that make this job another one than its neighbours, sorted; a long or strange name ends in a hash of them."""
    kept = sorted(word for word in words if not OF_NO_MEANING.match(word.lstrip("+~")))
    text = ",".join(kept) or "job"
    plain = re.sub(r"[^A-Za-z0-9._=,+-]", "-", text.replace("/", "."))
    if plain == text and len(text) <= LONGEST_NAME:
        return text
    return f"{plain[:100]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _done(job: Job) -> bool:
    assert job.config is not None
    file = RunFile(job.folder / "run.json")
    return job.config.resume != "never" and file.status == "done" and file.steps >= job.config.steps


def _tail(output: Path, lines: int = 15) -> str:
    return "\n".join(output.read_text(errors="replace").splitlines()[-lines:]) if output.exists() else ""


def _shown(name: str, value: str | int | float) -> str:
    return f"{value:.4f}" if name.endswith("_loss") and isinstance(value, float) else str(value)
