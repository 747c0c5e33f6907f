"""The measured Ledger's moving books: what the forward pass keeps, by module, and what the machine says of this process.

Only looks: nothing here changes what a step computes. The static books are counted by engine/books.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from framework.model.attention import Attention
from framework.model.loss import TokenLoss
from framework.model.mlp import GELU, SwiGLU
from framework.model.norm import LayerNorm, RMSNorm
from framework.model.transformer import Block, Transformer

PARTS: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("attention", (Attention,)),
    ("mlp", (SwiGLU, GELU)),
    ("norm", (RMSNorm, LayerNorm)),
    ("logits", (TokenLoss,)),
    ("stream", (Transformer,)),
)
"""Name of a part, and the modules that it is; what other modules keep counts for the one around them."""


class SavedActivations:
    """Bytes of memory that the forward pass keeps for the backward pass, between `begin` and `end`.

    `kept` is the most that was there when a backward pass began: part -> bytes, and `cast` the part of it that is weights in
    another type. Memory of parameters counts for their own book; integers (ids, targets) do not count.
    """

    def __init__(self, model: nn.Module) -> None:
        self.kept: dict[str, int] = {}
        self._model, self._stack = model, ExitStack()
        self._live: dict[int, tuple[str, int]] = {}
        self._around = ["stream"]
        self._forward = True

    def begin(self) -> None:
        """Watch every forward pass from now on."""
        for module in self._model.modules():
            part = next((name for name, kinds in PARTS if isinstance(module, kinds)), None)
            if part is not None:
                self._stack.callback(module.register_forward_pre_hook(self._entering(part)).remove)
                self._stack.callback(module.register_forward_hook(self._leaving, always_call=True).remove)
            if isinstance(module, Block):
                self._stack.callback(module.register_forward_hook(self._given).remove)
            region = getattr(module.forward, "region", None)
            if region is not None:  # whose own hooks stand before ours
                region.observer = self._pack
                self._stack.callback(setattr, region, "observer", None)
        self._stack.enter_context(saved_tensors_hooks(self._pack, self._unpack))

    def end(self) -> None:
        """Leave the model as it was."""
        self._stack.close()

    def _entering(self, part: str) -> Callable[..., None]:
        return lambda *_: self._around.append(part)

    def _given(self, _: nn.Module, inputs: Any, output: Any) -> None:
        """What all blocks share: a block that is computed again does not save it, and yet it is held."""
        for shared in tree_leaves(inputs[1]):
            if isinstance(shared, Tensor):
                self._note(shared)

    def _leaving(self, *_: Any) -> None:
        self._around.pop()

    def _pack(self, saved: Tensor) -> Tensor:
        self._forward = True
        self._note(saved)
        return saved

    def _note(self, saved: Tensor) -> None:
        storage = saved.untyped_storage()
        key = storage._cdata
        if key in self._live or not (saved.is_floating_point() or saved.dtype == torch.bool) or _is_weight(saved):
            return
        part = "cast" if _is_cast_weight(saved) else self._around[-1]
        self._live[key] = part, storage.nbytes()
        weakref.finalize(storage, self._live.pop, key)

    def _unpack(self, saved: Tensor) -> Tensor:
        if self._forward:
            self._forward = False
            self._look()
        return saved

    def _look(self) -> None:
        now: dict[str, int] = {}
        for part, nbytes in list(self._live.values()):
            now[part] = now.get(part, 0) + nbytes
        if sum(now.values()) > sum(self.kept.values()):
            self.kept = now


def _is_weight(saved: Tensor) -> bool:
    return isinstance(saved if saved._base is None else saved._base, nn.Parameter)


def _is_cast_weight(saved: Tensor) -> bool:
    """A parameter in another type, as autocast makes it."""
    whole = saved if saved._base is None else saved._base
    made = whole.grad_fn
    return made is not None and made.name() == "ToCopyBackward0" and hasattr(made.next_functions[0][0], "variable")


def machine(device: torch.device) -> dict[str, int]:
    """What the machine says, in bytes: of an accelerator its allocator's peak, what it has reserved, what of that lies idle, and the
    number of times that it had to give memory back and ask again; of a CPU the resident set of this process."""
    if device.type == "cpu":
        return dict(_resident())
    said = torch.accelerator.memory_stats(device)
    reserved, allocated = said["reserved_bytes.all.peak"], said["allocated_bytes.all.peak"]
    return {
        "allocated_peak": allocated,
        "reserved_peak": reserved,
        "fragmented": said["reserved_bytes.all.current"] - said["allocated_bytes.all.current"],
        "retries": said["num_alloc_retries"],
    }


def _resident() -> Iterator[tuple[str, int]]:
    status = Path("/proc/self/status")
    names = {"VmRSS:": "resident", "VmHWM:": "resident_peak"}
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.split()[0] in names:
            yield names[line.split()[0]], int(line.split()[1]) * 1024
