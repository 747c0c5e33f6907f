"""P06 (Lightning-AI/pytorch-lightning#688): a save of many files that is not atomic. Kills at every moment of a save.

Two ranks, rank 1 writes slowly. A chain of starts: each goes on from the newest whole checkpoint, makes ten steps, and is
killed with SIGKILL, writers included, at one moment of the save that follows. What each start has computed is compared with
a run that nobody disturbed and that saved nothing. Only one checkpoint is kept (keep_last=1), so that none can be spared.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests import runs, slow_train
from tests.marks import slow
from tests.ranks import Job, run_ranks

EVERY = 10
WORDS = [*runs.SMALL, "verify.hash_every=1", f"checkpoint.every={EVERY}", "checkpoint.keep_last=1", "model.dropout=0.1"]
DEADLINE_S = 240.0

SIGNS = ("the step before", "begun", "rank 0 has written", "rank 1 has written", "manifest", "published")
"""What can be seen of a save from outside, in the order in which it comes."""


@dataclass(frozen=True)
class Moment:
    """`after_s` seconds after `sign` was first seen."""

    sign: str
    after_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.sign} +{self.after_s} s"


FEW = [Moment("begun", 0.1), Moment("manifest")]
MANY = [
    Moment("the step before"),
    *(Moment("begun", after_s) for after_s in (0.0, 0.01, 0.1, 0.5, 1.0, 1.5, 2.0, 2.45, 2.55, 3.0, 3.5, 4.0, 4.9)),
    Moment("rank 0 has written"),
    Moment("rank 1 has written"),
    Moment("rank 1 has written", 0.001),
    Moment("manifest"),
    Moment("published"),
    Moment("published", 0.3),
]


# ---------------------------------------------------------------- one start and its end


def slow_rank(rank: int, ranks: int, words: Sequence[str], cwd: str) -> int:
    """A rank of tests.slow_train; its pid stands in the file pid_RANK."""
    os.chdir(cwd)
    Path(f"pid_{rank}").write_text(str(os.getpid()))
    sys.argv = ["slow_train", *words]
    return slow_train.main()


class Watch:
    """Looks at the save of `step` by a start that begins after this was made."""

    def __init__(self, run: Path, step: int) -> None:
        self.run, self.step = run, step
        self.old = self._temporary()
        self.seen = len(runs.lines(run / "metrics.jsonl"))

    def wait_for(self, sign: str, alive: Callable[[], bool]) -> None:
        """Return as soon as `sign`, or a later one, is there."""
        deadline = time.monotonic() + DEADLINE_S
        while self._latest() < SIGNS.index(sign):
            assert alive(), f"it ended before: {sign} of step {self.step}"
            assert time.monotonic() < deadline, f"not seen: {sign} of step {self.step}"
            time.sleep(0.0005)

    def left(self) -> str:
        """What is there of the save once everybody is dead."""
        if self._final().exists():
            return "a checkpoint"
        (temporary,) = self._temporary() - self.old or {None}
        names = set() if temporary is None else {path.name for path in temporary.iterdir()}
        if "manifest.json" in names:
            return "all but the name"
        return "nothing" if temporary is None else f"{len(names & {'rank_00000.json', 'rank_00001.json'})} parts of 2"

    def _latest(self) -> int:
        """Index of the latest sign."""
        if self._final().exists():
            return SIGNS.index("published")
        for temporary in self._temporary() - self.old:
            signs = {"manifest": "manifest.json", "rank 1 has written": "rank_00001.json", "rank 0 has written": "rank_00000.json"}
            return SIGNS.index(next((sign for sign, name in signs.items() if (temporary / name).exists()), "begun"))
        new = runs.lines(self.run / "metrics.jsonl")[self.seen :]
        return SIGNS.index("the step before") if new and new[-1]["step"] >= self.step - 1 else -1

    def _final(self) -> Path:
        return self.run / "checkpoints" / f"step_{self.step:08d}"

    def _temporary(self) -> set[Path]:
        return set((self.run / "checkpoints").glob(f".tmp-step_{self.step:08d}-*"))


def kill_forked(words: Sequence[str], cwd: Path, watch: Watch, moment: Moment, chunk_s: float) -> None:
    """Start two forked ranks and kill them and their writers at a moment of the save that is watched."""
    for mark in cwd.glob("pid_*"):
        mark.unlink()
    slow = {"SLOW_RANK": "1", "SLOW_CHUNK_S": str(chunk_s)}
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(run_ranks, slow_rank, 2, list(words), str(cwd), timeout=DEADLINE_S, env=slow)
        watch.wait_for(SIGNS[0], lambda: not training.done())
        # Collected before the moment comes: looking for them takes longer than some moments last.
        ranks = [psutil.Process(int((cwd / f"pid_{rank}").read_text())) for rank in range(2)]
        victims = [process for rank in ranks for process in (rank, *rank.children(recursive=True))]
        assert len(victims) == (4 if "checkpoint=async" in words else 2)
        watch.wait_for(moment.sign, lambda: not training.done())
        time.sleep(moment.after_s)
        for victim in victims:
            victim.kill()
        with pytest.raises(AssertionError, match="exit code -9"):
            training.result()
        psutil.wait_procs(victims, timeout=10)


def kill_launched(words: Sequence[str], cwd: Path, watch: Watch, moment: Moment, chunk_s: float) -> None:
    """The same under the deepspeed launcher; launchers, ranks and writers are killed."""
    with Job(["tests.slow_train", *words], 2, cwd, {"SLOW_RANK": "1", "SLOW_CHUNK_S": str(chunk_s)}) as job:
        watch.wait_for(moment.sign, job.running)
        time.sleep(moment.after_s)
        job.end()


# ---------------------------------------------------------------- the chain


def undisturbed(root: Path, moments: Sequence[Moment]) -> Path:
    """A run that nobody disturbs, with as many steps as kills at `moments` can make others do."""
    runs.train([*WORDS, "checkpoint=none", f"steps={EVERY * (len(moments) + 3)}"], root, 2)
    return root / "runs/run"


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(tmp_path_factory.mktemp("straight"), FEW)


@pytest.fixture(scope="module")
def long_straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(tmp_path_factory.mktemp("straight"), MANY)


@dataclass
class Chain:
    """Starts of one run, one after the other, each judged against the undisturbed run."""

    cwd: Path
    straight: Path
    words: list[str]

    @property
    def run(self) -> Path:
        return self.cwd / "runs/run"

    def begin(self) -> None:
        """The first checkpoint, that of step EVERY."""
        runs.train([*self.words, f"steps={EVERY}"], self.cwd, 2)
        assert runs.whole_steps(self.run / "checkpoints") == [EVERY]

    def newest(self) -> int:
        """Step of the newest whole checkpoint, one that lacks only its name included."""
        unnamed = [folder for folder in (self.run / "checkpoints").glob(".tmp-*") if runs.is_whole(folder)]
        return max([*runs.whole_steps(self.run / "checkpoints"), *(runs.manifest(folder)["step"] for folder in unnamed)])

    def go_on(self, start: Callable[[int], None]) -> int:
        """Let `start` train past the step that it is given, then judge what it did; the step it went on from."""
        newest = self.newest()
        seen = len(runs.lines(self.run / "metrics.jsonl"))
        resumes = len(runs.events(self.run, "resume"))
        start(newest + EVERY)
        (resumed,) = runs.events(self.run, "resume")[resumes:]
        assert resumed["step"] == newest, resumed
        assert resumed["passed_over"] == []
        steps = [line["step"] for line in runs.lines(self.run / "metrics.jsonl")[seen:]]
        assert steps == list(range(newest + 1, newest + 1 + len(steps)))
        assert runs.same_steps(runs.losses(self.run), runs.losses(self.straight))
        assert runs.same_steps(runs.hashes(self.run), runs.hashes(self.straight))
        return newest

    def slow_chunk_s(self, slow_s: float) -> float:
        """The sleep after each chunk that makes rank 1's save last `slow_s` seconds longer."""
        files = runs.manifest(self.run / f"checkpoints/step_{EVERY:08d}")["files"]
        (file,) = [file for file in files if file["name"] == "rank_00001.safetensors"]
        # A writer reads whole chunks and this state is smaller than one; a synchronous save writes each tensor by itself.
        return slow_s / (2 if "checkpoint=async" in self.words else 1 + len(file["shards"]))


