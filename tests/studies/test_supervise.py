"""The supervisor through the command line: what it starts again, from where, on how many ranks, and when it gives up."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from framework.base.errors import RunError
from framework.config.check import check
from framework.config.compose import compose
from framework.launch.command import Places, places, read_hosts
from framework.launch.tree import free_port
from framework.studies.supervise import Ending, Supervisor
from tests import runs
from tests.ranks import ROOT, Completed, Job
from tests.sweeps import command

WORDS = ["name=run", "checkpoint=sync", "checkpoint.every=3", "launch.supervise=true", "verify.hash_every=1", "model.dropout=0.1"]


def fault(tmp_path: Path, kind: str, rank: int = 1, step: int = 7, once: bool = True) -> dict[str, str]:
    """The environment that strikes `rank`; without `once`, at every start: the mark cannot be made there."""
    flag = tmp_path / "struck" if once else Path("/dev/full/struck")
    struck = {"FAULT_RANK": str(rank), "FAULT_STEP": str(step), "FAULT_KIND": kind, "FAULT_ONCE": str(flag)}
    return {"PYTHONPATH": f"{ROOT / 'tests/faults'}:{ROOT}", **struck}


def start(words: list[str], cwd: Path, steps: int = 20, env: dict[str, str] | None = None, timeout: float = 240) -> Completed:
    with Job(command(words, cwd, steps), None, cwd, env) as job:
        done = job.wait(timeout)
        assert job.processes() == []
    assert done.left_behind == ()
    return done


def straight(cwd: Path, words: list[str], steps: int = 20) -> Path:
    """The same run, never disturbed."""
    done = start([*words, "name=straight"], cwd, steps)
    assert done.code == 0, done.stdout + done.stderr
    return cwd / "runs/straight"


def restarts(run: Path) -> list[dict[str, Any]]:
    return runs.events(run, "restart")


# ---------------------------------------------------------------- what the next start is


def supervisor(tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """Of a run on two hosts with two ranks each, whose folder is in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("alpha slots=2\nbeta slots=2\n")
    words = ["batch.global_size=8", "batch.micro_size=2", "launch.supervise=true", "launch.hostfile=hosts", "name=run", *words]
    config = compose(words)
    return Supervisor(config, places(config.launch, 1))


def test_hosts_that_do_not_answer_are_left_out_until_they_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watching = supervisor(tmp_path, ["launch.elastic=true"], monkeypatch)
    answering = {"beta"}
    monkeypatch.setattr("framework.studies.supervise._answers", answering.__contains__)
    config, there = watching._again(watching.config, Ending(None, "a lost host"), time.time())
    assert there == Places(2, 2, {"beta": 2})
    assert read_hosts(Path(config.launch.hostfile or "").read_text()) == {"beta": 2}
    assert (config.batch.global_size, config.batch.micro_size) == (8, 2)
    check(config, there.ranks, there.ranks_per_host)
    answering.add("alpha")
    config, there = watching._again(config, Ending(None, "another fault"), time.time())
    assert there == Places(4, 2, {"alpha": 2, "beta": 2})
    answering.clear()
    with pytest.raises(RunError, match="no host"):
        watching._again(config, Ending(None, "the end"), time.time())


