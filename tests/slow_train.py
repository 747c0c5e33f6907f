"""framework.train with slow saves, for tests that kill it in the middle of one: `python -m tests.slow_train recipe=...`.

SLOW_RANK is the rank whose saves are slow, SLOW_CHUNK_S the seconds that it sleeps after each written chunk. Everything else,
the writer process too, is as in framework.train.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import wraps

from framework import train
from framework.checkpoint.save import Job


def slowed(make: Callable[..., Job], chunk_s: float) -> Callable[..., Job]:
    """Jobs that sleep after each chunk."""

    @wraps(make)
    def make_slow(*args: object) -> Job:
        return replace(make(*args), delay_s=chunk_s)

    return make_slow


def main() -> int:
    from framework.trainer import saving

    if os.environ["RANK"] == os.environ["SLOW_RANK"]:
        saving.Job = slowed(Job, float(os.environ["SLOW_CHUNK_S"]))  # type: ignore[misc, assignment]
    return train.main()


if __name__ == "__main__":
    sys.exit(main())