Kill = Callable[[Sequence[str], Path, Watch, Moment, float], None]


def survive(cwd: Path, straight: Path, mode: str, moments: Sequence[Moment], slow_s: float, kill: Kill = kill_forked) -> Counter[str]:
    """Kill at each of `moments` and go on every time; how often the kills left what."""
    chain = Chain(cwd, straight, [*WORDS, f"checkpoint={mode}"])
    chain.begin()
    last, left = EVERY * (len(moments) + 3), Counter[str]()
    chunk_s = chain.slow_chunk_s(slow_s)
    for moment in moments:

        def start(step: int, moment: Moment = moment) -> None:
            watch = Watch(chain.run, step)
            kill([*chain.words, f"steps={last}"], cwd, watch, moment, chunk_s)
            left[watch.left()] += 1

        chain.go_on(start)
    final = chain.newest() + EVERY
    chain.go_on(lambda step: void(runs.train([*chain.words, f"steps={final}"], cwd, 2)))
    assert runs.facts(chain.run)["status"] == "done"
    assert [path.name for path in (chain.run / "checkpoints").iterdir()] == [f"step_{final:08d}"]
    return left


def void(_: object) -> None:
    """A value that nobody needs."""


@pytest.mark.parametrize("mode", [slow("sync"), slow("async")])
def test_a_kill_while_saving_costs_nothing_but_the_save(mode: str, straight: Path, tmp_path: Path) -> None:
    survive(tmp_path, straight, mode, FEW, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_twenty_moments_of_a_save_that_one_rank_delays_by_five_seconds(mode: str, long_straight: Path, tmp_path: Path) -> None:
    assert len(MANY) == 20
    left = survive(tmp_path, long_straight, mode, MANY, 5.0)
    print(f"\n{mode}: {left.total()} of {len(MANY)} kills survived; they left {dict(left)}")
    assert left.total() == len(MANY)
    assert {"a checkpoint", "1 parts of 2"} <= left.keys()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_same_under_the_launcher(mode: str, straight: Path, tmp_path: Path) -> None:
    left = survive(tmp_path, straight, mode, [Moment("begun", 1.0), Moment("rank 1 has written"), Moment("published")], 2.0, kill_launched)
    assert left.total() == 3


# ---------------------------------------------------------------- a shard that lacks a byte


def shorten(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize("rank", [slow(0), 1])
def test_a_shard_without_its_last_byte_is_never_loaded(rank: int, straight: Path, tmp_path: Path) -> None:
    words = [*WORDS, "checkpoint=sync", "checkpoint.keep_last=2"]
    runs.train([*words, f"steps={2 * EVERY}"], tmp_path, 2)
    run = tmp_path / "runs/run"
    shorten(run / f"checkpoints/step_{2 * EVERY:08d}/rank_{rank:05d}.safetensors")
    intact = shutil.copytree(run, tmp_path / "intact")
    runs.train([*words, f"steps={3 * EVERY}"], tmp_path, 2)
    (resumed,) = runs.events(run, "resume")
    assert resumed["step"] == EVERY
    assert f"rank_{rank:05d}.safetensors" in resumed["passed_over"][0]
    assert runs.same_steps(runs.losses(run), runs.losses(straight))
    assert runs.same_steps(runs.hashes(run), runs.hashes(straight))

    shutil.rmtree(run)
    shorten(intact / f"checkpoints/step_{EVERY:08d}/rank_{1 - rank:05d}.safetensors")
    intact.rename(run)
    said = runs.train([*words, f"steps={3 * EVERY}"], tmp_path, 2, code=2)
    assert ".safetensors" in said
    assert max(runs.losses(run)) == 2 * EVERY
