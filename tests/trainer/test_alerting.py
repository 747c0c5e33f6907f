"""Planted faults in real runs: each raises its own alert, with the setting to change, and no other; and what is done about them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.config.compose import leaves
from tests.marks import slow
from tests.runs import SMALL, events, facts, lines, losses, train

STEPS = 24
LIMIT = ["alerts.window=5", f"steps={STEPS}", "checkpoint=none", "alerts.straggler=3", "alerts.communication=0.6", "alerts.data_wait=0.3"]
"""A busy machine makes one rank slower for a while, which is no fault of ours: what is planted goes far beyond these limits."""
WIDE = ["model.hidden_size=128", "model.ffn_hidden_size=384", "data.seq_length=128", "batch.global_size=16", "batch.micro_size=8"]
"""Work enough that two ranks do not spend their time on messages."""


def slow_loader() -> None:
    from framework.data import stream

    read = stream._Source.__getitem__

    def slowly(self: Any, micro: int) -> Any:
        time.sleep(0.05)
        return read(self, micro)

    stream._Source.__getitem__ = slowly  # type: ignore[method-assign]


def before_each_step(do: Callable[[Any, int], None]) -> None:
    """`do` gets the engine and the number of the call, from 1."""
    from framework.engine.sharded import DeepSpeedEngine

    step, calls = DeepSpeedEngine.step, iter(range(1, 1000))

    def stepped(self: Any, *given: Any) -> Any:
        do(self, next(calls))
        return step(self, *given)

    DeepSpeedEngine.step = stepped  # type: ignore[method-assign]


def slow_rank() -> None:
    def work(engine: Any, call: int) -> None:
        if os.environ["RANK"] == "1":
            time.sleep(0.4)

    before_each_step(work)


def weight(engine: Any) -> torch.Tensor:
    return next(parameter for parameter in engine.engine.module.parameters() if parameter.dim() == 2).data


def poisoned(times: int = 1) -> None:
    def poison(engine: Any, call: int) -> None:
        if 12 <= call < 12 + times:
            weight(engine)[0, 0] = torch.nan

    before_each_step(poison)


def jumping() -> None:
    def jump(engine: Any, call: int) -> None:
        if call == 12:
            weight(engine).mul_(30.0)

    before_each_step(jump)


def odd_batch() -> None:
    """The loss of call 12 is five times what it is."""
    from framework.model.transformer import Transformer

    forward, now = Transformer.forward, [0]

    def scaled(self: Any, *given: Any) -> Any:
        out = forward(self, *given)
        return 5.0 * out if now[0] == 12 and torch.is_grad_enabled() else out

    Transformer.forward = scaled  # type: ignore[method-assign]

    def count(engine: Any, call: int) -> None:
        now[0] = call

    before_each_step(count)


def flipped() -> None:
    def flip(engine: Any, call: int) -> None:
        if call == 12 and os.environ["RANK"] == "1":
            weight(engine)[3].view(torch.int32)[2] ^= 1

    before_each_step(flip)


def alerts(run: Path) -> list[dict[str, Any]]:
    return events(run, "alert")


FAULTS: dict[str, tuple[Callable[[], None] | None, int, list[str], str, str]] = {
    "a slow loader": (slow_loader, 1, [], "data_wait", "data.workers="),
    "a slow rank": (slow_rank, 2, WIDE, "straggler", "launch.exclude"),
    "a number that is none": (poisoned, 1, [], "nan", "optimizer.lr"),
    "a loss that jumps": (jumping, 1, [], "loss_spike", "optimizer.lr"),
    "everything computed again": (None, 1, [*WIDE, "recompute=full", "model.num_layers=4"], "recompute", "recompute=none"),
    "a replica changed by one bit": (flipped, 2, [*WIDE, "alerts.drift_every=4"], "drift", "launch.exclude"),
}


IN_A_SECOND = ("a slow loader", "a number that is none", "a loss that jumps")


@pytest.mark.parametrize("fault", [fault if fault in IN_A_SECOND else slow(fault) for fault in FAULTS])
def test_a_planted_fault_raises_its_alert_and_no_other(fault: str, tmp_path: Path) -> None:
    plant, ranks, words, kind, change = FAULTS[fault]
    train([*SMALL, "zero=stage0", *LIMIT, *words], tmp_path, ranks, prepare=plant)
    raised = alerts(tmp_path / "runs" / "run")
    assert {alert["alert"] for alert in raised} == {kind}, raised
    if kind == "straggler":
        assert (raised[0]["rank"], raised[0]["limit"]) == (1, 3.0)
    assert change in raised[0]["change"]
    known = {key for key, _, _ in leaves()} | {key.partition(".")[0] for key, _, _ in leaves()}
    named = [word.partition("=")[0].strip("(),") for word in raised[0]["change"].split() if "=" in word]
    assert all(name in known for name in named), named


@pytest.mark.slow
def test_a_sound_run_raises_none(tmp_path: Path) -> None:
    train([*SMALL, "zero=stage0", *LIMIT, *WIDE, "alerts.drift_every=2"], tmp_path, 2)
    assert alerts(tmp_path / "runs" / "run") == []


def test_messages_beyond_their_limit_are_told(tmp_path: Path) -> None:
    train([*SMALL, "zero=stage0", *LIMIT, "alerts.communication=0.001"], tmp_path, 2)
    [told] = [alert for alert in alerts(tmp_path / "runs" / "run") if alert["alert"] == "communication"]
    assert told["limit"] == 0.001


@pytest.mark.parametrize(("zero", "kept"), [("stage0", "every"), ("stage1", "every"), ("stage0", "memory_every")])
def test_a_rollback_goes_back_to_the_last_good_state_and_passes_over_the_data(zero: str, kept: str, tmp_path: Path) -> None:
    """Afterwards the run has the weights of step 10 and the samples after step 12: as one that was told to do so."""
    words = [*SMALL, f"zero={zero}", f"steps={STEPS}", "alerts.actions=[nan:rollback]", "checkpoint.every=50", f"checkpoint.{kept}=5"]
    train([*words, "data.log_samples=true"], tmp_path, prepare=poisoned if zero == "stage0" else sticky)
    run = tmp_path / "runs" / "run"
    assert facts(run)["status"] == "done"
    [rolled] = events(run, "rollback")
    assert (rolled["step"], rolled["to"], rolled["samples"], rolled["because"]) == (12, 10, [40, 48], "nan")
    samples = [line for line in lines(run / "samples.jsonl") if line["micro"] == 0]
    at = [line["step"] for line in samples]
    assert at == [*range(1, 12), *range(11, STEPS + 1)]
    assert (samples[10]["ids"], samples[11]["ids"]) == ([40], [48])  # step 11, the first time and the second
    assert all(loss == loss for loss, _ in losses(run).values())


def sticky() -> None:
    """Under ZeRO the poisoned weight is overwritten from the master, so the master is poisoned."""

    def poison(engine: Any, call: int) -> None:
        if call == 12:
            engine.optimizer.single_partition_of_fp32_groups[0].data[0] = torch.nan
            weight(engine)[0, 0] = torch.nan

    before_each_step(poison)


def test_a_rollback_that_is_needed_again_and_again_ends_the_run(tmp_path: Path) -> None:
    words = [*SMALL, "zero=stage0", f"steps={STEPS}", "alerts.actions=[nan:rollback]", "alerts.rollbacks=2", "checkpoint.every=5"]
    text = train(words, tmp_path, code=1, prepare=partial(poisoned, 100))
    assert "alert nan" in text
    assert "after 2 rollbacks" in text
    assert len(events(tmp_path / "runs" / "run", "rollback")) == 2
    assert facts(tmp_path / "runs" / "run")["status"] == "failed"


def test_a_rollback_with_nothing_saved_is_a_letter(tmp_path: Path) -> None:
    words = [*SMALL, "zero=stage0", f"steps={STEPS}", "alerts.actions=[nan:rollback]", "checkpoint.every=50"]
    text = train(words, tmp_path, code=1, prepare=poisoned)
    assert "a rollback to step 11 or before" in text
    assert "checkpoint.every=N" in text
    assert "Traceback" not in text


def test_a_step_is_skipped(tmp_path: Path) -> None:
    """Weights after the step are those before it: the loss goes on where it was, and the gradient was never applied."""
    words = [*SMALL, "zero=stage1", f"steps={STEPS}", "alerts.actions=[loss_spike:skip]", "checkpoint=none"]
    train(words, tmp_path, prepare=odd_batch)
    run = tmp_path / "runs" / "run"
    steps = {line["step"]: line for line in lines(run / "metrics.jsonl") if line["kind"] == "train"}
    assert [step for step, line in steps.items() if line["skipped"]] == [12]
    assert steps[STEPS]["applied"] == STEPS - 1
    assert [(alert["alert"], alert["step"], alert["actions"]) for alert in alerts(run)] == [("loss_spike", 12, ["skip"])]


def test_a_run_stops_where_it_is_told_to(tmp_path: Path) -> None:
    words = [*SMALL, "zero=stage0", f"steps={STEPS}", "alerts.actions=[nan:stop]", "checkpoint.every=5"]
    text = train(words, tmp_path, code=1, prepare=poisoned)
    run = tmp_path / "runs" / "run"
    assert "alert nan" in text
    assert max(losses(run)) == 12
    assert sorted(folder.name for folder in (run / "checkpoints").glob("step_*")) == ["step_00000005", "step_00000010"]


@pytest.mark.slow
def test_drift_goes_back_to_where_the_ranks_agreed(tmp_path: Path) -> None:
    words = [*SMALL, *WIDE, "zero=stage0", f"steps={STEPS}", "alerts.actions=[drift:rollback]", "alerts.drift_every=6"]
    train([*words, "checkpoint.every=2"], tmp_path, 2, prepare=flipped)
    [rolled] = events(tmp_path / "runs" / "run", "rollback")
    assert (rolled["step"], rolled["to"]) == (12, 6)
    assert facts(tmp_path / "runs" / "run")["status"] == "done"


@pytest.mark.slow
def test_the_windows_survive_a_restart(tmp_path: Path) -> None:
    """A spike in the second step after a start is one, because the steps of the start before count."""
    words = [*SMALL, "zero=stage0", "checkpoint.every=20"]
    train([*words, "steps=20"], tmp_path)

    train([*words, "steps=23"], tmp_path, prepare=second_call)
    assert [(alert["alert"], alert["step"]) for alert in alerts(tmp_path / "runs" / "run")] == [("loss_spike", 22)]


def second_call() -> None:
    def jump(engine: Any, call: int) -> None:
        if call == 2:
            weight(engine).mul_(30.0)

    before_each_step(jump)
