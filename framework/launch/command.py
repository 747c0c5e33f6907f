"""How a run is started, as data: the words of a command and the environment that goes with it. Pure; starts nothing."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from framework.base.errors import ConfigError
from framework.config.schema import Config, Launch

LAUNCHER_SETS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher tells its ranks; a rank of one run must not hand it on to another run."""
TRAIN = "framework.train"
RANKS_FROM = "FRAMEWORK_RANKS_FROM"
"""Names, in the environment of ranks that mpirun or srun has started for us, whose variables say which rank a process is."""
MANY_HOSTS_PORT = 29500
BY_PATH = Path(__file__).with_name("by_path.py")


def ranks_to_start(config: Config) -> int:
    """Ranks on which a program that starts runs by itself starts this one: launch.num_procs, or the model's ranks, at least 2."""
    return config.launch.num_procs or max(2, config.parallel.model_ranks)


def run_command(words: Sequence[str], ranks: int, port: int, module: str = TRAIN) -> list[str]:
    """The command that runs `module` with `words` on `ranks` processes of this host.

    Several ranks meet at TCP port `port` and are started by DeepSpeed's launcher, which the `deepspeed` command is.
    """
    if ranks == 1:
        return [sys.executable, "-m", module, *words]
    return [*_deepspeed(port), "--num_gpus", str(ranks), "--module", module, *words]


@dataclass(frozen=True)
class Places:
    """Where ranks are to be started: `hosts` (name -> ranks) of a hostfile; none: on this host."""

    ranks: int
    ranks_per_host: int
    hosts: Mapping[str, int] = field(default_factory=dict)


def places(launch: Launch, alone: int) -> Places:
    """Where launch wants the ranks; `alone` of them if it does not say. Raises ConfigError for a hostfile that cannot be read."""
    if launch.hostfile is None:
        ranks = launch.num_procs or alone
        return Places(ranks, ranks)
    try:
        hosts = chosen_hosts(read_hosts(Path(launch.hostfile).read_text()), launch.include, launch.exclude)
    except OSError as error:
        raise ConfigError("launch.hostfile", f"{launch.hostfile}: {error.strerror}", "a file of lines `HOST slots=N`") from None
    except ValueError as error:
        got = f"{error} ({launch.hostfile}, include {launch.include!r}, exclude {launch.exclude!r})"
        raise ConfigError("launch.hostfile", got, "lines `HOST slots=N`; of these HOST or HOST:0,1, joined by @") from None
    if not hosts or launch.num_procs not in (None, sum(hosts.values())):
        got = f"{sum(hosts.values())} ranks in {launch.hostfile}, launch.num_procs {launch.num_procs}"
        raise ConfigError("launch.hostfile", got, "at least one rank, and the same number", "launch.num_procs=null")
    return Places(sum(hosts.values()), max(hosts.values()), hosts)


def hosts_command(words: Sequence[str], launch: Launch, hostfile: Path, hosts: Mapping[str, int], module: str = TRAIN) -> list[str]:
    """The command that runs `module` with `words` on `hosts` (name -> ranks), which are what launch leaves of `hostfile`."""
    command = [*_deepspeed(launch.master_port or MANY_HOSTS_PORT), "--hostfile", str(hostfile)]
    for flag, value in (("--include", launch.include), ("--exclude", launch.exclude), ("--master_addr", launch.master_addr)):
        command += [flag, value] if value else []
    if launch.launcher == "no_ssh":
        command += ["--no_ssh", "--node_rank", str(launch.node_rank)]
    else:
        command += ["--launcher", launch.launcher, "--force_multi"]
        handed = _handed_on(launch.launcher, meeting(launch, hosts), max(hosts.values()))
        command += [f"--launcher_args={handed}"] if handed else []
    # Its srun launcher drops --module: there the module comes as a word for a file that runs modules.
    return [*command, *([str(BY_PATH), module] if launch.launcher == "slurm" else ["--module", module]), *words]


def meeting(launch: Launch, hosts: Mapping[str, int]) -> dict[str, str]:
    """What ranks must be told that mpirun or srun has started: where they meet, and whose variables number them. Empty for others."""
    if launch.launcher in ("pdsh", "no_ssh"):
        return {}
    port = str(launch.master_port or MANY_HOSTS_PORT)
    return {RANKS_FROM: launch.launcher, "MASTER_ADDR": launch.master_addr or next(iter(hosts)), "MASTER_PORT": port}


def run_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without what makes a process a rank."""
    return {name: value for name, value in environment.items() if name not in (*LAUNCHER_SETS, RANKS_FROM)}


def read_hosts(text: str) -> dict[str, int]:
    """Host -> ranks of a hostfile, in its order. Raises ValueError with the line that is none."""
    hosts: dict[str, int] = {}
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if not line:
            continue
        found = re.fullmatch(r"(\S+)\s+slots\s*=\s*(\d+)", line)
        if found is None or found[1] in hosts:
            raise ValueError(line)
        hosts[found[1]] = int(found[2])
    return hosts


def chosen_hosts(hosts: Mapping[str, int], include: str, exclude: str) -> dict[str, int]:
    """What `include` or `exclude` (host, or host:0,1 for single ranks, joined by @) leaves. Raises ValueError with a wrong part."""
    left = {name: set(range(ranks)) for name, ranks in hosts.items()}
    named = {}
    for part in filter(None, (include or exclude).split("@")):
        name, _, places = part.partition(":")
        if name not in hosts or not re.fullmatch(r"\d+(,\d+)*", places or "0"):
            raise ValueError(part)
        named[name] = {int(place) for place in places.split(",")} if places else left[name]
        if not named[name] <= left[name]:
            raise ValueError(part)
    if include:
        left = {name: named[name] for name in hosts if name in named}
    else:
        left = {name: places - named.get(name, set()) for name, places in left.items()}
    return {name: len(places) for name, places in left.items() if places}


def word(key: str, value: object) -> str:
    """`key=value` as Hydra reads it: numbers and lists as they are, null for None, text in quotes."""
    return f"{key}={_quoted(value) if isinstance(value, str) else json.dumps(value)}"


def _deepspeed(port: int) -> list[str]:
    return [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", str(port)]


def _handed_on(launcher: str, variables: Mapping[str, str], ranks_per_host: int) -> str:
    """mpirun hands on only the variables that it is told to; srun all, but it must be told how many ranks a host gets."""
    if launcher == "openmpi":
        return " ".join(f"-x {name}={value}" for name, value in variables.items())
    if launcher == "mpich":
        return " ".join(f"-genv {name} {value}" for name, value in variables.items())
    return f"--ntasks-per-node={ranks_per_host}" if launcher == "slurm" else ""


def _quoted(text: str) -> str:
    """In single quotes; Hydra wants a quote escaped, and the backslashes that stand before a quote."""
    return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text) + "'"
