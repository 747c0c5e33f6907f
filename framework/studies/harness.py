"""Tasks of lm-evaluation-harness on a run: its model interface over our scorer, and what came of the tasks.

The package lm_eval (`pip install '.[harness]'`) is imported by this file alone. Data sets are its own matter: tasks that are not
files of this machine fetch theirs.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lm_eval  # pyright: ignore[reportMissingImports]
from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

from framework.base.errors import ConfigError, DataError
from framework.config.schema import Evaluate
from framework.studies.scoring import Scorer

NEW_TOKENS = 256
"""Length of an answer where the task does not say it: the harness's own default."""
RESAMPLES = 1000
"""Bootstrap samples for the standard errors that have no formula."""
KNOWN = {"until", "max_gen_toks", "max_new_tokens", "do_sample", "temperature"}
"""What a task may say of how answers are written."""


Number = tuple[str, str, float, float | None, int | None]
"""Task, metric (and the filter of its answers, where there is one), value, standard error, questions; None where there is none."""


class RunModel(LM):
    """A run's model, as the harness asks for it: lists of requests in, one answer each out, in their order."""

    def __init__(self, scorer: Scorer, seed: int) -> None:
        super().__init__()
        self.scorer, self.seed = scorer, seed

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """(nats, whether it is what greedy decoding writes) of each (context, continuation)."""
        return self.scorer.score([self.scorer.pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Nats of each whole text, (text,)."""
        return self.scorer.rolling([request.args[0] for request in requests])

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """A continuation of each (context, settings). Raises ConfigError for a setting that would be passed over."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, settings: Mapping[str, Any]) -> str:
        unknown = sorted(set(settings) - KNOWN)
        if unknown:
            got = f"a task with generation_kwargs {', '.join(unknown)}"
            raise ConfigError("evaluate.tasks", got, f"no others than {', '.join(sorted(KNOWN))}", "a task without them")
        until = settings.get("until") or []
        temperature = float(settings.get("temperature", 1.0)) if settings.get("do_sample", False) else 0.0
        most = int(settings.get("max_gen_toks", settings.get("max_new_tokens", NEW_TOKENS)))
        return self.scorer.generate(context, [until] if isinstance(until, str) else until, most, temperature, self.seed)


def run_tasks(scorer: Scorer, settings: Evaluate, seed: int) -> list[Number]:
    """Every number of the tasks `settings.tasks`. Raises ConfigError for a task that does not exist, DataError for one that has no data."""
    own = all(Path(name).is_file() for name in settings.tasks)
    manager: Any = TaskManager(include_defaults=not own)  # to look through its own takes a minute
    evaluate: Any = lm_eval.simple_evaluate  # which hides its parameters behind a decorator
    results = evaluate(
        RunModel(scorer, seed),
        tasks=_load(manager, settings.tasks),
        num_fewshot=settings.num_fewshot,
        limit=settings.limit,
        bootstrap_iters=RESAMPLES,
        log_samples=False,
        task_manager=manager,
        random_seed=seed,
        fewshot_random_seed=seed,
    )
    return list(_numbers(results))


def _load(manager: Any, names: Sequence[str]) -> list[Any]:
    """The tasks and groups of these names, with their data; none that is a part of another."""
    try:
        loaded = manager.load(list(names))
    except KeyError:
        [first, *_] = [name for name in names if name not in manager.all_tasks]
        near = difflib.get_close_matches(first, manager.all_tasks, 5)
        expected = f"a name or a YAML file of a task{', such as ' if near else ''}{', '.join(near)}"
        raise ConfigError("evaluate.tasks", first, expected, f"evaluate.tasks=[{near[0]}]" if near else "") from None
    except Exception as error:  # whatever reading or fetching a data set may raise
        got = f"{', '.join(names)}: {type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
        raise DataError("evaluate.tasks", got, "tasks whose data sets can be read here") from None
    parts = {part for members in loaded["group_map"].values() for part in members}
    return [each for kind in ("groups", "tasks") for name, each in loaded[kind].items() if name not in parts]


def _numbers(results: Mapping[str, Any]) -> Iterator[Number]:
    for task, numbers in results["results"].items():
        samples = results.get("n-samples", {}).get(task, {}).get("effective")
        for key, value in numbers.items():
            metric, _, kept = key.partition(",")
            if not isinstance(value, float | int) or metric.endswith("_stderr") or key in ("sample_len",):
                continue
            error = numbers.get(f"{metric}_stderr,{kept}")
            name = metric if kept in ("", "none") else f"{metric} ({kept})"
            yield task, name, float(value), error if isinstance(error, float) else None, samples
