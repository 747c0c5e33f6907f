"""command.py: what a start consists of; words as Hydra reads them back."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from framework.base.errors import ConfigError
from framework.config.compose import compose
from framework.config.schema import Config
from framework.launch.command import (
    BY_PATH,
    LAUNCHER_SETS,
    RANKS_FROM,
    chosen_hosts,
    meeting,
    places,
    ranks_to_start,
    read_hosts,
    run_command,
    run_environment,
    word,
)
from framework.launch.environment import NUMBERED_BY, Process, adopt_numbers, read_process
from framework.launch.start import ranks_of, refuse_inside, starts_ranks
from framework.studies.supervise import start_command, start_environment


def test_one_rank_needs_no_launcher() -> None:
    assert run_command(["recipe=tiny"], 1, 29500) == [sys.executable, "-m", "framework.train", "recipe=tiny"]


def test_several_ranks_are_started_by_deepspeed() -> None:
    command = run_command(["recipe=tiny", "steps=3"], 4, 29501, "some.module")
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", "29501"]
    assert command == [*launcher, "--num_gpus", "4", "--module", "some.module", "recipe=tiny", "steps=3"]


def test_the_environment_makes_nobody_a_rank() -> None:
    given = {**dict.fromkeys(LAUNCHER_SETS, "1"), "PATH": "/bin", "WANDB_MODE": "offline"}
    assert run_environment(given) == {"PATH": "/bin", "WANDB_MODE": "offline"}


@pytest.mark.parametrize(
    ("words", "ranks"),
    [([], 2), (["launch.num_procs=1"], 1), (["parallel=tensor2_pipeline2"], 4), (["parallel=tensor2", "launch.num_procs=4"], 4)],
)
def test_ranks(words: list[str], ranks: int) -> None:
    assert ranks_to_start(compose(words)) == ranks


@pytest.mark.parametrize(
    "text", ["plain", "", "/a folder/with, commas=and [brackets]", "it's", "back\\slash", "ends in \\", "\\'", "null", "12"]
)
def test_text_comes_back_as_it_was(text: str) -> None:
    assert compose([word("output_root", text)]).output_root == text


def test_other_values_come_back_as_they_were() -> None:
    words = [word("optimizer.lr", 1e-05), word("data.shuffle", False), word("data.workers", None), word("steps", 7)]
    config = compose([*words, word("data.files", ["a b", "c"])])
    assert (config.optimizer.lr, config.data.shuffle, config.data.workers, config.steps) == (1e-05, False, None, 7)
    assert config.data.files == ("a b", "c")


HOSTS = {"alpha": 4, "beta": 2}


def test_hosts_are_read_in_their_order() -> None:
    assert list(read_hosts("# a farm\nalpha slots=4\n\nbeta slots = 2 # the old one\n").items()) == list(HOSTS.items())


@pytest.mark.parametrize("line", ["alpha", "alpha slots=two", "alpha slots=1\nalpha slots=1", "alpha slots=1 more"])
def test_a_line_that_is_none_is_named(line: str) -> None:
    with pytest.raises(ValueError, match="alpha"):
        read_hosts(line)


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "", HOSTS), ("beta", "", {"beta": 2}), ("alpha:0,3@beta:1", "", {"alpha": 2, "beta": 1}),
        ("", "alpha", {"beta": 2}), ("", "alpha:0@beta:0", {"alpha": 3, "beta": 1}), ("", "alpha@beta", {}),
    ],
)  # fmt: skip
def test_what_is_left_of_the_hosts_is_what_deepspeed_leaves(include: str, exclude: str, left: dict[str, int]) -> None:
    from deepspeed.launcher.runner import parse_inclusion_exclusion

    assert chosen_hosts(HOSTS, include, exclude) == left
    if left:
        assert {name: len(slots) for name, slots in parse_inclusion_exclusion(HOSTS, include, exclude).items()} == left


@pytest.mark.parametrize("part", ["gamma", "alpha:4", "alpha:x"])
def test_a_wrong_part_of_a_filter_is_named(part: str) -> None:
    with pytest.raises(ValueError, match=part):
        chosen_hosts(HOSTS, f"beta@{part}", "")


def parsed(command: list[str]) -> Namespace:
    """The command as DeepSpeed's launcher reads it."""
    from deepspeed.launcher.runner import parse_args

    assert command[:3] == [sys.executable, "-m", "deepspeed.launcher.runner"]
    return parse_args(command[3:])


