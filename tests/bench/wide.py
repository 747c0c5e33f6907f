"""The models of the checkpoint benchmark: wide and shallow, so that a step is cheap beside the state that it leaves."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from framework.config import schema
from framework.config.parameters import count

MODELS = {
    "3M": schema.Model(hidden_size=256, num_layers=2, num_heads=4, ffn_hidden_size=512, vocab_size=8192, max_positions=16),
    "110M": schema.Model(hidden_size=1024, num_layers=6, num_heads=8, ffn_hidden_size=2816, vocab_size=32768, max_positions=16),
}
"""3,409,152 and 110,638,080 parameters."""
RANKS = 2
SEQ_LENGTH = 16


def words(model: str, folder: Path, name: str, steps: int) -> list[str]:
    """A run of `steps` steps in `folder / name`, without anything that is not training; saving is left to the caller."""
    fields = {field.name: getattr(MODELS[model], field.name) for field in dataclasses.fields(schema.Model)}
    return [
        "zero=stage1", "precision=fp32", "data=synthetic", "data.workers=0", "schedule=constant",
        *(f"model.{key}={'null' if value is None else value}" for key, value in fields.items()),
        f"data.seq_length={SEQ_LENGTH}", f"data.cache={folder}/cache", "batch.micro_size=1", f"batch.global_size={RANKS}",
        f"output_root={folder}", f"name={name}", f"steps={steps}", "eval.every=-1", "monitor.console=none", "monitor.curve=false",
    ]  # fmt: skip


def parameters(model: str) -> int:
    return count(MODELS[model])
