"""The numbers of one step and of one evaluation, and the rates that follow from them.

Knows nothing of files, screens or engines. Only `peak_memory_bytes` looks at the machine.
"""

from __future__ import annotations

import math
import resource
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_high, median_low

import torch


@dataclass(frozen=True)
class TrainRecord:
    """One optimizer step as it stands in metrics.jsonl; the order of the fields is the order of the keys there.

    `step` counts loop turns from 1. `loss` is the token-weighted mean over the global batch, in nats per token. `grad_norm` is
    the global L2 norm before clipping. `lr` is the rate used in this step. `tokens` and `samples` are those of the global batch.
    `loss_scale` is 1.0 where the precision has none. `applied` counts the updates that were not skipped, this one included.
    `consumed_samples` is the position in the data after the step. Times are in seconds, memory is the peak in bytes. `parts`
    (topology/timers.py) are the first rank's and add up to the step; `hidden_s` is communication beside the computation, `aside_s`
    what was done since the step before and counts for none. `mfu` is the share of the peak that the model's own products reach;
    None where the device's peak is not known.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    samples: int
    loss_scale: float
    skipped: bool
    step_time_s: float
    tokens_per_s: float
    data_wait_s: float
    applied: int
    consumed_samples: int
    memory_bytes: int
    mfu: float | None = None
    hidden_s: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    aside_s: Mapping[str, float] = field(default_factory=dict)

    def numbers(self) -> dict[str, float]:
        """What can be drawn: every number but the step, those of the parts under names of their own."""
        plain = {key: value for key, value in vars(self).items() if key != "step" and isinstance(value, (int, float))}
        return {**plain, **{f"part_{part}_s": seconds for part, seconds in self.parts.items()}}


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation after `step`: the token-weighted mean loss [nats per token] over the held-out samples."""

    step: int
    loss: float
    tokens: int
    samples: int
    time_s: float


def rate(amount: float, seconds: float) -> float:
    """Amount per second; 0 where no time has passed."""
    return amount / seconds if seconds > 0 else 0.0


QUANTILES_OVER = 1000
"""Steps that the 50th and the 99th of a hundred step times are taken from."""


class Meter:
    """The last `window` steps, and what is typical of them.

    Medians, because a step beside a checkpoint or an evaluation would pull a mean. Of an even number of steps the faster of the
    two in the middle counts, so that the very first step, which compiles and allocates, is outvoted by the second.
    """

    def __init__(self, window: int = 20) -> None:
        self._seconds: deque[float] = deque(maxlen=window)
        self._rates: deque[float] = deque(maxlen=window)
        self._longer: deque[float] = deque(maxlen=QUANTILES_OVER)

    def add(self, seconds: float, tokens: int) -> None:
        """Take in one step that lasted `seconds` and trained on `tokens`."""
        self._seconds.append(seconds)
        self._rates.append(rate(tokens, seconds))
        self._longer.append(seconds)

    @property
    def step_time_s(self) -> float:
        """Median duration of a step in seconds; 0 before the first."""
        return median_low(self._seconds) if self._seconds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Median rate in tokens per second; 0 before the first step."""
        return median_high(self._rates) if self._rates else 0.0

    def quantile(self, share: float) -> float:
        """The step time in seconds that `share` of the last QUANTILES_OVER steps stay below or at; 0 before the first."""
        ordered = sorted(self._longer)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0

    def eta_s(self, steps_left: int) -> float:
        """Seconds that `steps_left` more steps take at the present pace, evaluations not counted."""
        return steps_left * self.step_time_s


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory in use so far, in bytes: the accelerator's allocations, on a CPU the resident set of this process."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # A child process inherits the maximum of its parent here, which is why it comes second. macOS counts bytes, others KiB.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
