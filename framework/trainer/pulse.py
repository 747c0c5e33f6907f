"""Signs of life of a rank, for whoever watches the run: logs/pulse_RANK says what it is at; its time is when it last moved on.

A rank that is asked with SIGUSR2 writes the stacks of all its threads to logs/stacks_RANK.txt, even where Python itself hangs.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import time
from pathlib import Path

from framework.monitor.runfile import End
from framework.trainer.run import Quiet, Run

BEAT_S = 0.5
"""The file's time is set at most this often: a shared file system is asked rarely, a hang is a matter of many steps."""


class Pulse(Quiet):
    """One on every rank, from before the model is built until the run has ended; the clock tells it of steps and of work beside them."""

    def __init__(self, folder: Path, rank: int) -> None:
        """`folder` is the run folder, which is claimed."""
        self.path = folder / "logs" / f"pulse_{rank}"
        self.phase, self.beaten = "", 0.0
        self.stacks = open(folder / "logs" / f"stacks_{rank}.txt", "a")  # noqa: SIM115  (open as long as the process)
        faulthandler.register(signal.SIGUSR2, self.stacks, all_threads=True)
        self.beat("start")

    def beat(self, phase: str) -> None:
        """This rank moves: start (being built), step, aside (an evaluation, a save), end."""
        now = time.monotonic()
        if phase != self.phase:
            self.phase = phase
            self.path.write_text(json.dumps({"phase": phase, "pid": os.getpid(), "host": socket.gethostname()}))
        elif now - self.beaten < BEAT_S:
            return
        else:
            os.utime(self.path)
        self.beaten = now

    def start(self, run: Run) -> None:
        run.clock.tell = self.beat

    def stop(self, run: Run) -> None:
        self.beat("end")

    def end(self, run: Run, status: End) -> None:
        self.beat("end")
