"""One step of a model or an engine with its moving books measured beside those on paper."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from framework.config.schema import Batch, Config, Data, Model, Precision, Recompute, Zero
from framework.model import recompute
from framework.model.transformer import Transformer
from framework.monitor.memory import SavedActivations
from framework.planner import memory
from framework.planner.activations import CPU
from framework.planner.ledger import Ledger
from framework.topology.grid import Grid
from framework.topology.random import Streams
from tests.memory import LiveBytes

BESIDE = ("logits", "cast")  # parts of what is saved that stand in books of their own
CHOICES = {
    "none": Recompute(),
    "full": Recompute("full"),
    "every_2": Recompute("full", every=2),
    **{kind: Recompute("selective", modules=(kind,)) for kind in recompute.KINDS},
    "attention+activation": Recompute("selective", modules=("attention", "activation")),
    "activation+norm": Recompute("selective", modules=("activation", "norm")),
    "attention+mlp+norm": Recompute("selective", modules=("attention", "mlp", "norm")),
}


@dataclass(frozen=True)
class Measured:
    """Bytes that the forward pass keeps without logits, and the most that is there in a forward and backward pass (weights apart)."""

    activations: int
    peak: int
    paper: Ledger


def config_of(model: Model, precision: Precision, choice: Recompute, micro: int, sequence: int) -> Config:
    stage = 1 if precision.half_weights else 0
    return Config(
        model=model, precision=precision, recompute=choice, batch=Batch(micro, micro), data=Data(seq_length=sequence), zero=Zero(stage)
    )


def with_documents_apart(config: Config) -> Config:
    return replace(config, data=replace(config.data, documents="apart"))


def starts_of(config: Config) -> Tensor | None:
    """Of a whole micro-batch: where documents are apart, one of three tokens and one behind it in each row."""
    if config.data.documents == "joined":
        return None
    return (torch.arange(config.data.seq_length) >= 3).long().mul(3).expand(config.batch.micro, -1)


def kept(saved: SavedActivations) -> int:
    return sum(nbytes for part, nbytes in saved.kept.items() if part not in BESIDE)


def measure(config: Config) -> Measured:
    """Of the plain model, on one process."""
    model = Transformer(config.model)
    recompute.apply(model, config.recompute, Streams(torch))  # type: ignore[arg-type]
    if config.precision.half_weights:
        model.to(torch.bfloat16)
    size, starts = (config.batch.micro, config.data.seq_length), starts_of(config)
    ids = torch.randint(config.model.vocab_size, size, generator=torch.Generator().manual_seed(1))

    def forward() -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=config.precision.autocast):
            return model(ids, ids, starts)

    saved = SavedActivations(model)
    saved.begin()
    forward().backward()
    saved.end()
    for parameter in model.parameters():
        parameter.grad = None
    with LiveBytes() as live:
        forward().backward()
    return Measured(kept(saved), live.peak, memory.predict(config, Grid(), kernels=CPU))


def beside(paper: Ledger) -> int:
    """Books that a plain model outside an engine has not, or had before the step."""
    return sum(paper.device.get(book, 0) for book in ("parameters", "masters", "moments", "accumulation", "buckets"))
