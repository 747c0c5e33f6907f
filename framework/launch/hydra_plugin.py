"""Hydra's multirun with our launcher: Hydra and its sweepers choose the words of each job, `run_jobs` runs them.

Hydra takes a launcher only from the package hydra_plugins, and creates it from a config by its name; so the class is entered there
under a name of its own. tests/launch/test_hydra_plugin.py guards what this leans on in Hydra 1.3.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from framework.config.compose import CONF, register

MODULE = "hydra_plugins.framework_deepspeed"
Run = Callable[[Sequence[Sequence[str]]], Sequence[float]]
"""Words of each job -> what each is judged by (NaN for one that has failed)."""


def multirun(words: Sequence[str], run_jobs: Run) -> None:
    """Sweep over what `words` (`-m` and overrides) say. Raises what Hydra raises for words that it cannot read."""
    import hydra

    _enter(run_jobs)
    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra's faults come out as exceptions: we make the letters
    sys.argv[1:] = [*words]
    hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(lambda _: None)()


def _enter(run_jobs: Run) -> None:
    from hydra.core.plugins import Plugins
    from hydra.core.utils import JobReturn, JobStatus
    from hydra.plugins.launcher import Launcher

    class DeepSpeedLauncher(Launcher):
        """One `deepspeed` process tree for each job."""

        def __init__(self, **_: Any) -> None:
            pass

        def setup(self, *, config: Any, **_: Any) -> None:
            Path(config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)  # sweepers write there and leave the making to launchers

        def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
            judged = zip(job_overrides, run_jobs(job_overrides), strict=True)
            return [JobReturn(overrides=job, status=JobStatus.COMPLETED, _return_value=value) for job, value in judged]

    DeepSpeedLauncher.__module__, DeepSpeedLauncher.__qualname__ = MODULE, DeepSpeedLauncher.__name__
    package = _package()
    module = ModuleType(MODULE)
    module.DeepSpeedLauncher = DeepSpeedLauncher  # type: ignore[attr-defined]
    sys.modules[MODULE] = module
    setattr(package, MODULE.rpartition(".")[2], module)
    Plugins.instance().register(DeepSpeedLauncher)


def _package() -> ModuleType:
    """hydra_plugins as it is installed with other plugins, or an empty one."""
    name = MODULE.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError:
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = []
        return package
