"""One run from its first start to its end: ranks started through the launcher, watched, and started again after a fault.

Without launch.supervise there is one start, whose end is the run's. Each start is composed once and handed over as a frozen file.
What a start came to is read from its run folder and from the processes themselves, because launchers lose exit codes. No torch.
"""

from __future__ import annotations

import codecs
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from framework.base.errors import EXIT_DONE, EXIT_REFUSED, EXIT_STOPPED, RunError
from framework.base.files import write_atomic
from framework.config.schema import Config
from framework.launch.command import Places, hosts_command, meeting, places, run_command
from framework.launch.elastic import fit
from framework.launch.environment import default_threads
from framework.launch.frozen import freeze
from framework.launch.start import ranks_alone
from framework.launch.submit import submission
from framework.launch.tree import PORT_TRIES, Tree, free_port, port_taken
from framework.monitor.runfile import RunFile
from framework.monitor.sinks import JsonLines, read_lines
from framework.studies.vitals import Vitals

LOOK_S = 0.05
STOP_S = 60.0
"""How long processes may take to end once the run is to end; then they are killed."""
GRACE_S = 10.0
"""The same after a rank was killed: its peers fail within a second, their writers bring a save to its end."""
STACKS_S = 2.0
STATUS_S = 15.0
NO_PROGRESS = 2
"""Starts in a row that reach no new step: more of the same would end the same."""


@dataclass(frozen=True)
class Ending:
    """How one start ended: the exit code that it means, or, for a fault, None and its cause; `lost` ranks were killed."""

    code: int | None
    cause: str = ""
    lost: int = 0


def start(config: Config, words: Sequence[str]) -> int:
    """Start the ranks of one run, each a process of its own, and return its exit code; or only say how they would be started."""
    there = places(config.launch, ranks_alone(config))
    said = [word for word in words if not word.startswith(("launch.dry_run=", "launch.print="))]
    if config.launch.print != "none":
        sys.stdout.write(submission(config, said, there))
    elif config.launch.dry_run:
        sys.stdout.write(shown(config, said, there) + "\n")
    else:
        with Supervisor(config, there) as supervisor:
            return supervisor.run()
    return EXIT_DONE


def start_command(config: Config, words: Sequence[str], there: Places, port: int) -> list[str]:
    """The command of one start of `config`, given to its ranks as `words`."""
    if not there.hosts:
        return run_command(words, there.ranks, config.launch.master_port or port)
    assert config.launch.hostfile is not None
    return hosts_command(words, config.launch, Path(config.launch.hostfile), there.hosts)


def start_environment(config: Config, there: Places) -> dict[str, str]:
    """What the command gets in its environment beside what is there."""
    threads = config.launch.threads or default_threads(there.ranks_per_host)
    return {"OMP_NUM_THREADS": str(threads), **meeting(config.launch, there.hosts)}


def shown(config: Config, words: Sequence[str], there: Places) -> str:
    """The command as a person would type it; ours choose a free port for each start of one host."""
    environment = [f"{name}={value}" for name, value in start_environment(config, there).items()]
    return " ".join([*environment, shlex.join(start_command(config, words, there, 29500))])


