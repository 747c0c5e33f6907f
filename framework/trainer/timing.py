"""The clock of a run, and what it is held against: parts of each step, hidden communication, the device's peak."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from framework.engine.engine import PlainEngine
from framework.engine.sharded import DeepSpeedEngine
from framework.launch.environment import Process
from framework.monitor.runfile import End
from framework.planner.hardware import Hardware, Site, recognised, this_machine
from framework.topology.groups import accelerator
from framework.topology.random import Streams
from framework.topology.traffic import Traffic
from framework.trainer.run import Clock, Quiet, Run


class Watched(Quiet):
    """Watches traffic and recomputing from the first step to the last. One on every rank."""

    def __init__(self, engine: DeepSpeedEngine | PlainEngine, streams: Streams) -> None:
        self.traffic = Traffic(engine.timers, engine.device)
        self.clock = Clock(engine.timers, self.traffic.hidden)
        streams.again = partial(engine.timers.part, "recompute")

    def start(self, run: Run) -> None:
        self.traffic.watch()

    def end(self, run: Run, status: End) -> None:
        self.traffic.end()


def peak(dtype: str, process: Process) -> float | None:
    """FLOP/s of all ranks on large matrices of `dtype`; None for an accelerator that the hardware table does not have."""
    found = hardware(torch.device(accelerator().current_device_name()))
    return None if found is None else process.ranks * Site(found, process.ranks_per_host).products(dtype)


def hardware(device: torch.device) -> Hardware | None:
    """The entry of the hardware table that this rank computes on."""
    if device.type == "cpu":
        return this_machine()
    driver: Any = torch.get_device_module(device)
    return recognised(driver.get_device_name(device), accelerator().total_memory())
