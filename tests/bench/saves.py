"""What a save and a load cost, on the ranks of one real run; started by tests/bench/checkpoint.py.

    deepspeed --num_gpus 2 --module tests.bench.saves --model 3M --folder DIR --rounds 2 --report FILE

A round makes a cycle of each kind: one step, the save, a few steps beside which an asynchronous save is written. Kinds come
in the order A B C D E E D C B A, and the disk is flushed between them, so that none pays for another. "none" saves nothing: its
steps are what the others are compared with. All seconds are those of the slower rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from framework.base.log import start_log
from framework.checkpoint.load import load
from framework.checkpoint.store import Store
from framework.config.compose import compose
from framework.engine import state as engine_state
from framework.launch.environment import read_process, strip_local_rank
from framework.trainer import resume
from framework.trainer.build import build
from framework.trainer.interval import Interval
from framework.trainer.run import Run, Turn
from framework.trainer.saving import Saver
from tests.bench import peers, wide

KINDS = ("none", "async", "sync", "deepspeed", "dcp")
STEPS_AFTER = 3  # as long as a write takes
KEPT = 1  # checkpoints of a kind that stay on the disk


class OnDemand(Interval):
    """Saves when the benchmark says so."""

    def __init__(self) -> None:
        super().__init__(every=0, chosen=None, mtbf_hours=None)
        self.wanted = False

    def due(self, step: int) -> bool:
        return self.wanted


class Bench:
    """A run driven by hand, with its asynchronous saver and a synchronous one beside it."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self.folder = run, folder
        self.asynchronous = next(hook for hook in run.hooks if isinstance(hook, Saver))
        first = self.asynchronous
        self.synchronous = Saver(first.settings, first.places, first.groups, None, first.says, OnDemand())
        first.interval = OnDemand()
        self.gather = first.groups.gather
        self.turn: Turn | None = None
        self.peers = peers.Peers(folder / "peers", run.engine, KEPT)
        for hook in run.hooks:
            hook.start(run)

    def step(self) -> float:
        """One turn of the loop, with the asynchronous saver as its only hook; seconds."""
        begun = time.perf_counter()
        run, fed = self.run, self.run.feed.next()
        out = run.engine.step(fed.batch, fed.tokens)
        run.position.step += 1
        step = run.position.step
        self.turn = Turn(step, fed.batch, out, fed.tokens, run.clock.lap()[0], fed.wait_s, fed.votes, last=False)
        self.asynchronous.after_step(run, self.turn)
        return time.perf_counter() - begun

    def save(self, kind: str) -> float:
        """Seconds that the training waits for a save of this kind."""
        assert self.turn is not None
        work: dict[str, Callable[[], object]] = {
            "none": lambda: None,
            "async": lambda: self._save(self.asynchronous),
            "sync": lambda: self._save(self.synchronous),
            "deepspeed": lambda: self.peers.deepspeed_save(self.run.position.step),
            "dcp": lambda: self.peers.dcp_async_save(self.run.position.step),
        }
        return self.seconds(work[kind])

    def _save(self, saver: Saver) -> None:
        assert self.turn is not None
        assert isinstance(saver.interval, OnDemand)
        saver.interval.wanted = True
        saver.after_step(self.run, self.turn)
        saver.interval.wanted = False

    def cycle(self, kind: str) -> dict[str, float]:
        """`blocked` (the save itself, and where the next step waited for its copy) and `steps` (sum of the STEPS_AFTER steps that
        followed), in seconds."""
        self.step()
        blocked = self.save(kind)
        save = self.asynchronous.pending
        steps = [self.step() for _ in range(STEPS_AFTER)]
        blocked += max(self.gather(0.0 if save is None else save.held_s))
        while self.gather(self.asynchronous.pending is not None)[0]:
            self.step()
        self.peers.finish()
        os.sync()
        dist.barrier()
        return {"blocked": blocked, "steps": max(self.gather(sum(steps)))}

    def memcpy(self) -> float:
        """Seconds to copy this rank's share of the state once, into touched memory; fastest of three."""
        sources = [tensor for _, tensor in engine_state.collect(self.run.engine)]
        targets = [torch.ones_like(tensor) for tensor in sources]

        def copy() -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

        return min(self.seconds(copy) for _ in range(3))

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds that `work` takes when all ranks begin together; of the slowest rank."""
        dist.barrier()
        begun = time.perf_counter()
        work()
        return max(self.gather(time.perf_counter() - begun))

    def loads(self, rounds: int) -> dict[str, dict[str, list[float]]]:
        """Seconds by state of the page cache ("cached", "dropped") and by what is done with the newest checkpoint.

        plain   this rank's file into touched memory, nothing else
        load    open it, compare the checksums, fill the engine's tensors
        resume  all that a start does: find the newest, `load`, the counters, and the weights from the masters
        """
        found = Store(self.asynchronous.places.disk).newest()
        assert found is not None
        name, groups = Path(found.path).name, self.asynchronous.groups
        path = Path(found.path, found.manifest.share(groups.rank, wide.RANKS)[0].name)
        memory = torch.ones(path.stat().st_size, dtype=torch.uint8).numpy().data

        def opened_load() -> None:
            checkpoint = Store(self.asynchronous.places.disk).open(name)
            wanted = engine_state.collect(self.run.engine, complete=True)
            load(checkpoint, wanted, checkpoint.manifest.share(groups.rank, wide.RANKS))

        work: dict[str, Callable[[], object]] = {
            "plain": lambda: _read(path, memory),
            "load": opened_load,
            "resume": lambda: resume.take_up(self.run.config, groups, self.run.engine, found.manifest.small["data"]),
        }
        times: dict[str, dict[str, list[float]]] = {}
        for turn in range(rounds):
            for cache in ("cached", "dropped"):
                for kind in list(work)[:: 1 if turn % 2 == 0 else -1]:
                    (_drop if cache == "dropped" else _touch)(path)
                    times.setdefault(cache, {}).setdefault(kind, []).append(self.seconds(work[kind]))
        return times


def _read(path: Path, memory: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        done = 0
        while done < len(memory):
            done += file.readinto(memory[done:]) or 0


def _touch(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 22):
            pass


def _drop(path: Path) -> None:
    """Take a file, which has been flushed, out of the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(bench: Bench, rounds: int) -> dict[str, Any]:
    """All figures of one run as plain data; one round more than `rounds` is made, and its saves are the first of the process."""
    bench.step()
    cycles: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    memcpy: list[float] = []
    for turn in range(rounds + 1):
        for kind in KINDS[:: 1 if turn % 2 == 0 else -1]:
            cycles[kind].append(bench.cycle(kind))
        memcpy.append(bench.memcpy())
    newest = Store(bench.asynchronous.places.disk).newest()
    assert newest is not None
    return {
        "cycles": cycles,
        "memcpy": memcpy[1:],
        "loads": bench.loads(rounds + 1),
        "bytes": {"manifest": Path(newest.path, "manifest.json").stat().st_size, "ours": peers.tree_bytes(Path(newest.path))}
        | bench.peers.nbytes(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=list(wide.MODELS), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True)
    words, flag = strip_local_rank(sys.argv[1:])
    given = parser.parse_args(words)

    config = compose([*wide.words(given.model, given.folder, "saves", 1_000_000), "checkpoint=async", f"checkpoint.keep_last={KEPT}"])
    log = start_log(verbose=False)
    with contextlib.redirect_stdout(log):
        bench = Bench(build(config, read_process(os.environ, flag), log), given.folder)
        report = measure(bench, given.rounds)
    for hook in reversed(bench.run.hooks):
        hook.end(bench.run, "done")
    if bench.asynchronous.groups.rank == 0:
        given.report.write_text(json.dumps(report))
        shutil.rmtree(given.folder / "peers")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
