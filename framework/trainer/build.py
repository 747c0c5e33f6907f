"""Assembly: the only file that sees every room. A Config goes in, a Run that the loop can drive comes out.

The order is the order of what can go wrong: data and folder before the ranks meet, then groups, model, engine, stream, hooks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console as Screen

from framework.base.errors import ConfigError, FrameworkError
from framework.base.files import write_json
from framework.base.log import Log
from framework.checkpoint.writer import Writer
from framework.config import identity, parameters
from framework.config.schema import Config
from framework.data.pack import MicroBatch
from framework.data.prepare import Corpora, open_corpora
from framework.data.stream import StreamSettings, TrainingStream, default_workers, validation_batches
from framework.data.tokens import Corpus
from framework.engine.dsconfig import deepspeed_config
from framework.engine.engine import PlainEngine
from framework.engine.pipelined import PipelinedEngine
from framework.engine.sharded import DeepSpeedEngine, settler
from framework.launch.environment import Process, default_threads
from framework.model.pretrained import Pretrained
from framework.monitor.page import Facts
from framework.monitor.sinks import Sink
from framework.parallel.apply import make_model
from framework.parallel.pipeline import Cut, assemble
from framework.topology.grid import Grid
from framework.topology.groups import Groups, accelerator, connect, make_groups
from framework.topology.random import APART, Streams, seed_training
from framework.trainer import folder, recomputing, resume, sizing, swapping
from framework.trainer.alerting import Alerting
from framework.trainer.feed import Feed
from framework.trainer.hooks import ClosingText, Evaluation, Hashes, SampleLog
from framework.trainer.ledger import LedgerHook
from framework.trainer.overflow import Overflow
from framework.trainer.profiling import Profiling
from framework.trainer.pulse import Pulse
from framework.trainer.records import Records
from framework.trainer.rewind import Rollback, leave_line
from framework.trainer.run import Hook, Position, Run
from framework.trainer.saving import make_saver
from framework.trainer.shortage import Shortage
from framework.trainer.stages import RESOLVED, StageTimes, make_bounds
from framework.trainer.stopping import Stopping
from framework.trainer.timing import Watched, peak


def build(config: Config, process: Process, log: Log) -> Run:
    """A Run at its first step, or where its newest checkpoint stands. `log` is opened once the run folder is claimed.

    Raises DataError, ConfigError or StartError, as far as possible before any process group starts.
    """
    torch.set_num_threads(config.launch.threads or default_threads(process.ranks_per_host))
    _refuse_unready(config)
    corpora = open_corpora(config.data, config.model.vocab_size, config.seed)
    writer = Writer() if config.checkpoint.mode == "async" else None  # before anything touches an accelerator
    grid = make_grid(config, process.ranks)
    if config.engine == "deepspeed":
        accelerator().set_device(process.local_rank)
        connect(config.launch.timeout, config.launch.shm_comm)
    groups = make_groups(grid, process.rank, config.launch.timeout)
    run_folder = _claim_together(config, groups)
    log.open(run_folder / "logs" / f"rank_{process.rank}.log")
    pulse = Pulse(run_folder, process.rank)

    device = torch.device(accelerator().current_device_name())
    shortage = Shortage(config, groups, grid, device, process.ranks_per_host)
    config = shortage.config
    streams = Streams(accelerator(), [APART] if grid.tensor > 1 else [])
    with shortage.explained():
        engine = make_engine(config, groups, grid, streams, device)
        shortage.hold(engine)
        fingerprint = corpora.train.fingerprint()
        found = resume.take_up(config, groups, engine, fingerprint)
    position = found.position if found is not None else Position()
    settings = _stream_settings(config, groups, grid, process)
    stream = TrainingStream(corpora.train, settings, engine.device)
    feed = Feed(stream, groups, grid.tensor * grid.pipeline, position.consumed_samples, engine.timers)
    watched = Watched(engine, streams)
    run = Run(config, run_folder, engine, feed, position, streams, watched.clock, explained=shortage.explained)
    records = Records(config, groups, _facts(config, corpora, process, position))
    if shortage.sized:
        records.resolve(sizing.RESOLVED, config.batch.micro)
    alerting = Alerting(groups, records, sizing.whole(device, process.ranks_per_host), found.windows if found is not None else {})
    run.hooks = [watched, *_hooks(run, groups, corpora, settings, records, alerting)]
    run.hooks.append(LedgerHook(groups, grid, records.memory if groups.rank == 0 else None))
    if config.checkpoint.mode != "none":
        saver = make_saver(run, groups, records, writer, fingerprint, alerting.windows)
        run.hooks.append(saver)
        alerting.rollback = Rollback(groups, saver, fingerprint)
    run.hooks.append(pulse)

    seed_training(config.seed, groups.place, streams)
    if found is not None:
        random = resume.restore_random(config, found, groups, streams)
        records.event(resume.event(found, random, leave_line(config, found, groups)))
    return run


def _refuse_unready(config: Config) -> None:
    """What must be there on this host: a compiler for a local disk, and the weights to begin with."""
    swapping.refuse_unready(config)
    if config.model.init_from:
        Pretrained(config.model)


def finished(config: Config, process: Process) -> bool:
    """True, said once, if the run in the config's folder has nothing left to do.

    Raises ConfigError if the folder is another run's.
    """
    done = folder.inspect(config)
    if done and process.first:
        Screen(highlight=False).print(f"{config.run_dir} is done, {config.steps} steps: raise `steps` to go on, or write resume=never")
    return done


def make_grid(config: Config, ranks: int) -> Grid:
    """The grid of a config that has passed check() on `ranks` processes."""
    parallel = config.parallel
    data = parallel.data or ranks // parallel.model_ranks
    return Grid(pipeline=parallel.pipeline, data=data, context=parallel.context, tensor=parallel.tensor)


def accumulation_steps(config: Config, grid: Grid) -> int:
    """Micro-batches of one rank per optimizer step."""
    return config.batch.global_size // (config.batch.micro * grid.data)


def _claim_together(config: Config, groups: Groups) -> Path:
    """The run folder, made by the first rank; every rank must have composed the same config."""
    hashes = groups.gather(identity.full_hash(config))
    if len(set(hashes)) > 1:
        raise ConfigError("the composed config", f"different on the ranks: {hashes}", "the same command line and conf/ on every host")
    error: FrameworkError | None = None
    try:
        if groups.rank == 0:
            folder.claim(config)
    except FrameworkError as met:
        error = met
    groups.raise_together(error)  # and nobody writes before the folder is there
    return folder.run_folder(config)


def make_engine(config: Config, groups: Groups, grid: Grid, streams: Streams, device: torch.device) -> DeepSpeedEngine | PlainEngine:
    """The engine of the config's layout, with initial weights. The first rank writes deepspeed.json into the config's run folder."""
    config = recomputing.resolve(config, groups, streams, device)
    if config.engine == "plain":
        return PlainEngine(make_model(config, groups, streams, device, lambda module: None), config)
    settings = deepspeed_config(config, grid.data * grid.context, accumulation_steps(config, grid))
    if groups.rank == 0:
        write_json(Path(config.run_dir) / "deepspeed.json", settings)
    part = None
    if grid.pipeline > 1:
        part = Cut(make_bounds(config, groups, grid, device), groups.place.pipeline)
    model = make_model(config, groups, streams, device, settler(config, settings, groups), part)
    if part is None:
        return DeepSpeedEngine(model, config, settings, groups)
    slices = grid.tensor if config.parallel.sequence else 1
    return PipelinedEngine(assemble(model, part, grid, slices), part.bounds, config, settings, groups)


def _stream_settings(config: Config, groups: Groups, grid: Grid, process: Process) -> StreamSettings:
    workers = config.data.workers
    cores = default_threads(1)
    return StreamSettings(
        seed=config.seed,
        shuffle=config.data.shuffle,
        micro_size=config.batch.micro,
        accumulation=accumulation_steps(config, grid),
        data_rank=groups.place.data,
        data_size=grid.data,
        workers=default_workers(cores, process.ranks_per_host) if workers is None else workers,
        prefetch=config.data.prefetch,
        vocab_size=config.model.vocab_size,
        context_rank=groups.place.context,
        context_size=grid.context,
    )


def _facts(config: Config, corpora: Corpora, process: Process, position: Position) -> Facts:
    return Facts(
        parameters=parameters.count(config.model),
        ranks=process.ranks,
        device=accelerator().device_name(),
        tokens=_tokens(corpora.train),
        held_out_tokens=_tokens(corpora.validation) if corpora.validation is not None else 0,
        first_step=position.step + 1,
        peak=peak(config.precision.dtype, process),
        mixture=corpora.train.shares(config.steps * config.batch.global_size),
    )


def _tokens(corpus: Corpus) -> int:
    return sum(stop - start for start, stop in corpus.spans)


def _hooks(run: Run, groups: Groups, corpora: Corpora, settings: StreamSettings, records: Records, alerting: Alerting) -> list[Hook]:
    """The hooks in the order in which they are called after a step; they end in the opposite order."""
    config = run.config
    stopping = Stopping(groups, config.limits.wall_time, records.event)
    hooks: list[Hook] = [stopping, records, alerting]  # which may take a step back, before anybody saves or evaluates it
    if config.profile.level != "timers":
        hooks.append(Profiling(groups, records))
    if config.precision.dtype == "fp16":
        hooks.append(Overflow(groups, records))
    if config.data.log_samples:
        hooks.append(SampleLog(run.folder / "samples.jsonl", groups))
    if config.verify.hash_every > 0:
        hooks.append(Hashes(run.folder / "hashes.jsonl", groups, resume.random_state))
    if corpora.validation is not None and config.eval.every >= 0:
        hooks.append(_evaluation(run, corpora, settings, records.sinks, stopping))
    if config.monitor.sample_tokens > 0:
        hooks.append(ClosingText(records.console))
    if config.recompute.granularity == "auto":
        records.resolve(recomputing.RESOLVED, list(run.engine.config.recompute.modules))
    if isinstance(run.engine, PipelinedEngine):
        hooks.append(StageTimes(run.engine, groups, records.event))
        if config.parallel.partition == "measured":
            records.resolve(RESOLVED, run.engine.bounds)
    return hooks


def _evaluation(run: Run, corpora: Corpora, settings: StreamSettings, sinks: list[Sink], stopping: Stopping) -> Evaluation:
    corpus, wanted = corpora.validation, run.config.eval.samples
    assert corpus is not None
    samples = min(len(corpus), wanted) if wanted else len(corpus)

    def batches() -> Iterator[MicroBatch]:
        return validation_batches(corpus, settings, samples, run.engine.device)

    return Evaluation(batches, samples, sinks, stopping)
