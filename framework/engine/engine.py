"""What an engine is, and the plainest one.

An engine owns the model, the optimizer and the schedule, and knows one thing: how to make one optimizer step out of the
micro-batches of this rank. PlainEngine does it on one process with torch alone. It is the oracle for every other form,
and the first thing to read; DeepSpeedEngine (sharded.py) is the product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.config.schema import Config
from framework.data.pack import IGNORE, MicroBatch
from framework.engine.optim import make_optimizer, set_rate
from framework.engine.schedule import rate
from framework.topology.timers import Timers, timers_for


@dataclass(frozen=True)
class StepOut:
    """What one optimizer step did, the same on every rank.

    loss        token-weighted mean cross entropy over the global batch, in nats
    grad_norm   L2 norm of the whole gradient before clipping; not finite in a skipped step
    lr          learning rate of this step's update
    loss_scale  factor that the loss was multiplied with before the backward pass (1.0 without fp16)
    skipped     True if the gradient was not finite: weights, moments and schedule stayed as they were
    applied     updates applied so far, this step included
    """

    loss: float
    grad_norm: float
    lr: float
    loss_scale: float
    skipped: bool
    applied: int


class Engine(Protocol):
    """The verbs that the loop and its hooks use."""

    device: torch.device
    hold: Callable[[], None]
    """Called in each step just before the optimizer changes the state: whoever still reads the old state waits here."""
    veto: Callable[[float], bool] | None
    """Asked in each step, on every rank, with the step's loss: True skips it as if its gradient were not finite."""
    timers: Timers

    def step(self, batch: Sequence[MicroBatch], tokens: int) -> StepOut:
        """One optimizer step. `batch` is this rank's share, `tokens` the trained tokens of the global batch."""
        ...

    def evaluate(self, batches: Iterable[MicroBatch]) -> tuple[float, int]:
        """(sum of token losses in nats, number of tokens) over the batches of all ranks; draws no random number."""
        ...

    def logits(self, ids: Tensor) -> Tensor:
        """[batch, seq] -> [batch, seq, vocab], in evaluation mode; every rank calls it with the same ids."""
        ...


def trained_tokens(batch: Iterable[MicroBatch]) -> int:
    """Tokens of this rank's share that carry a loss."""
    return sum(int((micro.targets != IGNORE).sum()) for micro in batch)


class PlainEngine:
    """One process, fp32, no DeepSpeed."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        self.device = next(model.parameters()).device
        self.model = model
        self.config = config
        self.optimizer = make_optimizer(model, config.optimizer)
        self.applied = 0
        self.hold: Callable[[], None] = do_nothing
        self.veto: Callable[[float], bool] | None = None
        self.timers = timers_for(self.device)

    def step(self, batch: Sequence[MicroBatch], tokens: int) -> StepOut:
        lr = rate(self.config.schedule, self.config.optimizer, self.applied)
        set_rate(self.optimizer, lr)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, micro in enumerate(batch):
            with self.timers.part("forward"):
                loss = self.model(*micro.inputs)
            loss_sum += loss.detach()
            refused = index == len(batch) - 1 and self.veto is not None and self.veto(float(loss_sum) / max(1, tokens))
            with self.timers.part("backward"):
                ((loss * math.nan if refused else loss) / max(1, tokens)).backward()
        with self.timers.part("optimizer"):
            norm = float(clip(self.model, self.config.clip_grad_norm))
            skipped = not math.isfinite(norm)
            self.hold()
            if not skipped:
                self.optimizer.step()
            self.optimizer.zero_grad()
        self.applied += not skipped
        return StepOut(float(loss_sum) / max(1, tokens), norm, lr, 1.0, skipped, self.applied)

    def evaluate(self, batches: Iterable[MicroBatch]) -> tuple[float, int]:
        loss_sum, tokens = 0.0, 0
        with torch.no_grad(), evaluation_mode(self.model):
            for micro in batches:
                loss_sum += float(self.model(*micro.inputs))
                tokens += trained_tokens([micro])
        return loss_sum, tokens

    def logits(self, ids: Tensor) -> Tensor:
        with torch.no_grad(), evaluation_mode(self.model):
            return self.model(ids)


def do_nothing() -> None:
    """Nobody reads the state."""


def clip(model: nn.Module, limit: float, replica: dist.ProcessGroup | None = None) -> Tensor:
    """Scale the gradients down to the L2 norm `limit` of the whole (0: leave them) and return the norm before, a scalar.

    `replica` is the group whose ranks hold the model together; what several of them hold is counted once.
    """
    limit = limit if limit > 0 else math.inf
    if replica is None:
        return nn.utils.clip_grad_norm_(model.parameters(), limit)
    own = [p.grad for p in model.parameters() if p.grad is not None and p.logical.primary]  # type: ignore[attr-defined]
    square = nn.utils.get_total_norm(own).double() ** 2
    dist.all_reduce(square, group=replica)
    norm = square.sqrt().float()
    nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
    return norm


class evaluation_mode:
    """Inside the block the module is in evaluation mode; after it, as it was, also after an error."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.was_training = module.training

    def __enter__(self) -> None:
        self.module.eval()

    def __exit__(self, *_: object) -> None:
        self.module.train(self.was_training)
