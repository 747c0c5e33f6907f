"""docker/Dockerfile by reading: what it copies is there, and it installs what the Makefile installs, and nothing beside it."""

from __future__ import annotations

import re

from tests.ranks import ROOT

LINES = [line for line in (ROOT / "docker/Dockerfile").read_text().splitlines() if line and not line.startswith("#")]


def targets() -> dict[str, list[str]]:
    """Name of a target -> its lines."""
    found: dict[str, list[str]] = {}
    for line in LINES:
        if match := re.fullmatch(r"FROM \S+ AS (\w+)", line):
            found[match[1]] = []
        else:
            found[list(found)[-1]].append(line)
    return found


def test_there_is_one_for_each_kind_of_machine() -> None:
    assert list(targets()) == ["cpu", "cuda"]


def test_what_is_copied_is_there() -> None:
    for lines in targets().values():
        copied = [path for line in lines if line.startswith("COPY ") for path in line.split()[1:-1]]
        assert {"framework", "conf", "recipes", "Makefile", "constraints.txt", "setup.cfg", "pyproject.toml"} <= {*copied}
        assert [path for path in copied if not (ROOT / path).exists()] == []


def test_it_installs_by_the_makefile() -> None:
    """So the versions are those of constraints.txt; no package has a version of its own here."""
    for lines in targets().values():
        assert [line for line in lines if "pip" in line.split()] == []
        assert lines.count("RUN make .venv/installed") == 1
        installed = lines.index("RUN make .venv/installed")
        needed = {path for line in lines[:installed] if line.startswith("COPY ") for path in line.split()[1:-1]}
        rule = re.search(r"^\.venv/installed:(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert rule is not None
        assert {*rule[1].split(), "Makefile", "pyproject.toml"} <= needed


def test_conf_is_copied_with_what_its_link_points_to() -> None:
    assert (ROOT / "conf/recipe").resolve() == ROOT / "recipes"


def test_the_targets_differ_in_their_base_alone() -> None:
    cpu, cuda = targets().values()
    plain = [re.sub(r" python3( python3-\w+)*", "", line) for line in cuda]
    assert plain == cpu


def test_the_readme_names_both_and_the_shared_memory() -> None:
    text = (ROOT / "docker/README.md").read_text()
    assert all(f"framework:{name}" in text for name in targets())
    assert "--shm-size" in text
    assert "hostfile" in text
