"""fp16 runs in which one known module's gradients overflow: the module is named once in each row of skipped steps, and nothing changes."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from framework.config.compose import compose
from framework.trainer.overflow import due
from tests import runs

FP16 = [*runs.SMALL, "checkpoint=none", "model.num_layers=3", "steps=9", "precision.initial_scale_power=4"]


def plant(steps: range, micros: int) -> None:
    """What comes back through the output of block 1 is infinite in these steps: the first parameters that see it are that block's."""
    from framework.model.transformer import Block

    plain = Block.forward
    passed = dict[int, int]()

    def forward(self: Any, *inputs: Any) -> Any:
        out = plain(self, *inputs)
        index = int(self.mlp.down_proj.weight.logical.name.split(".")[1])
        if index == 1 and out.requires_grad:
            passed[1] = passed.get(1, 0) + 1
            if (passed[1] - 1) // micros + 1 in steps:
                out.register_hook(infinite)
        return out

    Block.forward = forward


def infinite(gradient: Tensor) -> Tensor:
    return gradient * math.inf


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, ["precision=fp16", "zero=stage1"]),
        (2, ["precision=fp16_autocast", "zero=stage0"]),
        pytest.param(2, ["precision=fp16", "zero=stage1"], marks=pytest.mark.slow),
        pytest.param(1, ["precision=fp16_autocast", "zero=stage0"], marks=pytest.mark.slow),
        pytest.param(2, ["precision=fp16", "zero=stage3"], marks=pytest.mark.slow),
        pytest.param(2, ["precision=fp16", "zero=stage1", "recompute=full"], marks=pytest.mark.slow),
        pytest.param(2, ["precision=fp16", "zero=stage1", "parallel=pipeline2"], marks=pytest.mark.slow),
    ],
)
def test_the_module_is_named(ranks: int, words: list[str], tmp_path: Path) -> None:
    data = 1 if "parallel=pipeline2" in words else ranks
    bad = partial(plant, range(3, 8), 4 // data)
    runs.train([*FP16, *words, "alerts.skipped=2", "monitor.console=plain"], tmp_path, ranks=ranks, prepare=bad)
    runs.train([*FP16, *words, "alerts.skipped=0", "name=blind"], tmp_path, ranks=ranks, prepare=bad)
    skipped = [line["step"] for line in runs.lines(tmp_path / "runs/run/metrics.jsonl") if line["kind"] == "train" and line["skipped"]]
    assert skipped == [3, 4, 5, 6, 7]
    (event,) = runs.events(tmp_path / "runs/run", "gradients")
    assert event["step"] == 5
    assert event["module"] == "layers.1.mlp.down_proj"
    logs = {row["layer"]: row["log2"] for row in event["layers"]}
    assert {"layers.0", "layers.1", "layers.2", "final_norm", "embed_tokens"} <= set(logs)
    assert logs["layers.2"] is not None
    known = [value for value in logs.values() if value is not None]
    assert event["spread"] == pytest.approx(max(known) - min(known))
    assert all(-30 < value < 10 for value in known)
    assert not runs.events(tmp_path / "runs/blind", "gradients")
    assert repr(runs.losses(tmp_path / "runs/run")) == repr(runs.losses(tmp_path / "runs/blind"))  # nan is not equal to itself


def test_when_the_next_step_is_looked_at() -> None:
    fp16 = compose(["recipe=tiny", "precision=fp16", "precision.min_scale=8", "alerts.skipped=3"])
    assert [due(fp16, skipped, 1024.0) for skipped in (0, 2, 3, 4)] == [False, False, True, True]
    assert [due(fp16, skipped, 8.0) for skipped in (0, 1)] == [False, True]
    autocast = compose(["recipe=tiny", "precision=fp16_autocast", "zero=stage0", "alerts.skipped=3"])
    assert [due(autocast, 1, scale) for scale in (2.0, 1.0, 0.5)] == [False, True, True]
    never = compose(["recipe=tiny", "precision=fp16", "alerts.skipped=0"])
    assert not due(never, 9, 1.0)
