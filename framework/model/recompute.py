"""Recompute: a region keeps its inputs alone, and what its backward pass needs is computed again there (Chen et al. 2016).

A region is a function or a module's forward, put in the place of the plain one; names and parameters stay. The second
computation stops as soon as everything that was saved is there again, so a region that ends in a matrix product does not pay
for that product: this is why the activation function is one region with the matrix that reads it (Korthikanti et al. 2022,
section 5, chooses regions likewise by bytes and time).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from framework.base.errors import ConfigError
from framework.config import schema
from framework.model.attention import Attention
from framework.model.mlp import GELU, SwiGLU
from framework.model.transformer import Block, Transformer
from framework.topology.random import Streams

Function = Callable[..., Any]


class Wrapped(Protocol):
    """What stands in the place of a function."""

    def __call__(self, *inputs: Any) -> Any: ...

    def feed(self, module: nn.Module, reader: nn.Module) -> None:
        """Called where the function is `module`'s forward, and `reader` alone reads and keeps its output."""
        ...


Wrap = Callable[[Function], Wrapped]

KINDS = ("attention", "core", "mlp", "activation", "ffn_in", "norm", "head")
"""What `recompute.modules` may name; anything else there is a pattern of module names.

attention   projections and the attention itself
core        the attention between the projections
mlp         the whole feed-forward layer
activation  the activation function, with the matrix that reads it
ffn_in      the first feed-forward matrix, with the activation function
norm        every norm of the residual stream; its output is not kept either
head        final norm and output head, with the loss where it is computed on the same rank
"""


