"""Run folders planted file by file: what a run may write, without a run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from framework.config.compose import compose, to_dict

PARTS = {"data": 0.01, "forward": 0.1, "backward": 0.2, "recompute": 0.05, "communication": 0.03, "optimizer": 0.02, "other": 0.01}
BOOKS = {"moments": {"predicted": 3 * 2**20, "measured": 2 * 2**20}, "logits": {"predicted": 2**20, "measured": None}}
FACTS = {"status": "stopped", "steps": 60, "command": ["framework/train.py", "recipe=tiny", "name=a b"], "git_commit": "c0ffee",
         "world": {"size": 2, "hosts": ["here", "there"]}, "versions": {"python": "3.11", "torch": "2.13"},
         "starts": [{"time": "2026-01-02T03:04:05+00:00", "ended": "2026-01-02T04:04:05+00:00", "end": "stopped"}],
         "memory": {"rank": 0, "step": 2, "books": BOOKS, "peak_predicted": 5 * 2**20, "machine": {}, "worst_error": 0.5}}  # fmt: skip
EVENTS = [
    *({"event": "checkpoint", "step": step, "kind": "async disk", "bytes": 2**20, "stall_s": 0.01, "write_s": 0.5} for step in (10, 20)),
    {"event": "alert", "step": 12, "alert": "loss_spike", "value": 9.0, "limit": 6.0, "rank": 1,
     "says": "A loss <script>alert(1)</script>.", "change": "optimizer.lr=1e-3"},
    {"event": "rollback", "step": 12, "to": 10, "because": "loss_spike"},
    {"event": "signal", "step": 30, "because": {"0": "SIGTERM", "1": "a peer"}},
    {"event": "restart", "start": 2, "after_step": 30, "because": "rank 1 was killed"},
    {"event": "resume", "step": 30, "from": "checkpoints/step_00000030", "changes": ["zero.stage [layout]: 1 -> 2"]},
    {"event": "profile", "step": 13},
]  # fmt: skip
OPERATORS = [{"name": "aten::mm", "shapes": "[4, 5] x [5, 6]", "calls": 7, "self_s": 0.0125, "share": 0.25}]


def train_line(step: int, loss: Any, **more: Any) -> dict[str, Any]:
    rest = {"grad_norm": 1.0 + step % 3, "lr": 1e-3, "tokens": 64, "tokens_per_s": 150.0, "memory_bytes": 2**28}
    return {"kind": "train", "step": step, "loss": loss, **rest, "step_time_s": sum(PARTS.values()), **more}


def write(path: Path, lines: Iterable[Mapping[str, Any]], torn: str = "") -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)


def plant(folder: Path, name: str, lines: Iterable[Mapping[str, Any]] | None = None, **settings: Any) -> Path:
    """A run folder with a config.yaml, and metrics if there are `lines`."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({**to_dict(compose(["recipe=tiny"])), "name": name, **settings}, sort_keys=False))
    if lines is not None:
        write(folder / "metrics.jsonl", lines, torn='{"kind": "train", "st')
    return folder


def full(folder: Path, name: str = "a <b>bold</b> & run") -> Path:
    """A run folder with everything that a run can write, 600 steps, two losses that are no numbers, an unknown setting."""
    noise = random.Random(7)
    lines: list[dict[str, Any]] = []
    for step in range(1, 601):
        loss = "nan" if step in (300, 301) else 2 + 3 * 0.99**step + noise.gauss(0, 0.05)
        aside = {"evaluation": 0.5} if step % 100 == 0 else {}
        lines.append(train_line(step, loss, parts=PARTS, hidden_s=0.02, aside_s=aside, mfu=0.375))
        if step % 100 == 0:
            lines.append({"kind": "eval", "step": step, "loss": 2.5 - step / 1000, "tokens": 1, "samples": 1, "time_s": 0.5})
    plant(folder, name, lines, lora={"rank": 4})
    write(folder / "events.jsonl", EVENTS, torn='{"event": "ch')
    (folder / "run.json").write_text(json.dumps(FACTS))
    (folder / "profile").mkdir()
    (folder / "profile" / "ops.json").write_text(json.dumps(OPERATORS))
    return folder
