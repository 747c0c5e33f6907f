"""What every program of the framework does before and after its own work: read words, compose, check, speak of errors.

Exit codes are the contract's: 0 done, 2 refused, 75 stopped on request, anything else a fault. A letter is printed once,
however many ranks meet the error.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from framework.base.errors import EXIT_DONE, ConfigError, FrameworkError, RunError, Stopped
from framework.base.log import Log, start_log
from framework.config.check import check
from framework.config.compose import CONF, compose, letter, register
from framework.config.schema import Config
from framework.launch.command import Places
from framework.launch.environment import (
    Process,
    adopt_numbers,
    default_threads,
    read_process,
    refuse_sweep,
    remove_stale_compile_locks,
    strip_local_rank,
)
from framework.launch.frozen import take_frozen

# Ranks other than the first wait this long before they speak of a refusal: the first has said it by then, if it met it too.
MANNERS_S = 10.0


@dataclass(frozen=True)
class Entry:
    """What a program starts from; `frozen`: somebody else has composed the config and started this process with it."""

    config: Config
    process: Process
    log: Log
    frozen: bool = False


def run_entry(
    words: Sequence[str],
    task: Callable[[Entry], int | None],
    ranks: Callable[[Config, Process, bool], Places] | None = None,
    sweep: Callable[[Sequence[str], Path | None], int] | None = None,
) -> int:
    """Compose and check what `words` say, run `task`, and return the exit code: the task's own, done if it has none.

    A program that starts runs by itself gives `ranks`: where a config's ranks will be. One that sweeps gives `sweep`, which is
    called for `-m` with the words and --config-dir, and returns the exit code.
    """
    rank = os.environ.get("RANK", "")
    process = Process(int(rank) if rank.isdecimal() else 0)  # enough to know who speaks, until the environment has been judged
    log: Log | None = None
    try:
        adopt_numbers(os.environ)
        kept, flag = strip_local_rank(words)
        process = read_process(os.environ, flag)
        refuse_sweep(kept, os.environ)
        frozen, kept = take_frozen(kept)
        options = _parse(kept)
        if options.multirun:
            if sweep is None:
                raise ConfigError("-m", "a sweep", "one command", "python -m framework.train -m ...")
            return _sweep(kept, options, sweep)
        if _asks_to_show(options):
            return _show(kept, options) if process.first else EXIT_DONE
        config = _compose(options) if frozen is None else frozen
        there = Places(process.ranks, process.ranks_per_host) if ranks is None else ranks(config, process, frozen is not None)
        check(config, there.ranks, there.ranks_per_host)
        _prepare(config, process)
        log = start_log("hydra.verbose=true" in options.overrides)
        return task(Entry(config, process, log, frozen is not None)) or EXIT_DONE
    except FrameworkError as error:
        _speak(error, process, log)
        return error.exit_code
    except Exception as error:
        lost = _lost_peer(error) if isinstance(error, RuntimeError) else None
        if lost is None:
            _leave_word(error, log)
            raise
        logging.getLogger(__name__).exception("lost a rank")
        _speak(lost, process, log)
        return lost.exit_code


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """Hydra's own command line. Raises ConfigError for what this framework does not take over from Hydra."""
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    parser.exit_on_error = False  # it would speak on every rank
    try:
        options, rest = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(error.argument_name or "the command line", error.message, "an option as --hydra-help lists it") from None
    for word in rest:  # argparse leaves words here that stand behind an option
        if word.startswith("-"):
            raise ConfigError(word, "an option that does not exist", "an option as --hydra-help lists it, or key=value")
    options.overrides += rest
    if options.config_name or options.config_path or options.experimental_rerun:
        write = "recipe=NAME, or --config-dir DIR with DIR/recipe/NAME.yaml"
        raise ConfigError("--config-name, --config-path", "another root config", "recipes", write)
    for word in options.overrides:
        sweeps = options.multirun and word.lstrip("+~").startswith(("hydra/sweeper", "hydra.sweeper."))
        if word.lstrip("+~").startswith(("hydra.", "hydra/")) and not word.startswith("hydra.verbose=") and not sweeps:
            raise ConfigError(word.partition("=")[0], "a setting of Hydra that changes nothing here", "hydra.verbose, or a setting of ours")
    return options


def _sweep(words: Sequence[str], options: argparse.Namespace, sweep: Callable[[Sequence[str], Path | None], int]) -> int:
    """Hydra's own faults become letters, as those of a single command do."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        return sweep(_options_first(words, options), _extra(options))
    except (HydraException, OmegaConfBaseException) as error:
        raise letter(error, options.overrides) from None


def _extra(options: argparse.Namespace) -> Path | None:
    extra = Path(options.config_dir) if options.config_dir else None
    if extra is not None and not extra.is_dir():
        raise ConfigError("--config-dir", extra, "a folder with group folders in it, such as recipe/")
    return extra


def _compose(options: argparse.Namespace) -> Config:
    return compose(options.overrides, extra=_extra(options))


def _asks_to_show(options: argparse.Namespace) -> bool:
    return any((options.help, options.hydra_help, options.cfg, options.info, options.shell_completion))


def _show(words: Sequence[str], options: argparse.Namespace) -> int:
    """--help, --cfg and their like, printed by Hydra; what does not compose is refused first."""
    import hydra

    usual = Config()
    if options.cfg or options.info:
        usual = Config(model=_compose(options).model)  # which a config.json may have said
    register(usual)
    sys.argv[1:] = _options_first(words, options)
    hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(lambda _: None)()
    return EXIT_DONE


def _options_first(words: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Hydra's parser takes no option behind an override."""
    return [*(word for word in words if word not in options.overrides), *options.overrides]


def _prepare(config: Config, process: Process) -> None:
    """What must hold before torch is imported: no stale compile lock, and a thread pool of the right size."""
    remove_stale_compile_locks(os.environ)
    os.environ["OMP_NUM_THREADS"] = str(config.launch.threads or default_threads(process.ranks_per_host))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _speak(error: FrameworkError, process: Process, log: Log | None) -> None:
    """Print the letter once over all ranks.

    Before the run folder is claimed, an error meets every rank: the first says it, the others wait for the launcher to end
    them and speak only if it does not. Afterwards it may meet some ranks only: whoever makes logs/letter.txt first prints it.
    """
    if isinstance(error, Stopped) and not process.first:
        return  # all ranks have stopped, and each says so by its exit code
    if log is None or log.path is None:
        if not process.first:
            time.sleep(MANNERS_S)
    elif process.ranks > 1 and not _first_to_say(log.path.with_name("letter.txt"), error.letter()):
        return
    who = "" if process.first else f"rank {process.rank}: "
    sys.stderr.write(f"\n{who}{error.letter()}\n")
    sys.stderr.flush()


def _leave_word(error: Exception, log: Log | None) -> None:
    """A fault of ours has a traceback, for us. Its last line is what this run has ended of; ranks that lose a peer by it come later."""
    if log is not None and log.path is not None:
        logging.getLogger(__name__).error("this rank fails", exc_info=error)
        _first_to_say(log.path.with_name("letter.txt"), f"{type(error).__name__}: {error}")


def _first_to_say(path: Path, letter: str) -> bool:
    try:
        with open(path, "x") as file:
            file.write(letter + "\n")
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _lost_peer(error: RuntimeError) -> RunError | None:
    """The letter for an error of a collective that means that another rank has gone; None if it means something else."""
    text = str(error)
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "Read error", "NCCL", "TCPStore")
    if not any(sign in text for sign in signs):
        return None
    return RunError("a collective", text.splitlines()[0][:160], "every rank alive; logs/rank_*.log say which ended first and why")
