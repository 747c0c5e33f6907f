"""run.json over the life of a run: started, killed, started again, done."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch

from framework.base.errors import StartError
from framework.monitor.runfile import RunFile, Start, git_commit, versions

FIRST = Start(command=["framework/train.py", "recipe=tiny"], world_size=2, hosts=["here"], config_hash="c0ffee", resolved={"micro_size": 4})
AGAIN = Start(command=["framework/train.py"], world_size=4, hosts=["here", "there"], config_hash="c0ffee", first_step=51)


def test_a_new_run_has_no_past(tmp_path: Path) -> None:
    run = RunFile(tmp_path / "run.json")
    assert (run.status, run.config_hash, run.tracker_run_id, run.resolved, run.starts) == (None, None, None, {}, [])
    assert not (tmp_path / "run.json").exists()


def test_what_is_written_at_the_start(tmp_path: Path) -> None:
    RunFile(tmp_path / "run.json").begin(FIRST)
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts["status"] == "running"
    assert facts["command"] == ["framework/train.py", "recipe=tiny"]
    assert facts["world"] == {"size": 2, "hosts": ["here"]}
    assert facts["config_hash"] == "c0ffee"
    assert facts["resolved"] == {"micro_size": 4}
    assert facts["versions"]["python"] == sys.version.split()[0]
    assert facts["versions"]["torch"] == torch.__version__
    [start] = facts["starts"]
    assert (start["world_size"], start["first_step"], start["end"], start["ended"]) == (2, 1, None, None)
    when = datetime.fromisoformat(start["time"])
    assert when.utcoffset() == timedelta(0)
    assert abs(datetime.now(timezone.utc) - when) < timedelta(minutes=1)


def test_history_of_a_run_that_was_stopped_killed_and_finished(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    first = RunFile(path)
    first.begin(FIRST)
    first.track("abc123")
    first.finish("stopped")
    assert RunFile(path).status == "stopped"
    RunFile(path).begin(FIRST)  # and never heard of again
    assert RunFile(path).status == "running"
    third = RunFile(path)
    third.begin(AGAIN)
    third.finish("done")
    run = RunFile(path)
    assert run.status == "done"
    assert [start["end"] for start in run.starts] == ["stopped", "failed", "done"]
    assert [start["first_step"] for start in run.starts] == [1, 1, 51]
    assert [start["world_size"] for start in run.starts] == [2, 2, 4]
    assert run.starts[1]["ended"] is None
    assert run.tracker_run_id == "abc123"


@pytest.mark.parametrize("content", ["", "{", "[]", "7"])
def test_a_file_that_is_no_run_json_is_a_letter_and_is_kept(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(StartError, match=r"run\.json"):
        RunFile(path)
    assert path.read_text() == content


def test_the_commit_is_git_s_own_and_none_outside_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit() is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "core.hooksPath=/dev/null"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert git_commit() is None, "a repository without a commit"
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    log = subprocess.run([*git, "log", "-1", "--format=%H"], check=True, capture_output=True, text=True)
    assert git_commit() == log.stdout.strip()


def test_versions_name_what_is_installed() -> None:
    assert versions()["numpy"] == __import__("numpy").__version__
