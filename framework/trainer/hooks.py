"""Small hooks: evaluation, logged samples, hashes, the closing text. None of them changes what a step computes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from framework.data.pack import MicroBatch
from framework.data.prepare import decode
from framework.engine import state
from framework.infer.sample import sample
from framework.monitor.console import Console
from framework.monitor.meters import EvalRecord
from framework.monitor.runfile import End
from framework.monitor.sinks import JsonLines, Sink
from framework.topology.groups import Groups
from framework.topology.random import Streams
from framework.trainer.run import Quiet, Run, Turn
from framework.trainer.stopping import Stopping


class Evaluation(Quiet):
    """The loss on held-out samples, every eval.every steps and after the last. Runs on every rank; the first one records."""

    def __init__(self, batches: Callable[[], Iterator[MicroBatch]], samples: int, sinks: Sequence[Sink], stopping: Stopping) -> None:
        """`batches` begins the held-out samples anew; `samples` is how many there are over all ranks. Where the run is asked to
        stop, an evaluation is given up."""
        self.batches, self.stopping = batches, stopping
        self.samples = samples
        self.sinks = sinks

    def after_step(self, run: Run, turn: Turn) -> None:
        every = run.config.eval.every
        if not (turn.last or (every > 0 and turn.step % every == 0)):
            return
        with run.clock.aside("evaluation"):
            began = time.perf_counter()
            loss_sum, tokens = run.engine.evaluate(self._lively(run, self.stopping.unless_stopped(self.batches())))
            if self.stopping.interrupted:
                return
            record = EvalRecord(turn.step, loss_sum / max(1, tokens), tokens, self.samples, time.perf_counter() - began)
            for sink in self.sinks:
                sink.evaluation(record)

    @staticmethod
    def _lively(run: Run, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        for batch in batches:
            run.clock.tell("aside")
            yield batch


class SampleLog(Quiet):
    """samples.jsonl: the global indices that each data rank read in each micro-batch, written by the first rank."""

    def __init__(self, path: Path, groups: Groups) -> None:
        self.groups = groups
        self.lines = JsonLines(path) if groups.rank == 0 else None

    def after_step(self, run: Run, turn: Turn) -> None:
        place = self.groups.place
        mine = [] if place.pipeline + place.context + place.tensor else [micro.indices.tolist() for micro in turn.batch]
        for data_rank, read in enumerate(filter(None, self.groups.gather(mine))):
            for micro, ids in enumerate(read):
                if self.lines is not None:
                    self.lines.write({"step": turn.step, "data_rank": data_rank, "micro": micro, "ids": ids})

    def end(self, run: Run, status: End) -> None:
        if self.lines is not None:
            self.lines.close(status)


class Hashes(Quiet):
    """hashes.jsonl: what decides the next step, as hashes of every rank, written by the first one; of each tensor too if told."""

    def __init__(self, path: Path, groups: Groups, random_state: Callable[[Streams], dict[str, Any]]) -> None:
        self.groups = groups
        self.random_state = random_state
        self.lines = JsonLines(path) if groups.rank == 0 else None

    def after_step(self, run: Run, turn: Turn) -> None:
        if turn.step % run.config.verify.hash_every != 0 and not turn.last:
            return
        read = [micro.indices.tolist() for micro in turn.batch]
        tensors = state.tensor_hashes(run.engine)
        found: dict[str, Any] = state.hashes(run.engine, tensors) | {"rng": digest(self.random_state(run.streams)), "data": digest(read)}
        if run.config.verify.tensors:
            found["tensors"] = tensors
        for rank, hashes in enumerate(self.groups.gather(found)):
            if self.lines is not None:
                self.lines.write({"step": turn.step, "rank": rank, **hashes})

    def end(self, run: Run, status: End) -> None:
        if self.lines is not None:
            self.lines.close(status)


def digest(value: Any) -> str:
    """xxh3_128 of plain data."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


class ClosingText(Quiet):
    """What the trained model writes after a prompt. Every rank computes, the first one shows."""

    def __init__(self, console: Console | None) -> None:
        self.console = console

    def after_step(self, run: Run, turn: Turn) -> None:
        if not turn.last:
            return
        config = run.config
        text, prompt = config.data.text, config.monitor.sample_prompt
        with run.clock.aside("sample"):
            ids = sample(
                lambda window: run.engine.logits(window.to(run.engine.device)),
                prompt=list(prompt.encode()),
                length=config.monitor.sample_tokens,
                context=config.data.seq_length,
                temperature=0.7,
                seed=config.seed,
            )
        if self.console is not None:
            self.console.passage("what the model writes", prompt + decode(ids, text))
