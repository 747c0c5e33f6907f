"""The proof that a resumed run is the run that was never interrupted, bit for bit, on every rank.

Each case is a straight run and the same run killed with SIGKILL and started again, all in fresh processes. The straight run
saves nothing, so that the comparison also shows that saving changes nothing. No torch: this only launches and reads.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Column, Table

from framework.base.errors import ConfigError, RunError
from framework.config.check import check
from framework.config.schema import Config, Precision, Zero
from framework.launch.command import ranks_to_start, word
from framework.monitor.sinks import read_lines
from framework.studies.compare import COLUMNS, EQUAL, Trace, compare, read_trace
from framework.studies.killed import Moment, Runs

MATRIX_DROPOUT = 0.1
MATRIX_SCALE_WINDOW = 3  # fp16: the loss scale grows before and after the kill
MATRIX_WORKERS = (0, 2)


@dataclass(frozen=True)
class Case:
    """One killed run and what it is compared with.

    `words` hold for the straight run and for the killed one, `killed_words` for the killed one alone.
    """

    name: str
    moments: tuple[Moment, ...]
    words: tuple[str, ...]
    killed_words: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """How a case went: the steps that it went on from, and what compare() says of each column."""

    case: str
    resumed: tuple[int, ...]
    columns: dict[str, str]

    @property
    def equal(self) -> bool:
        return all(said == EQUAL for said in self.columns.values())


def verify(config: Config, words: Sequence[str], screen: Console) -> None:
    """Run the cases of `config`, which `words` stand for, and show the table. Raises RunError unless all are equal."""
    cases = list(matrix(config) if config.verify.matrix == "full" else edges(config, screen))
    assert cases, "a proof of nothing"
    verdicts = prove(make_runs(config, words, screen), cases)
    show(verdicts, screen)
    different = [verdict.case for verdict in verdicts if not verdict.equal]
    if different:
        raise RunError("verify", f"{len(different)} of {len(verdicts)} cases differ: {', '.join(different)}", "every resumed run equal")
    screen.print(f"{len(verdicts)} of {len(verdicts)} equal, bit for bit, on every rank")


def make_runs(config: Config, words: Sequence[str], screen: Console) -> Runs:
    """How the runs of a proof are started: as the user's `words` say, every step hashed, quiet, and in a place of their own."""
    evaluation = () if config.eval.every < 0 else ("eval.every=2", "eval.samples=8")  # takes part, on few samples
    ours = (
        word("data.cache", config.data.cache), word("schedule.total_steps", config.schedule.total_steps),
        "verify.hash_every=1", "verify.tensors=true", "data.log_samples=true", *evaluation,
        "monitor.console=none", "monitor.wandb=false", "monitor.sample_tokens=0",
        "checkpoint.root=null", "checkpoint.memory_every=0", "checkpoint.mode=none", "resume_changes=refuse",
    )  # fmt: skip
    root = Path(config.output_root) / ".verify" / config.name
    return Runs((*words, *ours), root, ranks_to_start(config), 2 * config.verify.steps, config.launch.timeout, screen)


