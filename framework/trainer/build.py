"""Assembly: the only file that sees every room. A Config goes in, a Run that the loop can drive comes out.

The order is the order of what can go wrong: data and folder before the ranks meet, then groups, model, engine, stream, hooks.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console as Screen

from framework.base.errors import ConfigError
from framework.base.files import write_json
from framework.base.log import Log
from framework.config import identity, parameters
from framework.config.compose import to_dict
from framework.config.schema import Config
from framework.data.prepare import Corpora, open_corpora
from framework.data.stream import MicroBatch, StreamSettings, TrainingStream, default_workers, validation_batches
from framework.data.tokens import Corpus
from framework.engine.dsconfig import deepspeed_config
from framework.engine.engine import Engine, PlainEngine
from framework.engine.sharded import DeepSpeedEngine
from framework.launch.environment import Process, default_threads
from framework.model.init import initialise
from framework.model.transformer import Transformer, compile_blocks
from framework.monitor.console import Console
from framework.monitor.page import Facts
from framework.monitor.runfile import RunFile, Start
from framework.monitor.sinks import JsonLines, Sink, Wandb
from framework.topology.grid import Grid
from framework.topology.groups import Groups, accelerator, connect, make_groups
from framework.topology.random import seed_training
from framework.trainer import folder
from framework.trainer.feed import Feed
from framework.trainer.hooks import ClosingText, Evaluation, Records, SampleLog
from framework.trainer.run import Hook, Position, Run


def build(config: Config, process: Process, log: Log) -> Run:
    """A Run at its first step. `log` is opened once the run folder is claimed.

    Raises DataError, ConfigError or StartError, as far as possible before any process group starts.
    """
    refuse_unbuilt(config)
    threads = config.launch.threads or default_threads(process.ranks_per_host)
    torch.set_num_threads(threads)
    corpora = open_corpora(config.data, config.model.vocab_size, config.seed)
    grid = make_grid(config, process.ranks)
    if config.engine == "deepspeed":
        accelerator().set_device(process.local_rank)
        connect(config.launch.timeout, config.launch.shm_comm)
    groups = make_groups(grid, process.rank, config.launch.timeout)
    run_folder = _claim_together(config, groups)
    log.open(run_folder / "logs" / f"rank_{process.rank}.log")

    position = Position()
    device = torch.device(accelerator().current_device_name())
    engine = _engine(config, groups, grid, device)
    settings = _stream_settings(config, groups, grid, process)
    feed = Feed(TrainingStream(corpora.train, settings, device), groups, grid.tensor * grid.pipeline, position.consumed_samples)
    run = Run(config, run_folder, engine, feed, position)
    run.hooks = _hooks(run, groups, process, corpora, settings)
    seed_training(config.seed, groups.place.data)
    return run


def finished(config: Config, process: Process) -> bool:
    """True, said once, if the run in the config's folder has nothing left to do.

    Raises ConfigError if the folder is another run's.
    """
    done = folder.inspect(config)
    if done and process.first:
        Screen(highlight=False).print(f"{config.run_dir} is done, {config.steps} steps: raise `steps` to go on, or write resume=never")
    return done


def refuse_unbuilt(config: Config) -> None:
    """Degrees that check.py allows and no engine offers yet: refused, never ignored."""
    for axis in ("tensor", "pipeline", "context"):
        degree = getattr(config.parallel, axis)
        if degree > 1:
            raise ConfigError(f"parallel.{axis}", degree, "1: this axis can be planned, not yet trained", f"parallel.{axis}=1")


def make_grid(config: Config, ranks: int) -> Grid:
    """The grid of a config that has passed check() on `ranks` processes."""
    parallel = config.parallel
    data = parallel.data or ranks // parallel.model_ranks
    return Grid(pipeline=parallel.pipeline, data=data, context=parallel.context, tensor=parallel.tensor)


def accumulation_steps(config: Config, grid: Grid) -> int:
    """Micro-batches of one rank per optimizer step."""
    return config.batch.global_size // (config.batch.micro_size * grid.data)


def _claim_together(config: Config, groups: Groups) -> Path:
    """The run folder, made by the first rank; every rank must have composed the same config."""
    hashes = groups.gather(identity.full_hash(config))
    if len(set(hashes)) > 1:
        raise ConfigError("the composed config", f"different on the ranks: {hashes}", "the same command line and conf/ on every host")
    if groups.rank == 0:
        folder.claim(config)
    groups.agree([0.0])  # nobody writes before the folder is there
    return Path(config.run_dir)


def _engine(config: Config, groups: Groups, grid: Grid, device: torch.device) -> Engine:
    model = Transformer(config.model)
    initialise(model, config.model, config.seed)
    model.to(device)
    if config.compile == "blocks":
        compile_blocks(model)
    if config.engine == "plain":
        return PlainEngine(model, config)
    settings = deepspeed_config(config, grid.data * grid.context, accumulation_steps(config, grid))
    if groups.rank == 0:
        write_json(Path(config.run_dir) / "deepspeed.json", settings)
    return DeepSpeedEngine(model, config, settings, groups.data)


def _stream_settings(config: Config, groups: Groups, grid: Grid, process: Process) -> StreamSettings:
    workers = config.data.workers
    cores = default_threads(1)
    return StreamSettings(
        seed=config.seed,
        shuffle=config.data.shuffle,
        micro_size=config.batch.micro_size,
        accumulation=accumulation_steps(config, grid),
        data_rank=groups.place.data,
        data_size=grid.data,
        workers=default_workers(cores, process.ranks_per_host) if workers is None else workers,
        prefetch=config.data.prefetch,
        vocab_size=config.model.vocab_size,
    )


def _hooks(run: Run, groups: Groups, process: Process, corpora: Corpora, settings: StreamSettings) -> list[Hook]:
    """The hooks in the order in which they are called after a step. The first rank records and shows."""
    config = run.config
    sinks: list[Sink] = []
    hooks: list[Hook] = []
    console = None
    hosts = sorted(set(groups.gather(socket.gethostname())))
    if process.first:
        runfile = RunFile(run.folder / "run.json")
        runfile.begin(Start(sys.argv, process.ranks, hosts, identity.meaning_hash(config), run.position.step + 1))
        facts = Facts(
            parameters=parameters.count(config.model),
            ranks=process.ranks,
            device=accelerator().device_name(),
            tokens=_tokens(corpora.train),
            held_out_tokens=_tokens(corpora.validation) if corpora.validation is not None else 0,
            first_step=run.position.step + 1,
        )
        console = Console(config, facts, Screen(highlight=False), run.folder / "metrics.jsonl")
        sinks = [JsonLines(run.folder / "metrics.jsonl"), console]
        console.begin()
        hooks.append(Records(sinks, runfile))
    if config.data.log_samples:
        hooks.append(SampleLog(run.folder / "samples.jsonl", groups))
    if corpora.validation is not None and config.eval.every >= 0:
        hooks.append(_evaluation(run, corpora, settings, sinks))
    if config.monitor.sample_tokens > 0:
        hooks.append(ClosingText(console))
    return hooks


def _tokens(corpus: Corpus) -> int:
    return sum(stop - start for start, stop in corpus.spans)


def _evaluation(run: Run, corpora: Corpora, settings: StreamSettings, sinks: list[Sink]) -> Evaluation:
    corpus, wanted = corpora.validation, run.config.eval.samples
    assert corpus is not None
    samples = min(len(corpus), wanted) if wanted else len(corpus)

    def batches() -> Iterator[MicroBatch]:
        return validation_batches(corpus, settings, samples, run.engine.device)

    return Evaluation(batches, samples, sinks)
