"""Named streams of random numbers: a seed for each purpose and place, derived from the run's one seed."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def stream_seed(seed: int, name: str, *coordinates: int) -> int:
    """A seed in [0, 2^31) that is a pure function of its arguments; different names or places give unrelated streams."""
    text = f"{seed}/{name}/{'/'.join(map(str, coordinates))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def seed_training(seed: int, data_rank: int) -> None:
    """Seed every generator that a training step may draw from (dropout); data ranks draw different numbers."""
    value = stream_seed(seed, "training", data_rank)
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)  # seeds every accelerator of this process as well
