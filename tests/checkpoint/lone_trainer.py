"""A trainer reduced to its saves, for tests that kill it: `python -m tests.checkpoint.lone_trainer ROOT FIRST RANK RANKS DELAY_S`.

Saves step 10 and waits for it (unless FIRST is 20), submits step 20 with DELAY_S of sleep after each of its chunks, says so
on stdout with the pid of its writer, and waits to be killed. No torch: it starts in no time.
"""

from __future__ import annotations

import os
import sys
import time

from framework.checkpoint.manifest import arrange
from framework.checkpoint.save import CHUNK, Job
from framework.checkpoint.shards import Logical, Shard, equal_parts
from framework.checkpoint.writer import Writer

CHUNKS = 6


def job_of(root: str, step: int, rank: int, ranks: int, delay_s: float = 0.0) -> Job:
    """A tensor of CHUNKS chunks for each rank; its bytes are all `step`."""
    length = CHUNKS * CHUNK * ranks
    shard = Shard("master", Logical.whole("t", (length,)), *equal_parts(length, ranks, rank), "U8")
    return Job(root, step, f"try-{step}", rank, ranks, arrange([shard], rank), {"step": step}, timeout_s=20.0, delay_s=delay_s)


def fill(memory: int, step: int) -> None:
    os.pwrite(memory, bytes([step]) * (CHUNKS * CHUNK), 0)


def main(root: str, first: int, rank: int, ranks: int, delay_s: float) -> None:
    writer = Writer()
    for step, delay in ((10, 0.0), (20, delay_s))[first == 20 :]:
        writer.wait()
        fill(writer.memory, step)
        writer.submit(job_of(root, step, rank, ranks, delay))
    os.write(1, f"{writer.process.pid}\n".encode())
    time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), delay_s=float(sys.argv[5]))
