"""What every side of the benchmark trains: one model, one batch shape, one optimizer. Written once, so that no side differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from framework.config import schema
from framework.model.transformer import Transformer

MODEL = schema.Model(
    hidden_size=320, num_layers=7, num_heads=5, ffn_hidden_size=864, vocab_size=4096, max_positions=128, tie_embeddings=True
)  # 9,988,800 parameters
SEQ_LENGTH, MICRO_SIZE, ACCUMULATION = 128, 1, 2
LEARNING_RATE, WEIGHT_DECAY, CLIP = 3e-4, 0.1, 1.0


def overrides(data_ranks: int) -> list[str]:
    """The same workload as words for our command line."""
    # Every field, not only those above: conf/model presets have values of their own.
    model = {field.name: getattr(MODEL, field.name) for field in dataclasses.fields(MODEL)}
    return [
        *(f"model.{key}={'null' if value is None else value}" for key, value in model.items()),
        f"data.seq_length={SEQ_LENGTH}",
        f"batch.micro_size={MICRO_SIZE}",
        f"batch.global_size={MICRO_SIZE * ACCUMULATION * data_ranks}",
        f"optimizer.lr={LEARNING_RATE}",
        f"optimizer.weight_decay={WEIGHT_DECAY}",
        f"clip_grad_norm={CLIP}",
        "schedule=constant",
    ]


def make_model() -> Transformer:
    model = Transformer(MODEL)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            nn.init.normal_(parameter, std=MODEL.init_std)
    return model


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)


def micro_batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (ids, targets), each [micro, seq]; sixteen are made once in memory and used in turn."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randint(MODEL.vocab_size, (16, MICRO_SIZE, SEQ_LENGTH + 1), generator=generator)
    while True:
        for row in pool:
            yield row[:, :-1].contiguous(), row[:, 1:].contiguous()


class StepLines:
    """One line a step in a file: what the observer in harness.py counts. No path: count nothing."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("w", buffering=1) if path else None

    def step(self, number: int, loss: float) -> None:
        if self._file:
            self._file.write(f'{{"step": {number}, "loss": {loss!r}}}\n')
