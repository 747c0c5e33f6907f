"""What the pieces of a model cost on this machine, by short probes at the start: seconds for a pipeline's cut, and bytes that
activations hold against the seconds of computing them again.

A probe runs a model with one block: all are alike. Named and default random streams are seeded after it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from framework.config.schema import Config
from framework.model.init import initialise
from framework.model.recompute import Function, memory_of, put_regions
from framework.model.transformer import Transformer
from framework.topology.groups import accelerator

WARM, TIMED = 2, 5


class Times(NamedTuple):
    """Seconds of a forward and backward pass of one micro-batch: embedding, one block, final norm with head and loss."""

    embedding: float
    block: float
    head: float


class Cost(NamedTuple):
    """`nbytes` that the backward pass waits for, `seconds` that it takes to compute them."""

    nbytes: int
    seconds: float


def plain_block(config: Config, device: torch.device) -> Transformer:
    """The plain model with one block. Draws no global random number."""
    with torch.device("meta"):
        model = Transformer(replace(config.model, num_layers=1))
    model.to_empty(device=device)
    model.tie()
    initialise(model, config.model, config.seed)
    return model


class Probe:
    """A model with one block, and inputs like a micro-batch of the run."""

    def __init__(self, config: Config, model: Transformer) -> None:
        """The model is cast to the run's precision. Where ranks share it, all of them have to probe."""
        self.config, self.model = config, model
        self.device = next(model.parameters()).device
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.precision.dtype]
        if config.precision.half_weights:
            model.to(self.dtype)
        size, length = config.batch.micro, config.data.seq_length // config.parallel.context
        self.ids = (torch.arange(size * length, device=self.device) % config.model.vocab_size).view(size, length)
        whole = torch.zeros(size, config.data.seq_length, dtype=torch.int64, device=self.device)
        starts = whole if config.data.documents == "apart" else None
        self.positions = model.positions(length, self.device, starts)
        with self._precision():
            self.hidden = model.embed(self.ids, self.positions).detach().requires_grad_()
            self.places = model.places(self.positions, starts, self.hidden.dtype)

    def times(self) -> Times:
        """Medians over a few passes."""
        return Times(self._seconds(self._embed), self._seconds(self._block), self._seconds(self._read_out))

    def kind(self, name: str) -> Cost:
        """Of one kind's regions in all blocks: the bytes that recomputing them frees, and the seconds that it takes.

        The model keeps the regions: each kind needs a probe of its own.
        """
        meters: list[Meter] = []

        def wrap(function: Function) -> Meter:
            meters.append(Meter(function, self.model))
            return meters[-1]

        put_regions(self.model.layers, [name], wrap)
        found = []
        for _ in range(WARM + TIMED):
            with self._precision():
                out = self._block()
            out.backward(torch.ones_like(out))
            found.append(sum(meter.seconds for meter in meters))
        blocks = self.config.model.num_layers
        return Cost(blocks * sum(meter.nbytes for meter in meters), blocks * statistics.median(found[WARM:]))

    def activations(self) -> int:
        """Bytes that all blocks and the head hold between forward and backward pass."""
        block, head = Meter(self._block, self.model), Meter(self._read_out, self.model)
        with self._precision():
            block()
            head()
        return self.config.model.num_layers * block.nbytes + head.nbytes

    def _embed(self) -> Tensor:
        return self.model.embed(self.ids, self.positions)

    def _block(self) -> Tensor:
        return self.model.layers[0](self.hidden, self.places)

    def _read_out(self) -> Tensor:
        return self.model.read_out(self.hidden, self.ids)

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.config.precision.autocast)

    def _seconds(self, forward: Callable[[], Tensor]) -> float:
        taken = []
        for _ in range(WARM + TIMED):
            accelerator().synchronize()
            began = time.perf_counter()
            with self._precision():
                out = forward()
            out.backward(torch.ones_like(out))
            accelerator().synchronize()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[WARM:])


class Meter:
    """In the place of a region, for the last call: what a region would not keep, and how long it would take to have that again.

    Time runs until the last tensor is saved: there the second computation stops.
    """

    def __init__(self, function: Function, model: Transformer) -> None:
        self.function, self.model = function, model
        self._saved: dict[int, int] = {}
        self.seconds = 0.0
        self._feeds = False

    def feed(self, module: nn.Module, reader: nn.Module) -> None:
        """The output would not be kept either."""
        self._feeds = True

    @property
    def nbytes(self) -> int:
        """Of the memory behind what was saved, without inputs and parameters."""
        return sum(self._saved.values())

    def __call__(self, *inputs: Any) -> Any:
        self._saved = {}
        there = {memory_of(value) for value in (*_flat(inputs), *self.model.parameters())}
        accelerator().synchronize()
        began = time.perf_counter()

        def pack(value: Tensor) -> Tensor:
            accelerator().synchronize()
            self.seconds = time.perf_counter() - began
            if memory_of(value) not in there:
                self._saved[memory_of(value)] = value.untyped_storage().nbytes()
            return value

        with saved_tensors_hooks(pack, lambda value: value):
            out = self.function(*inputs)
        if self._feeds:
            self._saved[memory_of(out)] = out.untyped_storage().nbytes()
        return out


def choose(costs: Mapping[str, Cost], whole: Cost, max_extra_time: float, min_share: float) -> tuple[str, ...]:
    """The kinds to recompute, by bytes per second, highest first, until their seconds reach max_extra_time x those of `whole`.

    `whole` is all activations and a step's forward and backward pass. Candidates hold more than min_share of its bytes. A
    kind that lies inside another one counts once: the wider one takes its place and costs only the difference.
    """
    candidates = [kind for kind, cost in costs.items() if cost.nbytes > min_share * whole.nbytes]
    candidates.sort(key=lambda kind: costs[kind].nbytes / max(costs[kind].seconds, 1e-9), reverse=True)
    chosen: list[str] = []
    for kind in candidates:
        if any(kind in INSIDE.get(other, ()) for other in chosen):
            continue
        inside = [other for other in chosen if other in INSIDE.get(kind, ())]
        wanted = [other for other in chosen if other not in inside] + [kind]
        if sum(costs[one].seconds for one in wanted) <= max_extra_time * whole.seconds:
            chosen = wanted
    return tuple(sorted(chosen))


INSIDE = {"attention": ("core",), "mlp": ("activation", "ffn_in")}
"""What a kind holds of other kinds."""


def _flat(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [tensor for value in values for tensor in _flat(value)] if isinstance(values, (tuple, list)) else []
