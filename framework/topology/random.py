"""Named streams of random numbers: a seed for each purpose and place, derived from the run's one seed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from framework.topology.grid import Place

APART = "apart"
"""The stream of what the tensor ranks have divided among them: different on each."""


def stream_seed(seed: int, name: str, *coordinates: int) -> int:
    """A seed in [0, 2^31) that is a pure function of its arguments; different names or places give unrelated streams."""
    text = f"{seed}/{name}/{'/'.join(map(str, coordinates))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def seed_training(seed: int, place: Place, streams: Streams) -> None:
    """Seed every generator that a training step may draw from (dropout), and the named streams that are there.

    Data ranks and stages draw different numbers; tensor ranks draw the same, but from the stream APART.
    """
    for name in streams.states:
        streams.seed(name, stream_seed(seed, name, place.data, place.context, place.pipeline, place.tensor))
    value = stream_seed(seed, "training", place.data, place.context, place.pipeline)
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)  # seeds every accelerator of this process as well


class Streams:
    """Random streams beside the default one of the device that computes, each with a name.

    torch's dropout draws from the default generator only. It is equal on the tensor ranks, which is right for what all of
    them have whole; for what is divided among them the generator's state is exchanged for that of the stream APART.
    """

    def __init__(self, device: Device, names: Sequence[str] = ()) -> None:
        self._device = device
        self.states: dict[str, Tensor] = {}
        self.again: Callable[[], AbstractContextManager[None]] = nullcontext
        """Around everything that is computed a second time: who measures that puts a block of its own here."""
        for name in names:
            self.seed(name, 0)

    def seed(self, name: str, value: int) -> None:
        """Begin the stream `name` anew. The default stream stays where it is."""
        before = self._device.get_rng_state()
        self._device.manual_seed(value)
        self.states[name] = self._device.get_rng_state()
        self._device.set_rng_state(before)

    @contextmanager
    def drawing(self, name: str) -> Iterator[None]:
        """Inside the block the device draws from the stream `name`."""
        before = self._device.get_rng_state()
        self._device.set_rng_state(self.states[name])
        try:
            yield
        finally:
            self.states[name] = self._device.get_rng_state()
            self._device.set_rng_state(before)

    def twice(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Two blocks that draw the same numbers from the named streams: a computation, and the same one again later.

        The second leaves the streams where they were before it. The default stream is the caller's business.
        """
        before: dict[str, Tensor] = {}

        @contextmanager
        def first() -> Iterator[None]:
            before.update(self.states)
            yield

        @contextmanager
        def second() -> Iterator[None]:
            now = dict(self.states)
            self.states.update(before)
            try:
                with self.again():
                    yield
            finally:
                self.states.update(now)

        return first(), second()


class Device(Protocol):
    """The random side of torch.cuda, of DeepSpeed's accelerators, and of torch itself for the CPU."""

    def manual_seed(self, seed: int) -> Any: ...

    def get_rng_state(self) -> Tensor: ...

    def set_rng_state(self, new_state: Tensor) -> None: ...
