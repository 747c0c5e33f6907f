"""Bad input, as a user meets it: a clean code, one short letter, no traceback, no hang, nothing written over.

What can be known before the ranks meet is tried in this process; damaged data in one forked rank; and what only several
real processes show through the deepspeed CLI.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import pytest

from framework.base.errors import EXIT_STOPPED
from framework.config.compose import compose
from framework.data.tokens import HEADER, write_tokens
from framework.launch import entry
from framework.trainer import folder
from tests.ranks import Job, launch, run_ranks
from tests.starts import assert_one_letter, letters, start

HOUR = 3600.0
SMALL = ["recipe=tiny", "batch.global_size=4", "batch.micro_size=2", "data.seq_length=16", "data.workers=0"]
SMALL += ["eval.every=-1", "monitor.sample_tokens=0"]


def tree(root: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of every file below `root`, to see that nothing was touched."""
    return {str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns) for path in root.rglob("*") if path.is_file()}


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["recipe=tini"], ["recipe", "tini", "recipe=tiny"]),
        (["precision=fp17"], ["precision", "fp17", "fp16"]),
        (["precision.dtype=fp17"], ["precision.dtype", "fp17", "fp16"]),
        (["zero=1"], ["zero", "stage1"]),
        (["recipe=null"], ["recipe", "tiny"]),
        (["zero.ofload=cpu"], ["zero.ofload", "zero.offload"]),
        (["+zero.ofload=cpu"], ["zero.ofload", "zero.offload"]),
        (["++zero.ofload=cpu"], ["zero.ofload", "zero.offload"]),
        (["+sede=2"], ["sede", "seed"]),
        (["~model.hidden_size"], ["model.hidden_size"]),
        (["steps=many"], ["steps", "many", "int"]),
        (["steps=1.5"], ["steps", "1.5", "int"]),
        (["optimizer.lr=fast"], ["optimizer.lr", "fast", "float"]),
        (["data.files=one"], ["data.files", "one", "list"]),
        (["batch=3"], ["batch"]),
        (["steps=0"], ["steps", "1 or more"]),
        (["optimizer.lr=nan"], ["optimizer.lr", "nan"]),
        (["launch.timeout=inf"], ["launch.timeout", "inf"]),
        (["name=../elsewhere"], ["name"]),
        (["batch.global_size=7", "batch.micro_size=2"], ["batch.global_size", "batch.global_size=8"]),
        (["precision=bf16", "zero=stage0"], ["precision", "zero=stage1", "bf16_autocast"]),
        (["seed=1,2"], ["seed=1,2"]),
        (["-m", "seed=1,2"], ["-m"]),
        (["nonsense"], ["nonsense"]),
        (["--nonsense"], ["--nonsense"]),
        (["--cfg", "everything"], ["--cfg", "everything"]),
        (["--cfg", "job", "zero.ofload=cpu"], ["zero.ofload"]),
        (["--config-dir", "/nowhere"], ["--config-dir", "/nowhere"]),
        (["--config-name", "other"], ["--config-name"]),
        (["hydra.run.dir=elsewhere"], ["hydra.run.dir"]),
        (["seed=${nothing}"], ["seed"]),
    ],
    ids=" ".join,
)
def test_refused_words(words: list[str], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    started = start(words)
    assert (started.code, started.given) == (2, None)
    assert_one_letter(started.text, *parts)
    assert not list(tmp_path.iterdir())


def test_a_rank_waits_for_the_first_to_speak_and_then_says_who_it_is() -> None:
    """The launcher ends it while it waits, if the first rank has met the same refusal."""
    with mock.patch.object(entry.time, "sleep") as sleep:
        started = start(["sede=2"], {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    assert started.code == 2
    sleep.assert_called_once_with(entry.MANNERS_S)
    assert_one_letter(started.text, "rank 1: sede")


def test_help_is_a_menu() -> None:
    started = start(["--help"])
    assert started.code == 0
    for line in ("precision: bf16, bf16_autocast, fp16, fp16_autocast, fp32", "zero: stage0, stage1", "recipe: ", "seq_length: 128"):
        assert line in started.text
    assert letters(started.text) == 0


def test_a_stale_compile_lock_is_removed_and_a_live_one_is_not(tmp_path: Path) -> None:
    lock = tmp_path / "shm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (time.time() - HOUR, time.time() - HOUR))
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    with lock.open():
        assert start(SMALL, environment).code == 0
        assert lock.exists()
    assert start(SMALL, environment).code == 0
    assert not lock.exists()


# ---------------------------------------------------------------- run folders and data, in one rank


def trained(rank: int, world_size: int, words: list[str], cwd: str) -> tuple[int, str]:
    """The exit code and the output of a whole single-process training."""
    from framework.train import train

    os.chdir(cwd)
    started = start(words, {}, train)
    return started.code, started.text


def refuse(words: list[str], cwd: Path, *parts: str) -> None:
    """Training refuses: code 2, one letter with `parts`, and every file as it was."""
    before = tree(cwd)
    [(code, text)] = run_ranks(trained, 1, words, str(cwd))
    assert code == 2, text
    assert_one_letter(text, *parts)
    assert tree(cwd) == before


def a_token_file(prefix: Path, ids: int = 256) -> None:
    write_tokens(prefix, [np.arange(4000) % ids], np.dtype("<u2"))


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut_one_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def claim_dtype(path: Path, code: int) -> None:
    content = path.read_bytes()
    magic, version, _, sequences, documents = HEADER.unpack(content[: HEADER.size])
    path.write_bytes(HEADER.pack(magic, version, code, sequences, documents) + content[HEADER.size :])


DAMAGE: dict[str, tuple[str, Callable[[Path], None], list[str]]] = {
    "missing bin": (".bin", remove, ["no such file"]),
    "missing idx": (".idx", remove, ["no such file"]),
    "empty bin": (".bin", empty, ["an empty file"]),
    "empty idx": (".idx", empty, ["an empty file"]),
    "truncated bin": (".bin", cut_one_byte, ["truncated", "8,000 bytes"]),
    "truncated idx": (".idx", cut_one_byte, ["truncated"]),
    "other dtype than the index says": (".idx", lambda path: claim_dtype(path, 4), ["truncated", "16,000 bytes according to"]),
    "floats": (".idx", lambda path: claim_dtype(path, 7), ["float32", "whole numbers"]),
    "no dtype": (".idx", lambda path: claim_dtype(path, 99), ["dtype code 99"]),
    "not an index": (".idx", lambda path: path.write_bytes(b"PAR1" * 100), ["PAR1"]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_data(damage: str, tmp_path: Path) -> None:
    suffix, harm, parts = DAMAGE[damage]
    a_token_file(tmp_path / "corpus")
    harm(tmp_path / f"corpus{suffix}")
    refuse([*SMALL, "data=tokens", "data.files=[corpus]"], tmp_path, "corpus", *parts)


def test_a_corpus_shorter_than_one_sample(tmp_path: Path) -> None:
    a_token_file(tmp_path / "corpus")
    refuse([*SMALL, "data=tokens", "data.files=[corpus]", "data.seq_length=5000", "model.max_positions=8192"], tmp_path, "data.seq_length")


def test_a_run_folder_of_another_config(tmp_path: Path) -> None:
    other = compose([*SMALL, f"output_root={tmp_path}", "optimizer.lr=0.5"])
    folder.claim(other)
    (tmp_path / "tiny" / "metrics.jsonl").write_text('{"kind":"train","step":1}\n')
    words = [*SMALL, f"output_root={tmp_path}"]
    refuse(words, tmp_path, "optimizer.lr: 0.5 there, 0.003 now", "resume=never")


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "thesis.tex").write_text("three years of work")
    refuse([*SMALL, f"output_root={tmp_path}"], tmp_path, "a folder that is no run")
    refuse([*SMALL, f"output_root={tmp_path}", "resume=never"], tmp_path, "a folder that is no run")


def test_a_port_in_use_by_one_process(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        environment = {"MASTER_PORT": str(holder.getsockname()[1])}
        completed = launch(["framework.train", *SMALL, "data=synthetic"], None, tmp_path, 120, environment)
    assert completed.code == 2, completed.stderr
    assert_one_letter(completed.stdout + completed.stderr, "MASTER_PORT", "a port in use")
    assert not (tmp_path / "runs" / "tiny").exists()


# ---------------------------------------------------------------- through the deepspeed CLI


def test_a_refusal_is_said_once_by_two_ranks(tmp_path: Path) -> None:
    completed = launch(["framework.train", "recipe=tiny", "zero.ofload=cpu"], ranks=2, cwd=tmp_path, timeout=120)
    assert completed.code == 2
    assert_one_letter(completed.stdout + completed.stderr, "zero.ofload")
    assert not completed.left_behind
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_port_in_use_by_two_ranks(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        launcher = ["deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(holder.getsockname()[1]), "--module"]
        completed = launch([*launcher, "framework.train", *SMALL, "data=synthetic"], None, tmp_path, 240)
    assert completed.code == 2, completed.stderr
    assert_one_letter(completed.stdout + completed.stderr, "MASTER_PORT", "a port in use")
    assert not completed.left_behind
    assert not (tmp_path / "runs" / "tiny").exists()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_token_outside_the_vocabulary(workers: int, tmp_path: Path) -> None:
    a_token_file(tmp_path / "corpus", ids=300)
    words = [*SMALL, "data=tokens", "data.files=[corpus]", f"data.workers={workers}"]
    completed = launch(["framework.train", *words], ranks=2, cwd=tmp_path, timeout=240)
    assert completed.code == 2, completed.stderr
    assert_one_letter(completed.stdout + completed.stderr, "corpus.bin", "token id", "ids from 0 to 255", "model.vocab_size")
    assert not completed.left_behind


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_run(tmp_path: Path) -> None:
    words = [*SMALL, "data=synthetic", "steps=100000", "schedule.total_steps=100000"]
    with Job(["framework.train", *words], 2, tmp_path) as job:
        wait_for_steps(job, tmp_path / "runs" / "tiny" / "metrics.jsonl", 5)
        [victim] = [process for process in job.processes() if "--local_rank=1" in process.cmdline()]
        victim.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        completed = job.wait(60)
        assert time.monotonic() - killed < 30
    assert completed.code not in (0, 2)
    assert_one_letter(completed.stdout + completed.stderr, "every rank alive")
    assert not completed.left_behind
    assert json.loads((tmp_path / "runs" / "tiny" / "run.json").read_text())["status"] == "failed"


def wait_for_steps(job: Job, metrics: Path, steps: int) -> None:
    deadline = time.monotonic() + 240
    while not metrics.exists() or metrics.read_text().count("\n") < steps:
        assert job.running(), job.output()
        assert time.monotonic() < deadline, job.output()
        time.sleep(0.05)


@pytest.mark.slow
def test_control_c_leaves_no_process(tmp_path: Path) -> None:
    with Job(["framework.train", *SMALL, "data=synthetic", "data.workers=1", "steps=100000"], None, tmp_path) as job:
        wait_for_steps(job, tmp_path / "runs" / "tiny" / "metrics.jsonl", 3)
        for process in job.processes():  # a terminal sends it to the whole group
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGINT)
        completed = job.wait(60)
    assert completed.code == EXIT_STOPPED
    assert "Traceback" not in completed.stderr
    assert not completed.left_behind
    assert json.loads((tmp_path / "runs" / "tiny" / "run.json").read_text())["status"] == "stopped"