def config(words: list[str], tmp_path: Path) -> Config:
    (tmp_path / "hosts").write_text("".join(f"{name} slots={ranks}\n" for name, ranks in HOSTS.items()))
    return compose([f"launch.hostfile={tmp_path}/hosts", *words])


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["launch.include='alpha:0,1'"], {"include": "alpha:0,1", "launcher": "pdsh", "force_multi": True}),
        (["launch.exclude=beta", "launch.master_port=1234"], {"exclude": "beta", "master_port": 1234}),
        (["launch.launcher=no_ssh", "launch.node_rank=1", "launch.master_addr=h"], {"no_ssh": True, "node_rank": 1, "master_addr": "h"}),
        (["launch.launcher=openmpi"], {"launcher": "openmpi"}),
        (["launch.launcher=mpich", "launch.master_addr=h"], {"launcher": "mpich", "master_addr": "h"}),
    ],
)  # fmt: skip
def test_every_setting_reaches_deepspeeds_launcher(words: list[str], wanted: dict[str, object], tmp_path: Path) -> None:
    made = config(words, tmp_path)
    there = places(made.launch, 1)
    read = parsed(start_command(made, ["recipe=tiny"], there, 1))
    assert {name: getattr(read, name) for name in wanted} == wanted
    assert (read.hostfile, read.module) == (made.launch.hostfile, True)
    assert (read.user_script, read.user_args) == ("framework.train", ["recipe=tiny"])


@pytest.mark.parametrize("launcher", ["openmpi", "mpich", "slurm"])
def test_ranks_of_mpirun_and_srun_learn_who_they_are(launcher: str, tmp_path: Path) -> None:
    """DeepSpeed's own runner makes the command; the variables in it, and those of the launcher, make a rank."""
    from deepspeed.launcher import multinode_runner as runners

    made = config([f"launch.launcher={launcher}", *(["launch.include=alpha"] if launcher == "slurm" else [])], tmp_path)
    there = places(made.launch, 1)
    command = start_command(made, ["steps=2"], there, 1)
    args = parsed(command)
    kind = {"openmpi": runners.OpenMPIRunner, "mpich": runners.MPICHRunner, "slurm": runners.SlurmRunner}[launcher]
    pool = {"alpha": 2, "beta": 2} if launcher == "mpich" else dict(there.hosts)
    args.master_addr, args.master_port = args.master_addr or "alpha", args.master_port
    runner = kind(args, "", pool)
    words = runner.get_cmd({}, {name: list(range(ranks)) for name, ranks in pool.items()})
    told = start_environment(made, there)
    assert told[RANKS_FROM] == launcher
    assert (told["MASTER_ADDR"], told["MASTER_PORT"]) == ("alpha", "29500")
    if launcher == "slurm":
        assert words[-3:] == [str(BY_PATH), "framework.train", "steps=2"]  # DeepSpeed forgets --module here
        assert "--ntasks-per-node=4" in words
    else:
        text = " ".join(words)
        for name, value in meeting(made.launch, there.hosts).items():
            assert f"{name}={value}" in text or f"{name} {value}" in text
    environment = {RANKS_FROM: launcher, **dict(zip(NUMBERED_BY[launcher], ("5", "6", "1", "2"), strict=True))}
    adopt_numbers(environment)
    assert read_process(environment, None) == Process(5, 1, 6, 2)


def test_numbers_of_a_scheduler_alone_make_nobody_a_rank() -> None:
    """The shell of a batch job has them too."""
    environment = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
    adopt_numbers(environment)
    assert "RANK" not in environment


def test_a_file_that_runs_modules(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text("import sys; print(__name__, sys.argv[1:], any('launch' in path for path in sys.path[:1]))")
    words = [sys.executable, str(BY_PATH), "shown", "a=1"]
    done = subprocess.run(words, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert done.stdout == "__main__ ['a=1'] False\n"


@pytest.mark.parametrize(
    ("words", "ranks", "asks"),
    [
        ([], 1, False), (["launch.num_procs=1"], 1, False), (["launch.num_procs=3"], 3, True), (["launch.supervise=true"], 1, True),
        (["launch.supervise=true", "parallel=tensor2"], 2, True), (["launch.dry_run=true"], 1, True), (["launch.print=k8s"], 1, True),
    ],
)  # fmt: skip
def test_who_starts_ranks(words: list[str], ranks: int, asks: bool) -> None:
    made = compose(words)
    assert starts_ranks(made.launch, Process(), frozen=False) == asks
    assert not starts_ranks(made.launch, Process(launched=True), frozen=False)
    assert not starts_ranks(made.launch, Process(), frozen=True)
    assert ranks_of(made, Process(), frozen=False).ranks == ranks


@pytest.mark.parametrize("word", ["supervise=true", "dry_run=true", "print=sbatch", "hostfile=h", "num_procs=3"])
def test_a_rank_refuses_to_start_ranks(word: str) -> None:
    with pytest.raises(ConfigError, match=f"launch.{word.partition('=')[0]}"):
        refuse_inside(compose([f"launch.{word}"]), Process(1, 1, 2, 2, launched=True))