class Supervisor:
    """Brings one run to its end. Use it in a `with`, from the main thread: signals to this process stop the ranks."""

    def __init__(self, config: Config, there: Places) -> None:
        """What the ranks say goes to stdout."""
        self.config, self.there = config, there
        self.asked: str | None = None
        self.folder = Path(config.run_dir)
        self.best = 0
        self.no_progress = 0

    def __enter__(self) -> Supervisor:
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def run(self) -> int:
        """The exit code of the run. Raises RunError with the cause where it ends with a fault."""
        launch = self.config.launch
        causes: list[str] = []
        config, there = self.config, self.there
        while True:
            began = time.time()
            ending = self._start(config, there)
            if ending.code is not None:
                return ending.code
            causes.append(ending.cause)
            if not launch.supervise or self.asked is not None:
                raise RunError(str(self.folder), ending.cause, "every rank to its end", f"see {self.folder}/logs")
            if len(causes) > launch.restarts or self.no_progress >= NO_PROGRESS:
                raise RunError("launch.supervise", _history(causes), "a run that gets on", f"see {self.folder}/logs")
            config, there = self._again(config, ending, began)
            self._event(ending, len(causes) + 1, config, there)

    def _start(self, config: Config, there: Places) -> Ending:
        """One start, to the end of its last process; where its port was taken, the same once more."""
        tries = 0
        while True:
            tries += 1
            words = freeze(config)
            output = Path(words[1]).with_suffix(".log")
            vitals = Vitals(self.folder, config.launch.hang_factor, config.launch.hang_least, config.launch.timeout)
            with Tree(start_command(config, words, there, free_port()), output, variables=start_environment(config, there)) as tree:
                hang = self._watch(tree, vitals, output)
            if tries == PORT_TRIES or not port_taken(output):
                break
        if there.ranks == 1 and 0 in vitals.signs:  # no launcher between us: its end is known exactly
            vitals.signs[0].code, vitals.ended = tree.code(), [0]
        vitals.read_steps()
        self.no_progress = 0 if vitals.step > self.best else self.no_progress + 1
        self.best = max(self.best, vitals.step)
        return self._judge(tree.code(), vitals, hang)

    def _watch(self, tree: Tree, vitals: Vitals, output: Path) -> str | None:
        """Until every process has ended or has had its time; the hang that was the reason, if one was."""
        ending: float | None = None
        hang, counted = None, time.monotonic()
        with _followed(output) as follow:
            while tree.code() is None or tree.pids():
                vitals.look()
                follow()
                now = time.monotonic()
                killed = any((vitals.signs[rank].code or 0) < 0 for rank in vitals.ended)
                if now - counted > 1.0:
                    vitals.read_steps()
                    counted = now
                if ending is None and self.asked is not None:
                    tree.stop()
                    ending = now + STOP_S
                elif ending is None and (tree.code() is not None or killed):
                    ending = now + (GRACE_S if killed else STOP_S)
                elif ending is None and self.config.launch.supervise and (hang := vitals.hang()) is not None:
                    vitals.dump_stacks()
                    ending = now + STACKS_S
                if ending is not None and now > ending:
                    break
                time.sleep(LOOK_S)
        return hang

    def _judge(self, code: int | None, vitals: Vitals, hang: str | None) -> Ending:
        """What a start came to. Statuses are the truth, exit codes of launchers are not."""
        if hang is not None:
            return Ending(None, f"{hang}; stacks of all ranks: {self.folder}/logs/stacks_*.txt")
        if code == EXIT_REFUSED:
            return Ending(EXIT_REFUSED)
        status = self._status(vitals)
        if status == "done":
            return Ending(EXIT_DONE)
        if status == "stopped" and not (self.config.launch.supervise and self.asked is None and self._launcher_died()):
            return Ending(EXIT_STOPPED)
        if self.asked is not None and status is None:
            return Ending(EXIT_STOPPED)  # before there was a run
        return self._fault(code, vitals)

    def _status(self, vitals: Vitals) -> str | None:
        """run.json's word on this start; None where it did not get that far. Another host's first rank may write it last."""
        until = time.monotonic() + (STATUS_S if self.config.launch.node_rank else 0.0)
        while True:
            file = RunFile(self.folder / "run.json")
            told = file.status if vitals.signs and file.starts and file.starts[-1]["time"] >= vitals.began_at else None
            if told != "running" or time.monotonic() > until:
                break
            time.sleep(LOOK_S)
        if told is None and not vitals.signs and file.status == "done" and file.steps >= self.config.steps:
            return "done"  # before this start, which had nothing to do
        return told

    def _fault(self, code: int | None, vitals: Vitals) -> Ending:
        signs = vitals.signs
        killed = [rank for rank in vitals.ended if (signs[rank].code or 0) < 0]
        letter = self.folder / "logs" / "letter.txt"
        left_word = letter.exists() and letter.stat().st_mtime >= vitals.began
        if killed and not (left_word and all(signs[rank].code == -signal.SIGTERM for rank in killed)):  # the launcher's, at another's fault
            name = signal.Signals(-(signs[killed[0]].code or 0)).name
            how = f"{name} of the host, for lack of memory" if name == "SIGKILL" and vitals.short_of_memory() else name
            return Ending(None, f"rank {killed[0]} was killed by {how} after step {vitals.step}", lost=1)
        if self._launcher_died():
            return Ending(None, f"the launcher has died after step {vitals.step}")
        if left_word:
            return Ending(None, "; ".join(line.strip() for line in letter.read_text().splitlines()))
        first = f"rank {vitals.ended[0]} ended first, " if vitals.ended else ""
        return Ending(None, f"{first}the launcher ended with code {code} after step {vitals.step}")

    def _launcher_died(self) -> bool:
        """Whether the last stop was nobody's wish."""
        path = self.folder / "events.jsonl"
        stops = [line for line in (read_lines(path) if path.exists() else ()) if line["event"] == "signal"]
        return bool(stops) and set(stops[-1]["because"].values()) == {"the launcher has died"}

    def _again(self, config: Config, ending: Ending, began: float) -> tuple[Config, Places]:
        """The next start: from what this run has saved, on the ranks that are left."""
        if self._has_saved(began) or (config.resume == "never" and self._claimed(began)):
            config = replace(config, resume="auto")
        if not config.launch.elastic:
            return config, self.there
        resume = config.resume
        left = self._left(ending.lost)
        config, ranks = fit(self.config, left.ranks, left.ranks_per_host)
        if not left.hosts:
            return replace(config, resume=resume), Places(ranks, ranks)
        hosts = _cut(left.hosts, ranks)
        kept = self.folder.parent / ".frozen" / f"{self.folder.name}.hosts"
        write_atomic(kept, "".join(f"{name} slots={count}\n" for name, count in hosts.items()).encode())
        launch = replace(config.launch, hostfile=str(kept), include="", exclude="", num_procs=None)
        return replace(config, resume=resume, launch=launch), Places(ranks, max(hosts.values()), hosts)

    def _left(self, lost: int) -> Places:
        """Where ranks can be started now: a killed rank's place is left out of the next start, a host while it does not answer."""
        if not self.there.hosts:
            left = max(1, self.there.ranks - lost)
            return Places(left, left)
        hosts = {name: ranks for name, ranks in self.there.hosts.items() if _answers(name)}
        if not hosts:
            raise RunError("launch.elastic", "no host of the hostfile answers", "at least one", f"see {self.config.launch.hostfile}")
        return Places(sum(hosts.values()), max(hosts.values()), hosts)

    def _claimed(self, began: float) -> bool:
        kept = self.folder / "config.yaml"
        return kept.exists() and kept.stat().st_mtime >= began

    def _has_saved(self, began: float) -> bool:
        path = self.folder / "events.jsonl"
        return self._claimed(began) and path.exists() and any(line["event"] == "checkpoint" for line in read_lines(path))

    def _event(self, ending: Ending, number: int, config: Config, there: Places) -> None:
        line: dict[str, Any] = {"event": "restart", "start": number, "after_step": self.best, "because": ending.cause, "ranks": there.ranks}
        data = config.parallel.data or there.ranks // config.parallel.model_ranks
        line |= {"micro_size": config.batch.micro}
        line |= {"accumulation": config.batch.global_size // (config.batch.micro * data)}
        if (self.folder / "logs").is_dir():
            JsonLines(self.folder / "events.jsonl").write(line)
        sys.stdout.write(f"start {number} on {there.ranks} ranks, because: {ending.cause}\n")
        sys.stdout.flush()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or signal.Signals(number).name


@contextmanager
def _followed(output: Path) -> Iterator[Any]:
    """A function that hands on to stdout what has been written to `output` since."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a letter may come in two parts

    def hand_on(file: BinaryIO) -> None:
        new = decoder.decode(file.read())
        if new:
            sys.stdout.write(new)
            sys.stdout.flush()

    with open(output, "rb") as file:
        try:
            yield lambda: hand_on(file)
        finally:
            hand_on(file)


def _cut(hosts: Mapping[str, int], ranks: int) -> dict[str, int]:
    """`ranks` places of the hosts, the first ones."""
    kept: dict[str, int] = {}
    for name, places_there in hosts.items():
        kept[name] = min(places_there, ranks - sum(kept.values()))
    return {name: count for name, count in kept.items() if count}


def _answers(host: str) -> bool:
    words = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", host, "true"]
    try:
        return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _history(causes: Sequence[str]) -> str:
    alike = f"{len(causes)} starts, the last one: " if len(causes) > 1 else ""
    return alike + causes[-1]
