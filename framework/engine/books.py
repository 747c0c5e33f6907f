"""The Ledger's static books as an engine at work keeps them: live bytes by book, counted where the memory is.

With state.py the only place that knows where DeepSpeed keeps things. Memory that two books share counts for the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from framework.engine.engine import PlainEngine
from framework.engine.pipelined import PipelinedEngine
from framework.engine.sharded import DeepSpeedEngine
from framework.engine.state import MOMENTS, inner_optimizer, module_of

AnyEngine = DeepSpeedEngine | PlainEngine


def books(engine: AnyEngine) -> dict[str, int]:
    """Book -> live bytes on this rank, at this moment; a book without memory is left out."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    for book, tensor in _owned(engine):
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            found[book] = found.get(book, 0) + storage.nbytes()
    return found


class Fullest:
    """The most that each book holds at the moments at which it is looked at: after each backward pass, before DeepSpeed tidies
    up, and before the update. Between `begin` and `end`."""

    def __init__(self, engine: AnyEngine) -> None:
        self.engine, self.most = engine, dict[str, int]()
        self._hold = engine.hold
        self._zero: Any = engine.optimizer if hasattr(engine.optimizer, "backward_epilogue") else None

    def begin(self) -> None:
        """Look at every step from now on."""
        engine = self.engine
        engine.hold = self._before(self._hold)
        if isinstance(engine, PipelinedEngine):
            engine.after_backward(self._look)
        elif self._zero is not None:
            self._zero.backward_epilogue = self._before(self._zero.backward_epilogue)

    def end(self) -> None:
        """Leave the engine as it was."""
        engine = self.engine
        engine.hold = self._hold
        if isinstance(engine, PipelinedEngine):
            engine.stop_recording()
        elif self._zero is not None:
            del self._zero.backward_epilogue

    def _before(self, then: Callable[..., Any]) -> Callable[..., Any]:
        def looked(*inputs: Any) -> Any:
            self._look()
            return then(*inputs)

        return looked

    def _look(self) -> None:
        for book, nbytes in books(self.engine).items():
            self.most[book] = max(nbytes, self.most.get(book, 0))


def _owned(engine: AnyEngine) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a book. Gathered weights of ZeRO-3 come under `gathered`."""
    parameters = [*module_of(engine).parameters()]
    divided = any(hasattr(parameter, "ds_tensor") for parameter in parameters)
    for parameter in parameters:
        yield "parameters", parameter.ds_tensor if divided else parameter.detach()
    for parameter in parameters if divided else ():
        yield "gathered", parameter.detach()
    inner = inner_optimizer(engine)
    for home in [*_optimized(engine, inner)]:
        yield "masters", home.detach()
        for kind, value in inner.state.get(home, {}).items():
            if kind in MOMENTS:
                yield "moments", value
    half = parameters[0].dtype != torch.float32
    for tensor in _gradients(engine, parameters):
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        summed = half and tensor.dtype == torch.float32
        # A sum that is a view of more is one of DeepSpeed's buckets, kept alive by what was reduced in it.
        yield "buckets" if summed and not whole and _is_attribute(parameters, tensor) else "accumulation" if summed else "gradients", tensor


def _optimized(engine: AnyEngine, inner: torch.optim.Optimizer) -> Iterable[Tensor]:
    """What the inner optimizer updates; ZeRO-3 hands it over one at a time."""
    flat = getattr(getattr(engine, "optimizer", None), "fp32_partitioned_groups_flat", None)
    return flat if flat is not None else [home for group in inner.param_groups for home in group["params"]]


def _gradients(engine: AnyEngine, parameters: Iterable[Any]) -> Iterator[Tensor]:
    zero: Any = engine.optimizer
    for holder in ("averaged_gradients", "all_grad_tensors"):  # ZeRO 1 and 2: lists by group
        for group in (getattr(zero, holder, None) or {}).values():
            yield from group or ()
    flat = getattr(zero, "grad_partitions_flat_buffer", None)
    if flat is not None:  # ZeRO-3
        yield flat
    yield from getattr(zero, "fp32_groups_gradients_flat", ())  # BF16_Optimizer
    yield from getattr(zero, "accumulated_grads_in_cpu", {}).values()
    for parameter in parameters:
        for name in ("grad", "grad_accum"):
            value = getattr(parameter, name, None)
            if isinstance(value, Tensor):
                yield value
    for home in _optimized(engine, inner_optimizer(engine)):
        if home.grad is not None:
            yield home.grad


def _is_attribute(parameters: Iterable[Any], tensor: Tensor) -> bool:
    return any(getattr(parameter, "grad_accum", None) is tensor for parameter in parameters)
