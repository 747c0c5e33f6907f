"""verify.py: the cases that it makes of a config; then real proofs in fresh processes, one of a sound run and one of a run with a fault."""

from __future__ import annotations

import dataclasses
import io
import signal
import time
from pathlib import Path

import pytest
from rich.console import Console

from framework.base.errors import RunError
from framework.config.compose import compose
from framework.config.schema import Config
from framework.data.prepare import open_corpora
from framework.data.tokens import TokenFile
from framework.studies import verify as study
from framework.studies.verify import accumulating_micro_size, allowed, edges, make_runs, matrix, prove, show
from tests.ranks import ROOT, Job, launch

SMALL = ["recipe=tiny", "model.hidden_size=32", "model.num_layers=2", "model.ffn_hidden_size=64", "data.seq_length=16", "model.dropout=0.1"]
SMALL += ["batch.global_size=8", "batch.micro_size=4", "data=synthetic", "data.synthetic_tokens=20000", "data.workers=0"]
SMALL += ["monitor.console=none", "monitor.sample_tokens=0", "eval.every=-1", "verify.steps=3"]


def screen() -> Console:
    return Console(file=io.StringIO(), width=200)


def said(on: Console) -> str:
    assert isinstance(on.file, io.StringIO)
    return on.file.getvalue()


def batch(global_size: int, micro_size: int, ranks: int = 2) -> Config:
    return compose([f"batch.global_size={global_size}", f"batch.micro_size={micro_size}", f"launch.num_procs={ranks}"])


@pytest.mark.slow
def test_every_word_of_every_case_composes() -> None:
    config = compose(SMALL)
    runs = make_runs(config, SMALL, screen())
    for case in (*edges(config, screen()), *matrix(config)):
        composed = compose([*runs.words, *case.words, *case.killed_words])
        assert composed.verify.hash_every == 1
        assert composed.checkpoint.mode == "async"
        assert composed.schedule.total_steps == config.schedule.total_steps
        assert all(moment.saved <= config.verify.steps for moment in case.moments)


def test_the_straight_run_saves_nothing_and_differs_in_nothing_that_matters() -> None:
    config = compose(SMALL)
    straight = compose(make_runs(config, SMALL, screen()).words)
    assert straight.checkpoint.mode == "none"
    for part in ("model", "batch", "precision", "zero", "optimizer", "schedule"):
        assert getattr(straight, part) == getattr(config, part)
    assert dataclasses.replace(straight.data, log_samples=False) == config.data


def test_the_epoch_ends_inside_the_step_after_the_checkpoint(tmp_path: Path) -> None:
    config = compose(SMALL)
    case = next(case for case in edges(config, screen()) if case.name == "epoch_edge")
    composed = compose([*SMALL, *case.words, f"data.cache={tmp_path}"])
    samples = len(open_corpora(composed.data, composed.model.vocab_size, composed.seed).train)
    first = config.verify.steps * config.batch.global_size  # samples read up to the checkpoint
    assert first < samples < first + config.batch.global_size
    assert TokenFile(str(next(tmp_path.glob("*.bin")).with_suffix(""))).num_tokens == composed.data.synthetic_tokens


@pytest.mark.parametrize(
    ("config", "micro_size"),
    [
        (batch(8, 2), 2),  # accumulates already
        (batch(8, 4), 2),  # one micro-batch of 4 becomes two
        (batch(12, 6), 3),
        (batch(10, 5), 1),
        (batch(2, 1), None),
        (batch(2, 2, ranks=1), 1),
    ],
)
def test_the_micro_size_with_which_a_step_accumulates(config: Config, micro_size: int | None) -> None:
    assert accumulating_micro_size(config) == micro_size


def test_a_step_that_cannot_accumulate_is_left_out_and_said() -> None:
    on = screen()
    assert "accumulation_edge" not in [case.name for case in edges(batch(2, 1), on)]
    assert "left out" in said(on)


def test_the_matrix_holds_every_allowed_pair_and_no_other() -> None:
    pairs = {(precision.dtype, precision.autocast, zero.stage) for precision, zero in allowed(compose(SMALL))}
    expected = {("fp32", False, stage) for stage in range(4)} | {("bf16", True, stage) for stage in range(4)}
    expected |= {(dtype, False, stage) for dtype in ("bf16", "fp16") for stage in (1, 2, 3)} | {("fp16", True, 0)}
    assert pairs == expected
    assert len(list(matrix(compose(SMALL)))) == 2 * len(expected)


# ---------------------------------------------------------------- real runs


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.slow
def test_a_sound_run_is_proved(tmp_path: Path) -> None:
    done = launch(["framework.verify", *SMALL, "launch.num_procs=2"], None, tmp_path, timeout=1500)
    assert done.code == 0, done.stdout + done.stderr
    assert "4 of 4 equal, bit for bit, on every rank" in done.stdout
    assert "differs" not in done.stdout
    assert done.left_behind == ()


@pytest.mark.slow
@pytest.mark.usefixtures("importable")
def test_a_run_that_forgets_its_random_numbers_is_found(tmp_path: Path) -> None:
    words = [*SMALL, f"output_root={tmp_path}/runs", "launch.num_procs=1"]
    config, on = compose(words), screen()
    runs = dataclasses.replace(make_runs(config, words, on), module="tests.studies.forgetful")
    verdicts = prove(runs, list(edges(config, on))[:1])
    show(verdicts, on)
    (verdict,) = verdicts
    # Resumed after step 3: in step 4 the mask of dropout is the first thing to be another one, and everything else follows from it.
    assert verdict.resumed == (3,)
    assert verdict.columns["rng"] == "differs at step 4, rank 0"
    assert verdict.columns["metrics"].startswith("differs at step 4, rank 0: loss ")
    assert verdict.columns["optimizer"].startswith("differs at step 4, rank 0: master ")
    assert verdict.columns["weights"].startswith("differs at step 4, rank 0: live ")
    assert (verdict.columns["data"], verdict.columns["samples"]) == ("equal", "equal")
    assert f"killed, rng: {verdict.columns['rng']}" in said(on)


def test_a_difference_becomes_a_letter_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    differs = study.Verdict("killed", (3,), {"rng": "differs at step 4, rank 0"})
    monkeypatch.setattr(study, "prove", lambda runs, cases: [differs])
    with pytest.raises(RunError, match="1 of 1 cases differ: killed") as letter:
        study.verify(compose(SMALL), SMALL, screen())
    assert letter.value.exit_code == 1


def test_what_check_refuses_is_refused_for_the_ranks_that_would_run(tmp_path: Path) -> None:
    words = ["framework.verify", "recipe=tiny", "batch.global_size=3", "batch.micro_size=3", "launch.num_procs=2"]
    done = launch(words, None, tmp_path, timeout=60)
    assert done.code == 2
    assert "data 2" in done.stderr


@pytest.mark.slow
def test_an_interrupted_proof_leaves_no_process(tmp_path: Path) -> None:
    with Job(["framework.verify", *SMALL, "verify.steps=1000", "launch.num_procs=2"], None, tmp_path) as job:
        until = time.monotonic() + 300
        while not (tmp_path / "runs/.verify/tiny/killed_straight/metrics.jsonl").exists() and time.monotonic() < until:
            time.sleep(0.1)
        assert len(job.processes()) > 3
        job.send(signal.SIGTERM)
        done = job.wait(60)
    assert done.code == 128 + signal.SIGTERM
    assert done.left_behind == ()
