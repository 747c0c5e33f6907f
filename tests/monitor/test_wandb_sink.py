"""Weights & Biases without key and network: what an offline run leaves on disk, and that nobody is asked for a key."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from framework.base.errors import StartError
from framework.monitor.meters import EvalRecord
from framework.monitor.sinks import Wandb
from tests.monitor.test_sinks import STEP

BLOCK, HEADER = 32768, 7


@pytest.fixture
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key and no settings of whoever runs the test."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def stored(run_dir: Path) -> list[Any]:
    """The records of the one .wandb file under `run_dir`, newest run: a LevelDB log of protobuf messages."""
    from wandb.proto import wandb_internal_pb2

    newest = max(run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    content, at, message, records = newest.read_bytes(), HEADER, b"", []
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        message += content[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # whole, or last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            records.append(record)
            message = b""
    return records


def a_run(run_dir: Path, mode: str, run_id: str | None, status: str = "done") -> str:
    sink = Wandb("framework", "tiny", {"model": {"hidden_size": 64}}, run_dir, mode, run_id)
    sink.train(STEP)
    sink.evaluation(EvalRecord(step=1, loss=5.5, tokens=100, samples=2, time_s=0.5))
    sink.close(status)
    return sink.run_id


@pytest.mark.usefixtures("_alone")
def test_an_offline_run_keeps_its_id_over_restarts(tmp_path: Path) -> None:
    run_id = a_run(tmp_path, "offline", None)
    time.sleep(1.1)  # wandb names the folder of a start by id and second
    assert a_run(tmp_path, "offline", run_id) == run_id
    assert len(list(tmp_path.glob(f"wandb/offline-run-*-{run_id}"))) == 2
    run = next(record.run for record in stored(tmp_path) if record.WhichOneof("record_type") == "run")
    assert (run.run_id, run.project, run.display_name) == (run_id, "framework", "tiny")


@pytest.mark.usefixtures("_alone")
def test_an_offline_run_holds_every_number_over_our_own_step(tmp_path: Path) -> None:
    a_run(tmp_path, "offline", "abc123")
    records = stored(tmp_path)
    history = [record.history for record in records if record.WhichOneof("record_type") == "history"]
    values = [{item.key or item.nested_key[0]: item.value_json for item in line.item} for line in history]
    assert (values[0]["step"], values[0]["train/loss"], values[0]["train/loss_scale"]) == ("1", "5.54", "65536")
    assert (values[1]["step"], values[1]["eval/loss"]) == ("1", "5.5")
    axes = {record.metric.glob_name: record.metric.step_metric for record in records if record.WhichOneof("record_type") == "metric"}
    assert axes["*"] == "step"


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(("status", "code", "preempted"), [("done", 0, 0), ("stopped", 1, 1), ("failed", 1, 0)])
def test_how_the_run_ended_is_sent_along(tmp_path: Path, status: str, code: int, preempted: int) -> None:
    a_run(tmp_path, "offline", None, status)
    records = {record.WhichOneof("record_type"): record for record in stored(tmp_path)}
    assert records["exit"].exit.exit_code == code
    assert ("preempting" in records) == preempted


@pytest.mark.usefixtures("_alone")
def test_an_unknown_mode_is_a_letter(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="'offline'"):
        Wandb("framework", "tiny", {}, tmp_path, "of line", None)


@pytest.mark.usefixtures("_alone")
def test_disabled_leaves_nothing(tmp_path: Path) -> None:
    assert a_run(tmp_path, "disabled", "abc123") == "abc123"
    assert list(tmp_path.glob("**/*.wandb")) == []


PROGRAM = """
import sys
from pathlib import Path
from framework.base.errors import ConfigError
from framework.monitor.sinks import Wandb
try:
    Wandb("framework", "tiny", {}, Path(sys.argv[1]), None, None)
except ConfigError as letter:
    sys.exit(letter.letter())
"""


def test_online_without_a_key_is_a_letter_and_no_question(tmp_path: Path) -> None:
    """On a terminal, where wandb would like to ask, and with nobody to answer."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    ours, theirs = pty.openpty()
    try:
        answer = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path)], env={**environment, "HOME": str(tmp_path)},
            stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(ours)
        os.close(theirs)
    assert answer.returncode == 1
    assert "monitor.wandb=true\n  got       no API key" in answer.stderr
    assert "WANDB_MODE=offline" in answer.stderr
    assert "Traceback" not in answer.stderr
