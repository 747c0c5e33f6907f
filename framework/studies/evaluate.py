"""How well a run predicts tokens that it has not learned from: cross entropy and perplexity of its newest checkpoint.

Starts the model on one process, whatever layout the run had: through the plain engine where the run computes in fp32, through
DeepSpeed's where it has another precision. Reads the run folder, and writes nothing there.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from framework.base.errors import ConfigError
from framework.checkpoint.store import Checkpoint, Store, find
from framework.config.check import check
from framework.config.schema import Config, Parallel, Recompute, Zero
from framework.data.manifest import read_manifest
from framework.data.prepare import matching, open_corpora, refuse_larger_vocabulary
from framework.data.stream import StreamSettings, validation_batches
from framework.data.tokens import Corpus, TokenFile
from framework.engine.engine import PlainEngine
from framework.engine.sharded import DeepSpeedEngine
from framework.topology.groups import Groups, accelerator, connect, make_groups
from framework.topology.random import Streams
from framework.trainer.build import make_engine, make_grid
from framework.trainer.folder import read_config
from framework.trainer.letters import letters
from framework.trainer.resume import restore


@dataclass(frozen=True)
class Evaluated:
    """`loss` is the mean cross entropy over `tokens` predicted tokens, in nats per token. `bytes_per_token` is that of the whole
    files, None where nothing says it."""

    step: int
    loss: float
    tokens: int
    samples: int
    bytes_per_token: float | None

    def numbers(self) -> dict[str, Any]:
        """For programs."""
        return {**asdict(self), "perplexity": self.perplexity}

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def says(self) -> str:
        """In words."""
        words = f"step {self.step}: {self.loss:.6f} nats per token, perplexity {self.perplexity:.4f}"
        if self.bytes_per_token is not None:
            words += f", {self.loss / self.bytes_per_token:.6f} nats per byte"
        return f"{words}, over {self.tokens:,} tokens in {self.samples:,} samples"


@dataclass(frozen=True)
class Standing:
    """A run's newest checkpoint in an engine of this one process; `config` is how it is laid out here."""

    engine: DeepSpeedEngine | PlainEngine
    config: Config
    step: int


def evaluate(config: Config) -> Evaluated:
    """The run `config.run` on the token files `config.data.files`; on the tokens that it holds out itself where none are given.

    Raises ConfigError where there is no run or no checkpoint, DataError for a token file.
    """
    kept = kept_config(config.run)
    corpus, own = _corpus(config, kept)
    wanted = config.eval.samples or (kept.eval.samples if own else 0)
    samples = min(wanted or len(corpus), len(corpus))
    with standing(str(config.run), kept) as run:
        batches = validation_batches(corpus, _stream(run.config), samples, run.engine.device)
        loss_sum, tokens = run.engine.evaluate(batches)
    return Evaluated(run.step, loss_sum / max(1, tokens), tokens, samples, _bytes_per_token(corpus.files, kept, own))


def kept_config(run: str | None) -> Config:
    """The settings of the run in a folder. Raises ConfigError where there is none."""
    if not run or not (kept_at := Path(run, "config.yaml")).exists():
        raise ConfigError("run", run or "nothing", "a run folder", "run=runs/NAME")
    return read_config(kept_at)


@contextmanager
def standing(run: str, kept: Config) -> Iterator[Standing]:
    """The newest checkpoint of the run in the folder `run` with the settings `kept`. Raises ConfigError where there is none."""
    with letters(ConfigError):
        checkpoint = _newest(kept, run)
    with tempfile.TemporaryDirectory() as scratch:
        alone = on_one_process(kept, scratch)
        check(alone, 1, 1)
        engine, groups = _engine(alone)
        with letters(ConfigError):
            restore(engine, checkpoint, groups)
        yield Standing(engine, alone, checkpoint.step)


def on_one_process(kept: Config, scratch: str) -> Config:
    """The run's config with its meaning as it was, laid out for one process; `scratch` takes what an engine writes."""
    plain = kept.precision.dtype == "fp32" and not kept.precision.autocast
    return replace(
        kept,
        output_root=scratch,
        engine="plain" if plain else "deepspeed",
        compile="none",
        zero=Zero(stage=1 if kept.precision.half_weights else 0),
        parallel=Parallel(data=1),
        recompute=Recompute(),
        batch=replace(kept.batch, global_size=kept.batch.micro, micro_size=kept.batch.micro),
        checkpoint=replace(kept.checkpoint, memory_every=0),
        alerts=replace(kept.alerts, drift_every=0),
        profile=replace(kept.profile, rank=0),
    )


def _corpus(config: Config, kept: Config) -> tuple[Corpus, bool]:
    """What to predict, and whether it is the run's own held-out part."""
    if config.data.files:
        files = [TokenFile(path) for entry in config.data.files for path in matching("data.files", entry)]
        for file in files:
            refuse_larger_vocabulary(file, kept.model.vocab_size)
        corpus = Corpus(files, kept.data.seq_length, apart=kept.data.documents == "apart")
        if not len(corpus):
            got = f"files with fewer than {kept.data.seq_length + 1} tokens each"
            raise ConfigError("data.files", got, "at least one sample of the run's data.seq_length and one token more")
        return corpus, False
    corpus = open_corpora(kept.data, kept.model.vocab_size, kept.seed).validation
    if corpus is None:
        got = f"nothing, and {config.run} holds nothing out"
        raise ConfigError("data.files", got, "token files", "data=tokens data.files=[PATH_WITHOUT_SUFFIX]")
    return corpus, True


def _newest(kept: Config, run: str) -> Checkpoint:
    place = find(kept.checkpoint.root or run)
    if place is None:
        raise ConfigError("run", f"{run}, without a complete checkpoint", "a run that has saved one")
    return Store(place[0]).open(place[1])


def _engine(alone: Config) -> tuple[DeepSpeedEngine | PlainEngine, Groups]:
    if alone.engine == "deepspeed":
        accelerator().set_device(0)
        connect(alone.launch.timeout, alone.launch.shm_comm)
    grid = make_grid(alone, 1)
    groups = make_groups(grid, 0, alone.launch.timeout)
    device = torch.device(accelerator().current_device_name())
    return make_engine(alone, groups, grid, Streams(accelerator(), []), device), groups


def _stream(alone: Config) -> StreamSettings:
    return StreamSettings(
        seed=alone.seed,
        shuffle=False,
        micro_size=alone.batch.micro,
        accumulation=1,
        data_rank=0,
        data_size=1,
        workers=0,
        prefetch=1,
        vocab_size=alone.model.vocab_size,
    )


def _bytes_per_token(files: Sequence[TokenFile], kept: Config, own: bool) -> float | None:
    """Of all files together, as their manifests count; 1 where the run's tokens are bytes."""
    if own and kept.data.text == "bytes":
        return 1.0
    totals = [(read_manifest(file.path) or {}).get("totals") for file in files]
    known = [total for total in totals if total]
    if len(known) < len(files):
        return None
    return sum(total["bytes"] for total in known) / sum(total["tokens"] for total in known)
