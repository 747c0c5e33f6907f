"""How well a run answers: tasks of lm-evaluation-harness on its newest checkpoint, on one process whatever layout the run had.

Here is what has to be known of the run: which tokenizer, how much the model sees. Writes nothing into the run folder.
"""

from __future__ import annotations

import glob
import importlib.util
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from framework.base.errors import ConfigError
from framework.config.schema import Config
from framework.data.manifest import read_manifest
from framework.data.tokenizer import BYTES, Tokenizer, open_tokenizer
from framework.studies.evaluate import kept_config, standing
from framework.studies.scoring import Scorer
from framework.trainer.folder import CARRIED


@dataclass(frozen=True)
class Line:
    """A number that a task has: of `samples` questions, None where they are not counted; `error` is its standard error, None where
    it has none."""

    task: str
    metric: str
    value: float
    error: float | None
    samples: int | None


@dataclass(frozen=True)
class Answered:
    """What the tasks say of the checkpoint of `step`."""

    step: int
    lines: Sequence[Line]

    def numbers(self) -> dict[str, Any]:
        """For programs."""
        return {"step": self.step, "tasks": [asdict(line) for line in self.lines]}

    def says(self) -> str:
        """In words: a line for each number."""
        wide = max((len(line.task) for line in self.lines), default=0)
        rows = [f"step {self.step}"]
        for line in self.lines:
            error = "" if line.error is None else f" ± {line.error:.4f}"
            count = "" if line.samples is None else f", {line.samples:,} questions"
            rows.append(f"  {line.task:{wide}}  {line.metric} {line.value:.4f}{error}{count}")
        return "\n".join(rows)


def answer(config: Config) -> Answered:
    """The tasks `config.evaluate.tasks` on the run `config.run`.

    Raises ConfigError where there is no run, no checkpoint, no tokenizer, no such task or no harness, DataError for a task without data.
    """
    kept = kept_config(config.run)
    run = str(config.run)
    if importlib.util.find_spec("lm_eval") is None:
        tasks = ", ".join(config.evaluate.tasks)
        raise ConfigError("evaluate.tasks", f"{tasks}, without the package lm_eval", "that package", "pip install '.[harness]'")
    from framework.studies import harness

    tokenizer, length = tokenizer_of(config, kept), _length(config, kept)
    with standing(run, kept) as found:
        engine = found.engine
        scorer = Scorer(lambda ids: engine.logits(ids.to(engine.device)), tokenizer, length, kept.batch.micro)
        lines = [Line(*each) for each in harness.run_tasks(scorer, config.evaluate, config.seed)]
    return Answered(found.step, lines)


def tokenizer_of(config: Config, kept: Config) -> Tokenizer:
    """The one that is given, or what the run knows: its own setting, the files of the published model that it began from, bytes.

    Raises ConfigError where there is none, and where it is not the one that the run's tokens were made with.
    """
    carried = Path(str(config.run), CARRIED)
    known = [config.data.tokenizer, kept.data.tokenizer, str(carried) if _has_tokenizer(carried) else None]
    path = next(filter(None, known), BYTES if kept.data.text == BYTES else None)
    if path is None:
        raise ConfigError("data.tokenizer", "nothing", "the tokenizer that the run's tokens were made with", "data.tokenizer=PATH")
    tokenizer = open_tokenizer(path)
    if tokenizer.vocab_size > kept.model.vocab_size:
        got = f"{path} of {tokenizer.vocab_size:,} tokens, where the model knows {kept.model.vocab_size:,}"
        raise ConfigError("data.tokenizer", got, "the tokenizer that the run's tokens were made with", "data.tokenizer=PATH")
    pages = (page for entry in kept.data.files if kept.data.kind == "tokens" for page in glob.glob(f"{entry}.json", recursive=True))
    for page in pages:  # of those token files that are on this machine
        made = (read_manifest(page.removesuffix(".json")) or {}).get("tokenizer", {}).get("xxh3_128", tokenizer.checksum)
        if made != tokenizer.checksum:
            got = f"{path}, and the file of {page} was made with another"
            raise ConfigError("data.tokenizer", got, "the tokenizer that the run's tokens were made with", "data.tokenizer=PATH")
    return tokenizer


def _has_tokenizer(folder: Path) -> bool:
    names = ("tokenizer.json", "tekken.json", "tokenizer.model", "merges.txt")
    return any((folder / name).is_file() for name in names)


def _length(config: Config, kept: Config) -> int:
    """Tokens at once: what the run has learned from, or what the published model that it began from has."""
    longest = kept.model.max_positions
    given = config.evaluate.max_length
    if given is not None and given > longest:
        write = f"evaluate.max_length={longest}"
        raise ConfigError("evaluate.max_length", given, f"{longest} at most, the run's model.max_positions", write)
    return given or (longest if kept.model.init_from else kept.data.seq_length)
