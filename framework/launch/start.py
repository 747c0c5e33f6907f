"""Whether a process is to train, or to start the processes that train; and on how many ranks. Pure, but for reading a hostfile."""

from __future__ import annotations

from framework.base.errors import ConfigError
from framework.config.schema import Config, Launch
from framework.launch.command import Places, places
from framework.launch.environment import Process


def starts_ranks(launch: Launch, process: Process, frozen: bool) -> bool:
    """Whether this process starts ranks, and is none itself: nobody has started it, and launch asks for more than one process."""
    asks = (launch.num_procs or 1) > 1 or launch.hostfile or launch.supervise or launch.dry_run or launch.print != "none"
    return bool(asks) and not process.launched and not frozen


def ranks_alone(config: Config) -> int:
    """Ranks of a run that ranks are started for, where launch does not say how many."""
    return config.parallel.model_ranks


def ranks_of(config: Config, process: Process, frozen: bool) -> Places:
    """Where the ranks of the run are, seen from this process. Raises ConfigError for a hostfile that cannot be read."""
    if not starts_ranks(config.launch, process, frozen):
        return Places(process.ranks, process.ranks_per_host)
    return places(config.launch, ranks_alone(config))


def refuse_inside(config: Config, process: Process) -> None:
    """Raise ConfigError for what a rank that somebody else has started cannot do: start ranks, or be of another number."""
    launch = config.launch
    asked = [name for name in ("supervise", "elastic", "dry_run", "hostfile") if getattr(launch, name)]
    asked += ["print"] if launch.print != "none" else []
    if asked:
        got, write = "a rank that a launcher has started", "python -m framework.train ..."
        raise ConfigError(f"launch.{asked[0]}", got, "one process that starts ranks", write)
    if launch.num_procs not in (None, process.ranks):
        got = f"{launch.num_procs} on {process.ranks} ranks"
        raise ConfigError("launch.num_procs", got, "the number of ranks that were started", "launch.num_procs=null")


def planned(config: Config, devices: int | None) -> Places:
    """The ranks that framework.plan plans for, on hosts of `devices` (None: all on one). Raises ConfigError as `places` does."""
    plan = config.plan
    there = places(config.launch, ranks_alone(config))
    ranks = plan.world_size or there.ranks
    per_host = there.ranks_per_host if there.hosts and plan.world_size is None else min(ranks, devices or ranks)
    return Places(ranks, plan.ranks_per_host or per_host)


def planned_now(config: Config, devices: int | None) -> Places:
    """The ranks on which the settings must be right as they stand: those planned for; of a search, which finds degrees of its own,
    those of one replica, on one host."""
    there = planned(config, devices)
    if not config.plan.search:
        return there
    ranks = config.parallel.model_ranks * (config.parallel.data or 1)
    return Places(ranks, ranks)
