"""The hook that saves, in whole short runs: what is saved when, what the training waits for, and errors of the writer."""

from __future__ import annotations

import math
import os
import resource
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from framework.data.tokens import write_tokens
from tests import runs
from tests.starts import assert_one_letter

ASYNC = [*runs.PLAIN, "checkpoint=async", "checkpoint.keep_last=0"]
SYNC = [*runs.PLAIN, "checkpoint=sync", "checkpoint.keep_last=0"]


def saved(run: Path) -> list[int]:
    """Steps of the checkpoint events, after a look at the folder: nothing else is there."""
    steps = [event["step"] for event in runs.events(run, "checkpoint")]
    assert runs.whole_steps(run / "checkpoints") == sorted(set(steps))
    assert {path.name for path in (run / "checkpoints").iterdir()} == {f"step_{step:08d}" for step in steps}
    return steps


def slow_saves(chunk_s: float) -> None:
    """Every save of this process sleeps after each chunk; an asynchronous one of a small model has two."""
    from framework.checkpoint.save import Job
    from framework.trainer import saving
    from tests.slow_train import slowed

    saving.Job = slowed(Job, chunk_s)  # type: ignore[misc, assignment]


# ---------------------------------------------------------------- what is saved when


@pytest.mark.parametrize("words", [ASYNC, SYNC], ids=["async", "sync"])
def test_saves_come_at_the_multiples_and_after_the_last_step(words: list[str], tmp_path: Path) -> None:
    runs.train([*words, "checkpoint.every=3", "steps=8"], tmp_path)
    assert saved(tmp_path / "runs/run") == [3, 6, 8]
    for event in runs.events(tmp_path / "runs/run", "checkpoint"):
        folder = tmp_path / f"runs/run/checkpoints/step_{event['step']:08d}"
        assert event["bytes"] == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        assert event["kind"] == f"{'async' if words is ASYNC else 'sync'} disk"
        assert 0 < event["stall_s"] <= event["write_s"]


def test_zero_saves_the_last_step_only(tmp_path: Path) -> None:
    runs.train([*SYNC, "checkpoint.every=0", "steps=5"], tmp_path)
    assert saved(tmp_path / "runs/run") == [5]


def test_none_saves_nothing(tmp_path: Path) -> None:
    runs.train([*runs.PLAIN, "checkpoint=none", "checkpoint.every=1", "steps=3"], tmp_path)
    assert not (tmp_path / "runs/run/checkpoints").exists()


def test_both_ways_save_the_same_bytes_and_change_nothing(tmp_path: Path) -> None:
    more = ["checkpoint.every=2", "steps=5", "verify.hash_every=1", "model.dropout=0.1"]
    runs.train([*ASYNC, *more, "name=async"], tmp_path)
    runs.train([*SYNC, *more, "name=sync"], tmp_path)
    runs.train([*runs.PLAIN, *more, "checkpoint=none", "name=none"], tmp_path)
    for step in (2, 4, 5):
        one, other = (runs.manifest(tmp_path / f"runs/{mode}/checkpoints/step_{step:08d}") for mode in ("async", "sync"))
        assert [file["xxh3_128"] for file in one["files"]] == [file["xxh3_128"] for file in other["files"]]
        assert one["local"] == other["local"]
        assert one["small"]["counters"] == other["small"]["counters"]
    for mode in ("async", "sync"):
        assert runs.hashes(tmp_path / "runs" / mode) == runs.hashes(tmp_path / "runs/none")
        assert runs.losses(tmp_path / "runs" / mode) == runs.losses(tmp_path / "runs/none")


# ---------------------------------------------------------------- a writer that is busy


def test_the_training_goes_on_beside_a_slow_writer_and_its_end_waits(tmp_path: Path) -> None:
    runs.train([*ASYNC, "checkpoint.every=4", "steps=7"], tmp_path, prepare=partial(slow_saves, 0.6))
    assert saved(tmp_path / "runs/run") == [4, 7]
    first, last = runs.events(tmp_path / "runs/run", "checkpoint")
    assert first["write_s"] > 1.2
    assert last["stall_s"] > 1.2  # there is no step left to do meanwhile
    times = {line["step"]: line["step_time_s"] for line in runs.lines(tmp_path / "runs/run/metrics.jsonl")}
    assert max(times[5], times[6]) < 0.6


def test_a_save_that_is_due_waits_for_the_one_before(tmp_path: Path) -> None:
    runs.train([*ASYNC, "checkpoint.every=2", "steps=5"], tmp_path, prepare=partial(slow_saves, 0.3))
    assert saved(tmp_path / "runs/run") == [2, 4, 5]
    assert runs.events(tmp_path / "runs/run", "checkpoint_skipped") == []