def edges(config: Config, screen: Console) -> Iterator[Case]:
    """Kills at the moments where state is easily lost."""
    steps, save = config.verify.steps, _save(config)
    once = (*save, f"checkpoint.every={steps}")
    yield Case("killed", (Moment(steps),), (), once)
    twice = (Moment(max(1, steps // 2), saving=True), Moment(steps, saving=True))
    yield Case("killed_twice", twice, (), (*save, "checkpoint.every=1"))
    yield Case("epoch_edge", (Moment(steps),), _epoch_words(config), once)
    micro = accumulating_micro_size(config)
    if micro is None:
        screen.print("accumulation edge: left out, each rank has one sample in a step")
        return
    own = () if micro == config.batch.micro else (f"batch.micro_size={micro}",)
    yield Case("accumulation_edge", (Moment(steps, in_step=True),), own, once)


def matrix(config: Config) -> Iterator[Case]:
    """Every precision and ZeRO stage that goes together, with and without loader workers, with dropout.

    The straight run of a pair serves both numbers of workers: they must not matter either.
    """
    once = (*_save(config), f"checkpoint.every={config.verify.steps}")
    for precision, zero in allowed(config):
        words = (
            word("precision.dtype", precision.dtype), word("precision.autocast", precision.autocast),
            word("zero.stage", zero.stage), word("zero.offload", zero.offload), word("model.dropout", MATRIX_DROPOUT),
            word("precision.scale_window", MATRIX_SCALE_WINDOW),
        )  # fmt: skip
        label = f"{precision.dtype}{'_autocast' if precision.autocast else ''}_stage{zero.stage}"
        for workers in MATRIX_WORKERS:
            yield Case(f"{label}_workers{workers}", (Moment(config.verify.steps),), words, (*once, f"data.workers={workers}"))


def allowed(config: Config) -> Iterator[tuple[Precision, Zero]]:
    """The pairs of precision and ZeRO stage that check() accepts, without offload."""
    hints = typing.get_type_hints(Precision), typing.get_type_hints(Zero)
    dtypes, stages = typing.get_args(hints[0]["dtype"]), typing.get_args(hints[1]["stage"])
    ranks = ranks_to_start(config)
    for autocast, dtype, stage in itertools.product((False, True), dtypes, stages):
        precision = dataclasses.replace(config.precision, dtype=dtype, autocast=autocast)
        zero = dataclasses.replace(config.zero, stage=stage, offload="none")
        try:
            check(dataclasses.replace(config, precision=precision, zero=zero), ranks, ranks)
        except ConfigError:
            continue
        yield precision, zero


def _save(config: Config) -> tuple[str, ...]:
    mode = config.checkpoint.mode
    return (f"checkpoint.mode={'async' if mode == 'none' else mode}", "checkpoint.busy=wait")


def _epoch_words(config: Config) -> tuple[str, ...]:
    """Data whose first epoch ends inside the step after the checkpoint."""
    samples = config.verify.steps * config.batch.global_size + config.batch.global_size // 2
    tokens = samples * config.data.seq_length + 1  # neighbouring samples share one token
    own_files = ("data.files=[]", "data.weights=[]", "data.val_files=[]", "data.val_fraction=0")
    return ("data.kind=synthetic", f"data.synthetic_tokens={tokens}", *own_files)


def accumulating_micro_size(config: Config) -> int | None:
    """The config's own micro_size if a step has several micro-batches, or the largest with which it has; None if there is none."""
    data_ranks = config.parallel.data or ranks_to_start(config) // config.parallel.model_ranks
    samples = config.batch.global_size // data_ranks
    fitting = [size for size in range(1, samples) if samples % size == 0 and size <= config.batch.micro]
    return max(fitting, default=None)


def prove(runs: Runs, cases: Sequence[Case]) -> list[Verdict]:
    """Make the runs of every case and compare. Raises as Runs.make does."""
    straight: dict[tuple[str, ...], Trace] = {}
    verdicts = []
    for number, case in enumerate(cases, start=1):
        runs.say(f"{number} of {len(cases)}: {case.name}")
        if case.words not in straight:
            runs.say(f"  straight run, {runs.steps} steps on {runs.ranks} ranks")
            straight[case.words] = read_trace(runs.make(f"{case.name}_straight", case.words))
        times = "once" if len(case.moments) == 1 else "twice"
        runs.say(f"  the same run, killed {times}")
        folder = runs.make(case.name, (*case.words, *case.killed_words), case.moments)
        columns = compare(straight[case.words], read_trace(folder), runs.steps, runs.ranks)
        verdicts.append(Verdict(case.name, _resumed(folder), columns))
        for column, said in verdicts[-1].columns.items():
            if said != EQUAL:
                runs.say(f"  {column}: {said}")
        if verdicts[-1].equal:
            shutil.rmtree(folder / "checkpoints")  # a difference is looked into, a proof takes no room
    return verdicts


def _resumed(folder: Path) -> tuple[int, ...]:
    return tuple(line["step"] for line in read_lines(folder / "events.jsonl") if line["event"] == "resume")


def show(verdicts: Sequence[Verdict], screen: Console) -> None:
    """The table case x column ("from" is the step that a killed run went on from), and below it every first difference in full."""
    columns = [Column("case", overflow="fold"), *(Column(name, no_wrap=True) for name in ("from", *COLUMNS))]
    table = Table(*columns, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for verdict in verdicts:
        cells = [EQUAL if said == EQUAL else "differs" for said in verdict.columns.values()]
        table.add_row(verdict.case, ", ".join(map(str, verdict.resumed)), *cells)
    screen.print(table)
    for verdict in verdicts:
        for column, said in verdict.columns.items():
            if said != EQUAL:
                screen.print(f"{verdict.case}, {column}: {said}", soft_wrap=True)