class Region:
    """A function that keeps its inputs alone. Draws the same random numbers both times, from the default and the named streams."""

    def __init__(self, function: Function, streams: Streams, offload: bool) -> None:
        """`offload` keeps the inputs on the host; on a CPU they are there already."""
        self.function, self.streams, self.offload = function, streams, offload
        self.last: Output | None = None
        self.observer: Callable[[Tensor], Any] | None = None
        """Told of what is saved in spite of this region, where the region's hooks keep others from seeing it."""

    def __call__(self, *inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.function(*inputs)
        with save_on_cpu(pin_memory=torch.cuda.is_available()) if self.offload else nullcontext():
            return checkpoint(self.function, *inputs, use_reentrant=False, context_fn=self.streams.twice)

    def feed(self, module: nn.Module, reader: nn.Module) -> None:
        """This is `module`'s forward, and `reader` would keep its output: let that be computed again from the input as well."""
        if not self.offload:  # the second copy of the input would stay on the device
            _replace(module, "forward", self._noted(module))
            _replace(reader, "forward", self._reading(reader.forward))

    def _noted(self, module: nn.Module) -> Function:
        def forward(hidden: Tensor) -> Tensor:
            out: Tensor = self(hidden)
            self.last = Output(module, hidden.detach(), out, self.streams) if torch.is_grad_enabled() else None
            return out

        return forward

    def _reading(self, reader: Function) -> Function:
        def forward(*inputs: Any) -> Any:
            output, self.last = self.last, None
            if output is None:
                return reader(*inputs)
            with saved_tensors_hooks(lambda saved: self._packed(output, saved), Output.unpack):
                return reader(*inputs)

        forward.region = self  # type: ignore[attr-defined]
        return forward

    def _packed(self, output: Output, saved: Tensor) -> Any:
        packed = output.pack(saved)
        if packed is saved and self.observer is not None:
            self.observer(saved)
        return packed


class Output:
    """What a module has computed, known by its memory; given up, and computed again when it is asked for."""

    def __init__(self, module: nn.Module, given: Tensor, out: Tensor, streams: Streams) -> None:
        self.module, self.given, self.memory, self.size, self.streams = module, given, memory_of(out), out.numel(), streams
        self.left = 0
        self.again: Tensor | None = None

    def pack(self, saved: Tensor) -> Tensor | tuple[Output, torch.Size]:
        """Itself in the place of its tensor, with the shape in which that was saved."""
        if memory_of(saved) != self.memory or saved.numel() != self.size or not saved.is_contiguous():
            return saved
        self.left += 1
        return self, saved.shape

    @staticmethod
    def unpack(packed: Tensor | tuple[Output, torch.Size]) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed[0].recomputed().view(packed[1])

    def recomputed(self) -> Tensor:
        """Kept until the last one of those that had saved it has asked."""
        again = self.again
        if again is None:
            with torch.no_grad(), self.streams.again():
                again = self.module(self.given)  # as a module: an engine that moves weights about sees it
        self.left -= 1
        self.again = again if self.left > 0 else None
        return again


def apply(model: nn.Module, settings: schema.Recompute, streams: Streams, whole: bool = True) -> None:
    """Put the regions that `settings` ask for, none or full or selective, into the model.

    `whole` says that the head computes the loss too. Raises ConfigError where there is nothing to put them on: a pattern that no
    module's name matches, or full for a model without our blocks.
    """
    assert settings.granularity != "auto", "auto is resolved before a model is made"

    def wrap(function: Function) -> Region:
        return Region(function, streams, settings.offload)

    if settings.granularity == "full":
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        if not blocks:
            write = "recompute.granularity=selective and patterns of module names in recompute.modules"
            raise ConfigError("recompute.granularity", "full", "a model of our blocks", write)
        for block in blocks[:: settings.every]:
            _put(block, "forward", wrap)
    elif settings.granularity == "selective":
        put_regions(model, settings.modules, wrap, whole)


def put_regions(model: nn.Module, names: Sequence[str], wrap: Wrap, whole: bool = True) -> None:
    """Wrap every region of the kinds and patterns in `names`."""
    kinds = {name for name in names if name in KINDS}
    for module in [*model.modules()]:
        if isinstance(module, (SwiGLU, GELU)):
            _put_mlp(module, kinds, wrap)
        elif isinstance(module, Attention):
            if "core" in kinds:
                _put(module.core, "forward", wrap)
            if "attention" in kinds:
                _put(module, "forward", wrap)
        elif isinstance(module, Transformer) and "head" in kinds:
            _put(module, "read_out" if whole else "head", wrap)
    for module in [*model.modules()] if "norm" in kinds else []:
        if isinstance(module, Block):
            _put_norm(module.attn_norm, module.attention, wrap)
            _put_norm(module.mlp_norm, module.mlp, wrap)
        elif isinstance(module, Transformer):
            _put_norm(module.final_norm, module.fork, wrap)
    for pattern in (name for name in names if name not in KINDS):
        _put_matching(model, pattern, wrap)


def _put_mlp(mlp: SwiGLU | GELU, kinds: set[str], wrap: Wrap) -> None:
    if "mlp" in kinds or kinds >= {"activation", "ffn_in"}:
        _put(mlp, "forward", wrap)
    elif "activation" in kinds:
        narrow = wrap(lambda *wide: mlp.down_proj(mlp.activate(*wide)))
        _replace(mlp, "forward", lambda hidden: narrow(*mlp.fork(hidden)))
    elif "ffn_in" in kinds:
        widen = wrap(lambda hidden: mlp.activate(*mlp.fork(hidden)))
        _replace(mlp, "forward", lambda hidden: mlp.down_proj(widen(hidden)))


def _put_norm(norm: nn.Module, reader: nn.Module, wrap: Wrap) -> None:
    region = wrap(norm.forward)
    _replace(norm, "forward", region)
    region.feed(norm, reader)


def _put_matching(model: nn.Module, pattern: str, wrap: Wrap) -> None:
    found = [module for name, module in model.named_modules() if fnmatchcase(name, pattern)]
    if not found:
        expected = f"{', '.join(KINDS)}, or a pattern of module names (* stands for anything)"
        raise ConfigError("recompute.modules", pattern, expected, "recompute.modules=[attention,activation]")
    for module in found:
        _put(module, "forward", wrap)


def _put(module: nn.Module, name: str, wrap: Wrap) -> None:
    _replace(module, name, wrap(getattr(module, name)))


def _replace(module: nn.Module, name: str, function: Function) -> None:
    """An attribute of the instance comes before the class's method; hooks and compilation stay around it."""
    setattr(module, name, function)


def memory_of(value: Tensor) -> int:
    """Address of the memory behind a tensor: views of it have the same."""
    return value.untyped_storage().data_ptr()
