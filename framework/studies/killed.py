"""Runs in fresh processes that are killed at chosen moments and started again. Launches and watches run folders; no torch."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from framework.base.errors import EXIT_REFUSED, ConfigError, FrameworkError, RunError
from framework.checkpoint.folders import TEMPORARY
from framework.checkpoint.manifest import step_of
from framework.checkpoint.store import Store
from framework.launch.command import TRAIN, run_command, word
from framework.launch.tree import PORT_TRIES, Tree, free_port, port_taken
from framework.monitor.runfile import RunFile
from framework.monitor.sinks import read_lines

LOOK_S, LOOK_CLOSELY_S = 0.1, 0.002
SAY_S = 10.0
ATTEMPTS = 5
TAIL_LINES = 15


@dataclass(frozen=True)
class Moment:
    """When to kill: a checkpoint of step `saved` or a later one is complete, and a step after it is done.

    saving   and the checkpoint of another step is being written
    in_step  and the next step has been under way for nearly half the time of the one before
    """

    saved: int
    saving: bool = False
    in_step: bool = False


class Watch:
    """One start of a run, seen through its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines_before = len(self._steps())
        self.left_before = self._names()
        self.size = -1
        self.logged, self.step_s, self.logged_at = 0, 0.0, time.monotonic()

    def look(self) -> None:
        """See what has been logged since. `logged` is the last step of this start (0: none), which took `step_s` seconds."""
        path = self.folder / "metrics.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size == self.size:
            return
        self.size, lines = size, self._steps()[self.lines_before :]
        if lines and lines[-1][0] != self.logged:
            (self.logged, self.step_s), self.logged_at = lines[-1], time.monotonic()

    def saved(self) -> int:
        """The newest step with a checkpoint under its final name; 0 if there is none."""
        return max((step_of(name) or 0 for name in self._names()), default=0)

    def being_written(self) -> set[str]:
        """Folders of checkpoints that this start has begun and not finished."""
        return {name for name in self._names() if name.startswith(TEMPORARY)} - self.left_before

    def reached(self, moment: Moment) -> bool:
        """Whether it is time."""
        saved = self.saved()
        if saved < moment.saved or self.logged <= saved:
            return False
        if moment.in_step and time.monotonic() - self.logged_at < 0.4 * self.step_s:
            return False
        return not moment.saving or bool(self.being_written())

    def _names(self) -> set[str]:
        checkpoints = self.folder / "checkpoints"
        return {path.name for path in checkpoints.iterdir()} if checkpoints.is_dir() else set()

    def _steps(self) -> list[tuple[int, float]]:
        """(step, seconds) of every step line, over all starts."""
        lines = read_lines(self.folder / "metrics.jsonl")
        return [(line["step"], line["step_time_s"]) for line in lines if line["kind"] == "train"]


