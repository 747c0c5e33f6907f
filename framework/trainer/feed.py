"""The next batch, agreed over all ranks: everybody has one, or everybody stops with the same letter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from framework.base.errors import DataError
from framework.data.pack import MicroBatch
from framework.data.stream import TrainingStream
from framework.engine.engine import trained_tokens
from framework.topology.groups import Groups
from framework.topology.timers import Timers


@dataclass(frozen=True)
class Fed:
    """This rank's micro-batches of one step, the trained tokens of the global batch, the seconds waited for data, the votes."""

    batch: Sequence[MicroBatch]
    tokens: int
    wait_s: float
    votes: Mapping[str, float]


class Feed:
    """Reads the stream of this rank from a position on.

    The one agreement that each step needs also carries votes: a hook enters a function in `votes`, and each step brings the
    sum of its values over all ranks, so that all ranks can decide alike without a collective of their own.
    """

    def __init__(self, stream: TrainingStream, groups: Groups, tensor_ranks: int, consumed_samples: int, timers: Timers) -> None:
        """`tensor_ranks` is the number of ranks that read the same samples."""
        self.stream = stream
        self.groups = groups
        self.timers = timers
        self.tensor_ranks = tensor_ranks
        self.votes: dict[str, Callable[[], float]] = {}
        self._batches: Iterator[list[MicroBatch]] = stream.start(consumed_samples)

    def next(self) -> Fed:
        """The next step's share. Raises on every rank the DataError that any rank met."""
        began = time.perf_counter()
        batch: list[MicroBatch] = []
        fault: DataError | None = None
        try:
            with self.timers.part("data"):
                batch = next(self._batches)
        except DataError as error:
            fault = error
        wait_s = time.perf_counter() - began
        names = list(self.votes)
        cast = [float(self.votes[name]()) for name in names]
        tokens, faults, *sums = self.groups.agree([trained_tokens(batch), fault is not None, *cast])
        if faults:
            self.groups.raise_together(fault)
        return Fed(batch, round(tokens) // self.tensor_ranks, wait_s, dict(zip(names, sums, strict=True)))

    def close(self) -> None:
        """Stop the loader processes."""
        self.stream.close()
