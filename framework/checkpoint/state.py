"""What a State is: everything that decides the next step. Knows tensors and random generators; writes nothing.

Nothing here is ever pickled: random states become JSON (integers as hexadecimal text, bytes as base64).
"""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from framework.checkpoint.shards import Shard

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

NAMES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""The word of our settings for a type -> the safetensors format's."""


@dataclass
class State:
    """One rank's part of the state of a run.

    `shards`: flat, contiguous views of live memory, each as long as its shard. `small`: plain JSON data, the same on
    every rank (step, consumed samples, schedule, scaler, windows, config, versions). `local`: plain JSON data of this
    rank (random states).
    """

    shards: list[tuple[Shard, Tensor]]
    small: dict[str, Any] = field(default_factory=dict)
    local: dict[str, Any] = field(default_factory=dict)


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a torch dtype."""
    return next(name for name, known in DTYPES.items() if known == dtype)


class Generator(Protocol):
    """The default generator of a device, as torch.cuda and DeepSpeed's accelerator show it."""

    def get_rng_state(self) -> Tensor: ...

    def set_rng_state(self, new_state: Tensor) -> None: ...


def rng_state(accelerator: Generator | None, streams: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state of Python's, NumPy's, torch's and, if given, the accelerator's default generator, and of `streams`, as plain JSON data."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": {"version": version, "words": _hex(words), "gauss_next": None if gauss is None else gauss.hex()},
        "numpy": {"name": name, "words": _hex([*map(int, keys), int(position)]), "has_gauss": int(has_gauss), "gauss": float(cached).hex()},
        "torch": _text(torch.get_rng_state()),
    }
    if accelerator is not None:
        state["accelerator"] = _text(accelerator.get_rng_state())
    state["streams"] = {name: _text(stream) for name, stream in streams.items()}
    return state


def restore_rng(state: dict[str, Any], accelerator: Generator | None, streams: dict[str, Tensor]) -> list[str]:
    """Put the generators back to where `rng_state` found them.

    `streams` is filled. Returns the names of generators that exist on one side only and were left alone: a run that moves between an
    accelerator and the CPU cannot draw the same numbers.
    """
    python, numpy = state["python"], state["numpy"]
    gauss = python["gauss_next"]
    random.setstate((python["version"], tuple(_integers(python["words"])), None if gauss is None else float.fromhex(gauss)))
    *keys, position = _integers(numpy["words"])
    np.random.set_state((numpy["name"], np.array(keys, np.uint32), position, numpy["has_gauss"], float.fromhex(numpy["gauss"])))
    torch.set_rng_state(_tensor(state["torch"]))
    left = sorted(streams.keys() ^ state["streams"].keys())
    streams.update({name: _tensor(text) for name, text in state["streams"].items() if name in streams})
    if accelerator is not None and "accelerator" in state:
        accelerator.set_rng_state(_tensor(state["accelerator"]))
        return left
    return left if accelerator is None and "accelerator" not in state else [*left, "accelerator"]


def _hex(words: Sequence[int]) -> str:
    return np.array(words, dtype=">u4").tobytes().hex()


def _integers(text: str) -> list[int]:
    return [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]


def _text(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
