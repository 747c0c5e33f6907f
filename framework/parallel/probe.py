"""How long the pieces of a model take on this machine: a short probe, for a cut of a pipeline by measured time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from framework.config.schema import Config
from framework.model.init import initialise
from framework.model.transformer import Transformer
from framework.topology.groups import accelerator

WARM, TIMED = 2, 5


class Times(NamedTuple):
    """Seconds of a forward and backward pass of one micro-batch: embedding, one block, final norm with head and loss."""

    embedding: float
    block: float
    head: float


def measure(config: Config, device: torch.device) -> Times:
    """Medians over a few passes with the run's micro-batch and precision. All blocks are alike, so one is timed.

    Of the plain pieces: tensor ranks share each of them alike. Draws no global random number.
    """
    with torch.device("meta"):
        model = Transformer(replace(config.model, num_layers=1))
    model.to_empty(device=device)
    model.tie()
    initialise(model, config.model, config.seed)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.precision.dtype]
    if config.precision.half_weights:
        model.to(dtype)
    ids = torch.arange(config.batch.micro_size * config.data.seq_length, device=device) % config.model.vocab_size
    ids = ids.view(config.batch.micro_size, -1)
    positions = torch.arange(config.data.seq_length, device=device)
    with torch.autocast(device.type, dtype, enabled=config.precision.autocast):
        hidden = model.embed(ids, positions).detach().requires_grad_()
        rotation = model.rotation(positions)
        return Times(
            _seconds(lambda: model.embed(ids, positions)),
            _seconds(lambda: model.layers[0](hidden, rotation)),
            _seconds(lambda: model.read_out(hidden, ids)),
        )


def _seconds(forward: Callable[[], Tensor]) -> float:
    taken = []
    for _ in range(WARM + TIMED):
        accelerator().synchronize()
        began = time.perf_counter()
        out = forward()
        out.backward(torch.ones_like(out))
        accelerator().synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[WARM:])
