"""Where fp16 gradients stop being finite: hooks on the parameters for one step, in the order of the backward pass.

Only looks: each hook returns None, so that autograd goes on with the gradient that it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Place = tuple[int, int, int]
"""(micro-batch, stages behind this one in the backward pass, position on this rank): smaller is earlier in the backward pass."""


class First(NamedTuple):
    """The first gradient that was not finite, by the logical name of its parameter."""

    place: Place
    name: str


class Seen(NamedTuple):
    """What one rank has seen in a step: the largest finite absolute value of the gradients by layer, and the first that is not finite."""

    first: First | None
    largest: dict[str, float]


class GradientWatch:
    """Between `begin` and `end` each gradient of a parameter is looked at when it arrives, before ranks or micro-batches are added up."""

    def __init__(self, model: nn.Module, stage: int) -> None:
        """`stage` counts pipeline stages from the end, where the backward pass begins."""
        self._model, self._stage = model, stage
        self._handles: list[Any] = []
        self._arrived: list[tuple[str, Tensor, Tensor]] = []

    def begin(self) -> None:
        """Look from now on."""
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                name: str = parameter.logical.name  # type: ignore[attr-defined]
                self._handles.append(parameter.register_hook(self._looking(name)))

    def end(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def seen(self) -> Seen:
        """Of what has arrived: scalars come from the device here, once the step is over."""
        first: First | None = None
        largest: dict[str, float] = {}
        times: dict[str, int] = {}
        for position, (name, finite, magnitude) in enumerate(self._arrived):
            micro = times[name] = times.get(name, -1) + 1
            layer = layer_of(name)
            largest[layer] = max(largest.get(layer, 0.0), float(magnitude))
            if not bool(finite):
                found = First((micro, self._stage, position), name)
                first = found if first is None else min(first, found)
        return Seen(first, largest)

    def _looking(self, name: str) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            if gradient.numel():
                with torch.no_grad():
                    known = torch.isfinite(gradient)
                    magnitude = torch.where(known, gradient, torch.zeros_like(gradient)).abs().amax()
                    self._arrived.append((name, known.all(), magnitude))

        return look


def layer_of(name: str) -> str:
    """layers.3 of layers.3.mlp.up_proj.weight; the first word of anything outside the blocks."""
    words = name.split(".")
    return ".".join(words[:2]) if words[0] == "layers" else words[0]


def module_of(name: str) -> str:
    """The module that owns a parameter."""
    return name.rpartition(".")[0]


def together(ranks: Iterable[Seen]) -> Seen:
    """What all ranks have seen: the earliest place, the largest value of each layer."""
    first: First | None = None
    largest: dict[str, float] = {}
    for seen in ranks:
        if seen.first is not None:
            first = seen.first if first is None else min(first, seen.first)
        for layer, value in seen.largest.items():
            largest[layer] = max(largest.get(layer, 0.0), value)
    return Seen(first, largest)


def magnitudes(largest: Mapping[str, float], loss_scale: float) -> dict[str, float | None]:
    """log2 of each layer's largest value as it is without the loss scale; None where a layer has no finite value beside 0."""
    return {layer: math.log2(value / loss_scale) if value > 0 else None for layer, value in sorted(largest.items(), key=_in_order)}


def spread(logs: Iterable[float | None]) -> float | None:
    """Powers of two between the layer with the largest and the one with the smallest gradients; None without any."""
    known = [value for value in logs if value is not None]
    return max(known) - min(known) if known else None


def _in_order(item: tuple[str, float]) -> tuple[str, int]:
    words = item[0].split(".")
    return words[0], int(words[1]) if len(words) > 1 else 0
