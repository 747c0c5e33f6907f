"""This process among the others: rank, host and threads, from the environment and the launcher's flags. No torch.

Honours RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun and deepspeed set them, and
the numbers that mpirun and srun give to ranks that were started through them by us.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from framework.base.errors import ConfigError, StartError
from framework.checkpoint.alive import began
from framework.launch.command import RANKS_FROM

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
NUMBERED_BY = {
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
}
"""Whose variables say what NUMBERS say, in that order."""


@dataclass(frozen=True)
class Process:
    """Where this process stands; `ranks_per_host` counts the ranks of this host, `launched` says whether a launcher has started it."""

    rank: int = 0
    local_rank: int = 0
    ranks: int = 1
    ranks_per_host: int = 1
    launched: bool = field(default=False, compare=False)

    @property
    def first(self) -> bool:
        """This process speaks for all."""
        return self.rank == 0


def strip_local_rank(words: Sequence[str]) -> tuple[list[str], int | None]:
    """The words without the launcher's `--local_rank=N` (or `--local-rank`, or as two words), and N."""
    kept: list[str] = []
    found: int | None = None
    rest = iter(words)
    for word in rest:
        match = re.fullmatch(r"--local[_-]rank(?:=(.*))?", word)
        if match is None:
            kept.append(word)
            continue
        value = match.group(1) if match.group(1) is not None else next(rest, "")
        if not value.isdecimal():
            raise StartError("--local_rank", repr(value), "a number")
        found = int(value)
    return kept, found


def adopt_numbers(environment: MutableMapping[str, str]) -> None:
    """Give a rank that mpirun or srun has started for us the variables that torch looks for."""
    theirs = NUMBERED_BY.get(environment.get(RANKS_FROM, ""), NUMBERS)
    for name, their in zip(NUMBERS, theirs, strict=True):
        if name not in environment and their in environment:
            environment[name] = environment[their]


def read_process(environment: Mapping[str, str], flag: int | None) -> Process:
    """This process's place. Raises StartError for values that are no numbers or contradict each other or `flag`."""
    numbers = {}
    for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", None), ("LOCAL_WORLD_SIZE", None)):
        text = environment.get(name)
        if text is not None and not text.isdecimal():
            raise StartError(name, repr(text), "a number")
        numbers[name] = default if text is None else int(text)
    local_rank = numbers["LOCAL_RANK"]
    if flag is not None and local_rank is not None and flag != local_rank:
        got = f"{local_rank} in the environment, --local_rank={flag} on the command line"
        raise StartError("LOCAL_RANK", got, "the same number", "leave the flag to the launcher")
    rank, ranks = numbers["RANK"], numbers["WORLD_SIZE"]
    local_rank = next((n for n in (local_rank, flag) if n is not None), rank)
    if not 0 <= rank < ranks:
        raise StartError("RANK", rank, f"less than WORLD_SIZE {ranks}")
    of_deepspeed = int(environment.get("LOCAL_SIZE", "0")) if "RANK" in environment else 0
    per_host = numbers["LOCAL_WORLD_SIZE"] or of_deepspeed or ranks
    if local_rank >= per_host:
        raise StartError("LOCAL_RANK", local_rank, f"less than the {per_host} ranks of this host")
    return Process(rank, local_rank, ranks, per_host, "RANK" in environment)


def age_s() -> float:
    """Seconds since this process began, imports included."""
    ticks = began(os.getpid())
    assert ticks is not None
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def default_threads(ranks_per_host: int) -> int:
    """CPU threads for one rank: an equal share of the cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // ranks_per_host)


def refuse_sweep(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """A rank of a running job must not start jobs of its own."""
    if any(word in ("-m", "--multirun") for word in words) and "RANK" in environment:
        raise ConfigError("-m", "a sweep inside a rank", "a sweep started by one process", "python -m framework.train -m ...")


def remove_stale_compile_locks(environment: Mapping[str, str], older_than_s: float = 60.0) -> list[Path]:
    """Remove the lock files that killed compilers have left where torch builds extensions; which they were.

    torch waits for such a lock without limit and says nothing.
    """
    removed = []
    root = environment.get("TORCH_EXTENSIONS_DIR") or str(Path.home() / ".cache" / "torch_extensions")
    for lock in Path(root).glob("**/lock"):
        try:
            age = time.time() - lock.stat().st_mtime
        except FileNotFoundError:
            continue
        if age > older_than_s and not _held_open(lock):
            lock.unlink(missing_ok=True)  # every rank comes here
            removed.append(lock)
    return removed


def _held_open(path: Path) -> bool:
    """Whether a compiler is at work in the lock's folder: some process has a file open or runs there."""
    folder = str(path.parent.resolve())
    return any(link == folder or link.startswith(folder + "/") for process in Path("/proc").glob("[0-9]*") for link in _open_paths(process))


def _open_paths(process: Path) -> Iterator[str]:
    """Working directory and open files of a /proc entry, as far as they can be read; some end while one looks."""
    with contextlib.suppress(OSError):
        for entry in [process / "cwd", *(process / "fd").iterdir()]:
            with contextlib.suppress(OSError):
                yield os.readlink(entry)
