"""Where records go: one small class per sink behind one protocol. Only the rank that writes opens them.

metrics.jsonl, events.jsonl and samples.jsonl are all written by JsonLines. JSON has no words for NaN and the infinities, so
they are written as the strings "nan", "inf" and "-inf": every reader accepts the line, and float() turns them back.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from framework.base.errors import ConfigError, RunError, StartError

if TYPE_CHECKING:  # who only reads the files needs no torch
    from framework.monitor.alerts import Alert
    from framework.monitor.meters import EvalRecord, TrainRecord

REMEDY = "WANDB_MODE=offline (send it later with `wandb sync`), or `wandb login` once"


class Sink(Protocol):
    """Takes the records of a run, in the order of their steps."""

    def train(self, record: TrainRecord) -> None:
        """One optimizer step is done."""
        ...

    def evaluation(self, record: EvalRecord) -> None:
        """One evaluation is done."""
        ...

    def alert(self, step: int, alert: Alert, actions: list[str]) -> None:
        """Something goes wrong at `step`; `actions` are those that the settings want for it."""
        ...

    def close(self, status: str) -> None:
        """The run ends as `status`: done, stopped or failed. Nothing comes after it."""
        ...


def _spelled(value: Any) -> Any:
    """`value` with every NaN and infinity, however deep, as a string."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _spelled(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(inner) for inner in value]
    return value


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _whole_lines(content: bytes | mmap.mmap) -> int:
    """Bytes up to the end of the last line that is complete: it ends in a newline and reads as JSON."""
    end = content.rfind(b"\n") + 1
    start = content.rfind(b"\n", 0, max(end - 1, 0)) + 1
    return end if _is_json(content[start:end]) else start


def cut_torn_line(path: Path) -> None:
    """Shorten a file of JSON lines to its last complete line; a process that was killed leaves half a line behind."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with open(path, "r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = _whole_lines(content)
        file.truncate(end)


class JsonLines:
    """Appends one JSON object per line to `path`. One process writes a file; floats print so that they read back exactly."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_line(path)
        self.path = path
        self._file = open(path, "ab")  # noqa: SIM115 (open as long as the run)

    def write(self, event: dict[str, Any]) -> None:
        """Append `event`; when this returns the line is with the operating system. Raises RunError when it cannot be kept."""
        try:
            line = json.dumps(event, allow_nan=False)
        except ValueError:
            line = json.dumps(_spelled(event), allow_nan=False)
        try:
            self._file.write(line.encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise RunError(str(self.path), got=error.strerror, expected="room and permission to append a line") from error

    def train(self, record: TrainRecord) -> None:
        self.write({"kind": "train", **vars(record)})

    def evaluation(self, record: EvalRecord) -> None:
        self.write({"kind": "eval", **vars(record)})

    def alert(self, step: int, alert: Alert, actions: list[str]) -> None:
        """metrics.jsonl has none: they are events."""

    def close(self, status: str) -> None:
        self._file.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON lines file, in order, without a torn last line; nothing where there is no file."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n") and _is_json(line):
                yield json.loads(line)


def loss_history(path: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Step -> loss [nats per token] of training and of evaluation from metrics.jsonl, steps ascending, over all starts.

    A step that was done again after a crash has several lines; its last one holds.
    """
    losses: dict[str, dict[int, float]] = {"train": {}, "eval": {}}
    for line in read_lines(path):
        if line.get("kind") in losses:
            losses[line["kind"]][line["step"]] = float(line["loss"])
    return dict(sorted(losses["train"].items())), dict(sorted(losses["eval"].items()))


class Wandb:
    """One Weights & Biases run per training run: a later start with the same `run_id` goes on with the same run.

    `mode` is online, offline or disabled; None leaves it to wandb, which reads WANDB_MODE. Offline and disabled need neither a
    key nor a network. `run_id` None makes a new run; the id that was chosen is in the attribute of that name.
    Raises ConfigError when the run would be online and there is no API key, StartError when wandb
    refuses a setting or its server does not answer within 30 seconds.
    """

    def __init__(self, project: str, name: str, config: dict[str, Any], run_dir: Path, mode: str | None, run_id: str | None) -> None:
        import wandb  # 1.3 s: only who asks for it pays

        try:
            # wandb.init would ask for a key on the terminal, and the other ranks would wait for the answer.
            online = (mode or wandb.setup().settings.mode) in ("online", "shared")
            if online and not wandb.login(prompt=False, verify=False):
                raise ConfigError("monitor.wandb=true", got="no API key", expected="an API key of Weights & Biases", write=REMEDY)
            quiet = wandb.Settings(silent=True, console="off", init_timeout=30)
            run = wandb.init(
                project=project,
                name=name,
                config=config,
                dir=str(run_dir),
                mode=mode,  # type: ignore[arg-type] (wandb checks the word)
                id=run_id,
                resume="allow",
                settings=quiet,
            )
        except (wandb.Error, ValueError) as error:  # ValueError: an unknown WANDB_MODE and the like
            got = " ".join(str(error).split())
            expected = "settings that wandb takes and a server that answers"
            raise StartError("monitor.wandb=true", got=got, expected=expected, write=REMEDY) from error
        # wandb's own counter only goes up; after a crash steps come twice, so ours is the x axis.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        self._run = run
        self.run_id: str = run.id

    def train(self, record: TrainRecord) -> None:
        numbers = {f"train/{key}": value for key, value in record.numbers().items()}
        self._run.log({"step": record.step, **numbers})

    def evaluation(self, record: EvalRecord) -> None:
        numbers = {f"eval/{key}": value for key, value in vars(record).items() if key != "step"}
        self._run.log({"step": record.step, **numbers})

    def alert(self, step: int, alert: Alert, actions: list[str]) -> None:
        if "wandb" in actions:
            self._run.alert(title=f"{alert.kind} at step {step}", text=f"{alert.says}. Change: {alert.change}")

    def close(self, status: str) -> None:
        """Send what is left. A stopped run shows as preempted: it can be started again."""
        import wandb

        self._run.summary["status"] = status
        if status == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status == "done" else 1)
        # finish() was seen to return before an offline run's lines were on disk; this waits for the process that writes them.
        wandb.teardown()