@dataclass(frozen=True)
class Runs:
    """How the runs of a study are started.

    `words` go to every run; the runs lie in `root`, take `steps` steps on `ranks` processes, and count as stuck when nothing
    is logged for `patience_s` seconds. `module` is the program.
    """

    words: tuple[str, ...]
    root: Path
    ranks: int
    steps: int
    patience_s: float
    screen: Console
    module: str = TRAIN

    def make(self, name: str, words: Sequence[str], moments: Sequence[Moment] = ()) -> Path:
        """The folder of run `name`: made anew, killed at each of `moments` and started again, then brought to its end.

        Raises RunError if a start fails or gets stuck, or if the run is always over before it can be killed; ConfigError if
        it is refused.
        """
        for _ in range(ATTEMPTS):
            folder = self.root / name
            if folder.exists():
                shutil.rmtree(folder)
            if all(self._kill_at(moment, folder, words, number) for number, moment in enumerate(moments, start=1)):
                self._bring_to_end(folder, words, len(moments) + 1)
                return folder
            self.say("    the run was over, or past the moment: once more")
        got = f"{ATTEMPTS} runs of {self.steps} steps that were over before they could be killed"
        raise RunError(f"verify: {name}", got, "steps that take longer", f"verify.steps={2 * self.steps}")

    def say(self, line: str) -> None:
        """A line for who waits."""
        self.screen.print(line, soft_wrap=True)

    def _kill_at(self, moment: Moment, folder: Path, words: Sequence[str], number: int) -> bool:
        """Start the run and kill it at `moment`; whether that was in time, and left a checkpoint to go on from and steps to do."""
        watch = Watch(folder)
        in_time = self._once(folder, words, number, watch, moment)
        newest = Store(str(folder / "checkpoints")).newest()
        if not in_time or newest is None or newest.step >= self.steps or (moment.saving and not watch.being_written()):
            return False
        if moment.in_step and watch.logged >= self.steps:
            return False
        where = "while the next was being written" if moment.saving else "in the middle of a step" if moment.in_step else ""
        self.say(f"    killed after step {watch.logged}, newest checkpoint step {newest.step}{where and ', '}{where}")
        return True

    def _bring_to_end(self, folder: Path, words: Sequence[str], number: int) -> None:
        self._once(folder, words, number, Watch(folder), None)
        status = RunFile(folder / "run.json").status
        if status != "done":  # the launcher's own exit code is 0 also where it was killed
            raise self._letter(folder, number, f"a run that ended as {status}")

    def _once(self, folder: Path, words: Sequence[str], number: int, watch: Watch, moment: Moment | None) -> bool:
        """One start as `_wait` sees it, which is over when this returns; where its port was taken, the same once more."""
        tries = 0
        while True:
            tries += 1
            try:
                with self._start(folder, words, number) as tree:
                    return self._wait(tree, watch, moment, number)
            except FrameworkError:
                if tries == PORT_TRIES or not port_taken(self._output(folder, number)):
                    raise

    def _start(self, folder: Path, words: Sequence[str], number: int) -> Tree:
        """A start of the run. A second one must find a checkpoint: it never begins anew in silence."""
        own = [word("name", folder.name), word("output_root", str(self.root)), f"steps={self.steps}"]
        resume = "resume=auto" if number == 1 else "resume=must"
        command = run_command([*self.words, *words, *own, resume], self.ranks, free_port(), self.module)
        return Tree(command, self._output(folder, number))

    def _wait(self, tree: Tree, watch: Watch, moment: Moment | None, number: int) -> bool:
        """Until the moment has come (True) or the run is over (False)."""
        began = said = time.monotonic()
        while (code := tree.code()) is None:
            watch.look()
            if moment is not None and watch.reached(moment):
                return True
            now = time.monotonic()
            if now - watch.logged_at > self.patience_s:
                raise self._letter(watch.folder, number, f"nothing logged for {self.patience_s:.0f} s")
            if now - said > SAY_S:
                at = f"step {watch.logged} of {self.steps}" if watch.logged else "no step yet"
                self.say(f"    {at}, {now - began:.0f} s")
                said = now
            time.sleep(LOOK_S if moment is None else LOOK_CLOSELY_S)
        watch.look()
        if code != 0:
            raise self._letter(watch.folder, number, f"exit code {code}", refused=code == EXIT_REFUSED)
        return False

    def _letter(self, folder: Path, number: int, got: str, refused: bool = False) -> FrameworkError:
        """What a failed start has said, as far as it fits."""
        output = self._output(folder, number)
        lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip() and not line.startswith("[20")]
        said = "".join(f"\n      {line}" for line in lines[-TAIL_LINES:])
        kind = ConfigError if refused else RunError
        return kind(f"verify: {folder.name}, start {number}", f"{got}{said}", "a run to its end, exit code 0", f"less {output}")

    def _output(self, folder: Path, number: int) -> Path:
        return self.root / "output" / f"{folder.name}.{number}.txt"
