"""What launch.print makes: a script that bash can read, and objects that name one another."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from framework.config.compose import compose
from framework.launch.command import places, read_hosts
from framework.launch.submit import submission

WORDS = ["recipe=tiny", "limits.wall_time=3600"]


def printed(kind: str, words: list[str]) -> str:
    config = compose([*WORDS, f"launch.print={kind}", *words])
    return submission(config, [*WORDS, *words], places(config.launch, 1))


def two_hosts(tmp_path: Path) -> list[str]:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    return [f"launch.hostfile={tmp_path}/hosts"]


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_batch_script(hosts: int, tmp_path: Path) -> None:
    text = printed("sbatch", two_hosts(tmp_path) if hosts == 2 else ["launch.num_procs=2"])
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    options = dict(line.removeprefix("#SBATCH --").split("  #")[0].partition("=")[::2] for line in text.splitlines() if "#SBATCH" in line)
    assert (options["nodes"], options["ntasks-per-node"], options["time"], options["signal"]) == (str(hosts), "2", "62", "USR1@120")
    [run] = [shlex.split(line) for line in text.splitlines() if line.startswith("srun")]
    assert run[run.index("-m") + 1] == "framework.train"
    assert "launch.hostfile" not in text  # Slurm knows the hosts


def objects(text: str) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def test_a_job_of_two_pods(tmp_path: Path) -> None:
    found = objects(printed("k8s", two_hosts(tmp_path)))
    job, spec = found["Job"]["spec"], found["Job"]["spec"]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [75]
    assert spec["restartPolicy"] == "Never"  # podFailurePolicy needs it
    assert read_hosts(found["ConfigMap"]["data"]["hosts"]) == {"tiny-0.tiny": 2, "tiny-1.tiny": 2}
    assert found["Service"]["spec"]["selector"].items() <= job["template"]["metadata"]["labels"].items()
    assert spec["subdomain"] == found["Service"]["metadata"]["name"]
    [container] = spec["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    words = [word for word in container["command"][3:] if not word.startswith("launch.hostfile")]
    assert compose([word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in words]).launch.node_rank == 1


def test_a_job_of_one_pod() -> None:
    [container] = objects(printed("k8s", ["launch.num_procs=4"]))["Job"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "framework.train", *WORDS, "launch.num_procs=4"]
