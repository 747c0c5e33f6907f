"""run.json: what a run is and how it stands. Written whole each time, so a reader never sees half of it.

Scripts and sweeps look at `status` here, not at exit codes: launchers lose those.
"""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from framework.base.errors import StartError
from framework.base.files import write_json

PACKAGES = ("torch", "deepspeed", "hydra-core", "omegaconf", "numpy", "wandb")
End = Literal["done", "stopped", "failed"]


@dataclass(frozen=True)
class Start:
    """What is known of a start once all ranks have met.

    `command` is the command line in words, `config_hash` covers the settings tagged `meaning`, `first_step` is the step that
    this start begins with and `steps` the one it is to end with, `resolved` holds what `auto` settings became.
    """

    command: list[str]
    world_size: int
    hosts: list[str]
    config_hash: str
    first_step: int = 1
    steps: int = 0
    resolved: dict[str, Any] = field(default_factory=dict)


def versions() -> dict[str, str | None]:
    """Version of Python and of each package that decides numbers; None where it is not installed. Imports none of them."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def git_commit() -> str | None:
    """The commit that is checked out in the working directory; None outside a repository or without git."""
    try:
        answer = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class RunFile:
    """run.json at `path`, read if it is there. One rank writes it. Raises StartError when the file is no run.json."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._facts: dict[str, Any] = {"starts": [], "tracker_run_id": None}
        if path.exists():
            try:
                self._facts = {**self._facts, **json.loads(path.read_text())}
            except (ValueError, TypeError) as error:
                raise StartError(str(path), got=str(error), expected="the run.json of an earlier start", write="resume=never") from error

    @property
    def status(self) -> str | None:
        """running, done, stopped or failed; None before the first start. `running` with no process means: killed."""
        return self._facts.get("status")

    @property
    def steps(self) -> int:
        """The step that the last start was to end with; 0 before the first."""
        return self._facts.get("steps", 0)

    @property
    def config_hash(self) -> str | None:
        return self._facts.get("config_hash")

    @property
    def tracker_run_id(self) -> str | None:
        """Id of the wandb run that later starts go on with."""
        return self._facts["tracker_run_id"]

    @property
    def resolved(self) -> dict[str, Any]:
        """What `auto` settings became at the last start."""
        return dict(self._facts.get("resolved", {}))

    @property
    def starts(self) -> list[dict[str, Any]]:
        """One entry per start, oldest first: time and ended (UTC), world_size, first_step, end (None while it runs)."""
        return [dict(start) for start in self._facts["starts"]]

    def begin(self, start: Start) -> None:
        """Note a new start and that it is running. A start before it that never wrote its end was killed: it failed."""
        starts = [{**old, "end": old["end"] or "failed"} for old in self._facts["starts"]]
        starts.append({"time": _now(), "world_size": start.world_size, "first_step": start.first_step, "end": None, "ended": None})
        self._facts = {
            "status": "running",
            "command": start.command,
            "config_hash": start.config_hash,
            "steps": start.steps,
            "world": {"size": start.world_size, "hosts": start.hosts},
            "tracker_run_id": self.tracker_run_id,
            "git_commit": git_commit(),
            "versions": versions(),
            "resolved": start.resolved,
            "starts": starts,
        }
        write_json(self.path, self._facts)

    def resolve(self, key: str, value: Any) -> None:
        """Note what an `auto` setting became; it holds for later starts."""
        self._facts["resolved"][key] = value
        write_json(self.path, self._facts)

    def note_memory(self, ledger: dict[str, Any]) -> None:
        """Keep the Ledger of this start: predicted and measured bytes by book."""
        self._facts["memory"] = ledger
        write_json(self.path, self._facts)

    def track(self, run_id: str) -> None:
        """Note the id under which the run is tracked, as soon as it is known: a later start needs it."""
        self._facts["tracker_run_id"] = run_id
        write_json(self.path, self._facts)

    def finish(self, status: End) -> None:
        """Note how the present start ended."""
        assert self._facts["starts"], "finish() before begin()"
        self._facts["status"] = status
        self._facts["starts"][-1].update(end=status, ended=_now())
        write_json(self.path, self._facts)