@pytest.mark.slow
def test_a_save_that_is_due_is_skipped_if_the_settings_say_so(tmp_path: Path) -> None:
    runs.train([*ASYNC, "checkpoint.every=2", "checkpoint.busy=skip", "steps=7"], tmp_path, prepare=partial(slow_saves, 1.0))
    assert saved(tmp_path / "runs/run") == [2, 7]  # the last step is never left out
    skipped = runs.events(tmp_path / "runs/run", "checkpoint_skipped")
    assert [event["step"] for event in skipped] == [4, 6]
    assert all("step 2 is being written" in event["because"] for event in skipped)


def test_a_run_that_fails_lets_its_save_come_to_an_end(tmp_path: Path) -> None:
    ids = np.arange(4000) % 64
    ids[16 * 14] = 64  # in a sample of step 4, four samples a step
    write_tokens(tmp_path / "corpus", [ids], np.dtype("<u2"))
    words = [*ASYNC, "data=tokens", "data.files=[corpus]", "data.shuffle=false", "checkpoint.every=3", "steps=9"]
    said = runs.train(words, tmp_path, code=2, prepare=partial(slow_saves, 0.5))
    assert_one_letter(said, "corpus.bin", "token id 64")
    assert max(runs.losses(tmp_path / "runs/run")) == 3
    assert runs.whole_steps(tmp_path / "runs/run/checkpoints") == [3]
    assert runs.facts(tmp_path / "runs/run")["status"] == "failed"


# ---------------------------------------------------------------- a writer that fails


def limit_writer(rank: str | None) -> None:
    """The writer process of one rank may write files of 5,000 bytes at most; the training itself is not limited."""
    from framework.checkpoint.writer import Writer

    made = Writer.__init__

    def limited(writer: Writer) -> None:
        made(writer)
        if rank is None or os.environ["RANK"] == rank:
            resource.prlimit(writer.process.pid, resource.RLIMIT_FSIZE, (5000, 5000))

    Writer.__init__ = limited  # type: ignore[method-assign]


def test_an_error_of_the_writer_ends_the_run_at_a_following_step(tmp_path: Path) -> None:
    words = [*ASYNC, "checkpoint.every=5", "steps=2000", "schedule.total_steps=2000"]
    said = runs.train(words, tmp_path, code=1, prepare=partial(limit_writer, None))
    assert_one_letter(said, "checkpoint of step 5", "File too large")
    assert 5 <= max(runs.losses(tmp_path / "runs/run")) < 2000
    assert runs.facts(tmp_path / "runs/run")["status"] == "failed"
    assert runs.whole_steps(tmp_path / "runs/run/checkpoints") == []


def test_an_error_of_one_writer_ends_all_ranks_alike(tmp_path: Path) -> None:
    words = [*runs.SMALL, "checkpoint=async", "checkpoint.every=5", "steps=2000", "schedule.total_steps=2000"]
    said = runs.train(words, tmp_path, ranks=2, code=1, prepare=partial(limit_writer, "1"))
    assert_one_letter(said, "checkpoint of step 5", "rank 1: File too large")
    assert 5 <= max(runs.losses(tmp_path / "runs/run")) < 2000


def test_an_error_of_the_last_save_is_told_as_well(tmp_path: Path) -> None:
    said = runs.train([*ASYNC, "checkpoint.every=0", "steps=3"], tmp_path, code=1, prepare=partial(limit_writer, None))
    assert_one_letter(said, "checkpoint of step 3", "File too large")
    assert runs.facts(tmp_path / "runs/run")["status"] == "failed"


# ---------------------------------------------------------------- every=auto


STEP_S = 0.01


def uneven_steps() -> None:
    """Rank 1 believes that its steps take half as long: on its own it would choose an interval twice as long."""
    from framework.trainer.saving import Saver

    Saver._usual_step_s = lambda saver: STEP_S / (1 + saver.groups.rank)  # type: ignore[method-assign]


@pytest.mark.slow
def test_auto_is_one_choice_of_all_ranks_and_holds_at_resume(tmp_path: Path) -> None:
    words = [*runs.SMALL, "checkpoint=sync", "checkpoint.keep_last=0", "checkpoint.every=auto"]
    runs.train([*words, "steps=60"], tmp_path, ranks=2, prepare=uneven_steps)
    run = tmp_path / "runs/run"
    every = runs.facts(run)["resolved"]["checkpoint.every"]
    told: list[dict[str, Any]] = [event for event in runs.events(run, "checkpoint") if "every" in event]
    assert [(event["step"], event["every"]) for event in told] == [(15, every)]
    cost_s = max(event["cost_s"] for event in runs.events(run, "checkpoint")[1:3])  # the first probe does not tell
    assert every == max(1, math.ceil(20 * cost_s / STEP_S))
    assert told[0]["expected_overhead"] == pytest.approx(cost_s / (every * STEP_S), rel=1e-9)
    first = [5, 10, 15, *range(15 + 3 * every, 60, every), 60]  # the first wait pays for all probes
    assert saved(run) == first

    runs.train([*words, "steps=120"], tmp_path, ranks=2, prepare=uneven_steps)
    assert runs.facts(run)["resolved"]["checkpoint.every"] == every
    assert saved(run) == [*first, *range(60 + every, 120, every), 120]