@pytest.mark.parametrize(
    ("resume", "claimed", "saved", "then"),
    [
        ("never", False, False, "never"), ("never", True, False, "auto"), ("auto", True, True, "auto"),
        ("runs/other", True, False, "runs/other"), ("runs/other", True, True, "auto"), ("must", True, False, "must"),
    ],
)  # fmt: skip
def test_the_next_start_goes_on_from_this_one(
    resume: str, claimed: bool, saved: bool, then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not from what the first start was told, once this run has something of its own."""
    watching = supervisor(tmp_path, [f"resume={resume}"], monkeypatch)
    watching.folder.mkdir(parents=True)
    began = time.time()
    if claimed:
        (watching.folder / "config.yaml").touch()
    if saved:
        (watching.folder / "events.jsonl").write_text('{"event": "checkpoint", "step": 3}\n')
    assert watching._again(watching.config, Ending(None, "a fault"), began - 1.0)[0].resume == then


@pytest.mark.slow
def test_a_port_that_is_taken_is_another_start_of_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose([*runs.SMALL, "steps=2", "launch.num_procs=2", "data.cache=cache"])
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        ports = iter([taken.getsockname()[1], free_port()])
        monkeypatch.setattr("framework.studies.supervise.free_port", lambda: next(ports))
        with Supervisor(config, places(config.launch, 1)) as watching:
            assert watching.run() == 0
    assert list(ports) == []
    assert len(runs.facts(tmp_path / "runs/run")["starts"]) == 1


# ---------------------------------------------------------------- whole runs


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "cause"), [("crash", "a planted fault"), ("kill", "rank 1 was killed by SIGKILL")])
def test_a_run_that_loses_a_rank_goes_on(kind: str, cause: str, tmp_path: Path) -> None:
    words = [*WORDS, "launch.num_procs=2"]
    done = start(words, tmp_path, env=fault(tmp_path, kind))
    assert done.code == 0, done.stdout + done.stderr
    run = tmp_path / "runs/run"
    [restart] = restarts(run)
    assert cause in restart["because"]
    assert (restart["start"], restart["after_step"], restart["ranks"]) == (2, 6, 2)
    assert runs.events(run, "resume")[-1]["step"] == 6
    assert runs.same_steps(runs.hashes(run), runs.hashes(straight(tmp_path, words)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hang", "stop"])
def test_a_hang_is_seen_and_its_stacks_are_kept(kind: str, tmp_path: Path) -> None:
    words = [*WORDS, "launch.num_procs=2", "launch.hang_least=5", "launch.hang_factor=20"]
    done = start(words, tmp_path, env=fault(tmp_path, kind))
    assert done.code == 0, done.stdout + done.stderr
    run = tmp_path / "runs/run"
    [restart] = restarts(run)
    assert "a hang" in restart["because"]
    for rank in range(2):
        assert "most recent call first" in (run / f"logs/stacks_{rank}.txt").read_text()
    if kind == "hang":  # a process that was frozen goes on before it answers
        assert "strike" in (run / "logs/stacks_1.txt").read_text()
    assert runs.facts(run)["status"] == "done"
    assert runs.same_steps(runs.hashes(run), runs.hashes(straight(tmp_path, words)))


@pytest.mark.slow
def test_a_crash_at_the_same_step_again_and_again_ends_with_the_cause(tmp_path: Path) -> None:
    words = [*WORDS, "checkpoint.every=100", "launch.num_procs=2", "launch.restarts=9"]
    done = start(words, tmp_path, env=fault(tmp_path, "crash", step=4, once=False))
    assert done.code == 1
    assert "3 starts" in done.stderr
    assert "a planted fault" in done.stderr
    assert len(restarts(tmp_path / "runs/run")) == 2


@pytest.mark.slow
def test_a_single_process_is_supervised_too_and_tracked_as_one_run(tmp_path: Path) -> None:
    env = {"WANDB_MODE": "offline"}
    with Job(command([*WORDS, "launch.num_procs=1", "monitor.wandb=true"], tmp_path, 2000), None, tmp_path, env) as job:
        run = tmp_path / "runs/run"
        wait_for(run, job, 5)
        tracked = runs.facts(run)["tracker_run_id"]
        supervisor = min(job.processes(), key=lambda one: one.pid)
        next(one for one in supervisor.children() if "--frozen" in one.cmdline()).kill()
        while len(restarts(run)) < 1:
            assert job.running(), job.output()
            time.sleep(0.1)
        wait_for(run, job, 12)
        job.send(signal.SIGTERM)
        done = job.wait(60)
    assert done.code == 75, done.stdout + done.stderr
    assert "killed by SIGKILL" in restarts(run)[0]["because"]
    assert tracked is not None
    assert tracked == runs.facts(run)["tracker_run_id"]
    assert len(list((run / "wandb").glob(f"offline-run-*-{tracked}"))) == 2  # one run, of two starts
    assert runs.facts(run)["status"] == "stopped"


def wait_for(run: Path, job: Job, step: int) -> None:
    until = time.monotonic() + 120
    while max(runs.losses(run), default=0) < step:
        assert job.running(), job.output()
        assert time.monotonic() < until, job.output()
        time.sleep(0.1)


@pytest.mark.slow
def test_elastic_goes_on_with_the_ranks_that_are_left(tmp_path: Path) -> None:
    """4 ranks, one killed in step 7 of 20: the same global batch and the same samples on fewer."""
    words = [*WORDS, "launch.num_procs=4", "launch.elastic=true", "data.log_samples=true", "model.dropout=0"]
    died = []
    watcher = threading.Thread(target=lambda: died.append(seen(tmp_path / "struck")), daemon=True)
    watcher.start()
    done = start(words, tmp_path, env=fault(tmp_path, "kill", rank=3))
    assert done.code == 0, done.stdout + done.stderr
    run, other = tmp_path / "runs/run", straight(tmp_path, words)
    [restart] = restarts(run)
    assert restart["ranks"] in (2, 3)
    assert restart["micro_size"] * restart["accumulation"] * restart["ranks"] == 4
    assert runs.facts(run)["world"]["size"] == restart["ranks"]
    first = next(line for line in runs.lines(run / "metrics.jsonl")[::-1] if line["step"] == 7)
    assert first["samples"] == 4
    for step in range(8, 21):
        assert samples(run, step) == samples(other, step)
        assert len(samples(run, step)) == 4
    ours, theirs = runs.losses(run), runs.losses(other)
    assert ours[20][0] == pytest.approx(theirs[20][0], abs=1e-4)
    assert min(folder.stat().st_mtime for folder in (run / "checkpoints").iterdir()) - died[0] < 60  # a later step is saved


def seen(flag: Path) -> float:
    while not flag.exists():
        time.sleep(0.05)
    return flag.stat().st_mtime


def samples(run: Path, step: int) -> list[int]:
    """Global sample indices of a step, of the start that did it last: the lines of a start have as many data ranks as it had."""
    found = [line for line in runs.lines(run / "samples.jsonl") if line["step"] == step]
    return sorted(index for line in found for index in line["ids"])


@dataclass(frozen=True)
class Hosts:
    """Where two launchers run: the words before each one's module, its interface, and the address of the first."""

    before: tuple[list[str], list[str]]
    interfaces: tuple[str, str]
    address: str


@pytest.fixture(params=["loopback", "namespaces"])
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """The machine twice, or two network namespaces with a cable between them, where the machine lets us make them."""
    if request.param == "loopback":
        yield Hosts(([], []), ("lo", "lo"), "127.0.0.1")
        return
    names = [f"fw{os.getpid()}{end}" for end in "ab"]

    def ip(*words: str) -> int:
        return subprocess.run(["ip", *words], capture_output=True, check=False).returncode

    if shutil.which("ip") is None or ip("netns", "add", names[0]):
        pytest.skip("no network namespaces here")
    try:
        assert ip("netns", "add", names[1]) == 0
        assert ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1]) == 0
        for number, name in enumerate(names, start=1):
            assert ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", name) == 0
            assert ip("-n", name, "link", "set", name, "up") == ip("-n", name, "link", "set", "lo", "up") == 0
        yield Hosts((["tests.in_namespace", names[0]], ["tests.in_namespace", names[1]]), (names[0], names[1]), "10.77.0.1")
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.mark.slow
def test_two_hosts_are_one_run(hosts: Hosts, tmp_path: Path) -> None:
    """Two launchers that know nothing of each other but the address: 2 x 1 ranks are 1 x 2 ranks, bit for bit."""
    (tmp_path / "hosts").write_text("first slots=1\nsecond slots=1\n")
    port = 20_000 + os.getpid() % 10_000
    alike = ["checkpoint=sync", "verify.hash_every=1", "model.dropout=0.1"]
    apart = ["launch.hostfile=hosts", "launch.launcher=no_ssh", f"launch.master_addr={hosts.address}", f"launch.master_port={port}"]
    jobs = []
    for rank, (before, interface) in enumerate(zip(hosts.before, hosts.interfaces, strict=True)):
        words = [*before, *command([*alike, *apart, "name=two", f"launch.node_rank={rank}"], tmp_path, 10)]
        jobs.append(Job(words, None, tmp_path, {"GLOO_SOCKET_IFNAME": interface}))
    try:
        ended = [job.wait(120) for job in jobs]
    finally:
        for job in jobs:
            job.end()
    assert [done.code for done in ended] == [0, 0], [done.stdout + done.stderr for done in ended]
    one = start([*alike, "name=one", "launch.num_procs=2"], tmp_path, 10)
    assert one.code == 0, one.stdout + one.stderr
    assert runs.hashes(tmp_path / "runs/two") == runs.hashes(tmp_path / "runs/one")
    assert len(runs.hashes(tmp_path / "runs/two")) == 20


@pytest.mark.slow
def test_a_fault_without_a_supervisor_is_a_letter(tmp_path: Path) -> None:
    done = start([word for word in [*WORDS, "launch.num_procs=2"] if "supervise" not in word], tmp_path, env=fault(tmp_path, "kill"))
    assert done.code == 1
    assert "rank 1 was killed by SIGKILL after step 6" in done.stderr
    assert restarts(tmp_path / "runs/run") == []
