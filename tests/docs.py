"""conf/README.md, made from the schema, the rules and the comments in conf/: `make docs`. tests/config/test_docs.py keeps it fresh."""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from framework.base.errors import ConfigError
from framework.config.check import RANGES, RULES, check
from framework.config.compose import CONF, build, compose, settings, to_dict, type_name
from framework.config.schema import Config

PAGE = CONF / "README.md"
HEAD = """
# The settings

Made by `make docs` from `framework/config/schema.py`, `framework/config/rules_*.py` and the comments in this folder: edit those.

A command line names a recipe, then choices of groups, then single settings; later words win:

    deepspeed --num_gpus 2 --module framework.train recipe=tiny zero=stage2 optimizer.lr=1e-3

A key that does not exist, a value of another type, and settings that do not go together are refused before anything starts,
with a letter that says what to write instead. `--cfg job` shows what a command line stands for, `--help` the same as a menu.

Two words sound alike and are two things: **`recompute`** is about activations, which are computed again in the backward pass
instead of kept; **`checkpoint`** is about state, which is kept on disk so that a run can go on. Other projects call either one
"checkpointing".
"""
TAGS = """
## Tags

Every setting has one. It says what a change means to a run that is gone on with.

| tag | what it decides | a change at resume |
|---|---|---|
| meaning | what is learned | listed and refused, unless `resume_changes=allow` |
| layout | where it is computed | allowed and noted |
| free | what is shown or kept, and when to stop | nobody's business |
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD.strip(), "\n".join(_groups()), TAGS.strip(), "\n".join(_blocks()), "\n".join(_ranges()), "\n".join(_rules())]
    return "\n\n".join([*parts, "\n".join(_combinations())]) + "\n"


def _groups() -> Iterator[str]:
    yield "## Groups\n\nWrite `group=choice`. A choice is a YAML file with some settings of its block, no more."
    default = _default_choices()
    for folder in sorted(path for path in CONF.iterdir() if path.is_dir()):
        yield f"\n### {folder.name}\n\n| choice | |\n|---|---|"
        for file in sorted(folder.glob("*.yaml")):
            mark = "**default.** " if default.get(folder.name) == file.stem else ""
            yield f"| `{file.stem}` | {mark}{comment(file)} |"


def comment(file: Path) -> str:
    """What a choice says of itself: its first comment line, a recipe's goal."""
    lines = [line.removeprefix("#").strip() for line in file.read_text().splitlines() if line.startswith("#")]
    said = next(line for line in lines if not line.startswith("@package"))
    return said.removeprefix("Goal").strip().replace("|", "\\|")


def _default_choices() -> dict[str, str]:
    """Group -> choice in the defaults list of conf/config.yaml."""
    lines = (CONF / "config.yaml").read_text().splitlines()
    pairs = (line.strip().removeprefix("- ").split(": ") for line in lines if line.startswith("  - ") and ": " in line)
    return {pair[0]: pair[1] for pair in pairs if not pair[0].startswith("override")}


def _blocks() -> Iterator[str]:
    yield "## Settings\n\nThe default is that of the schema; the default choice of a group may say otherwise (see `--cfg job`)."
    root = [entry for entry in settings(Config) if not dataclasses.is_dataclass(entry[1])]
    yield "\n### at the root\n"
    yield from _table("", root)
    for name, kind, _ in settings(Config):
        if dataclasses.is_dataclass(kind):
            yield f"\n### {name}\n\n{_sentence(kind)}\n"
            yield from _table(f"{name}.", list(settings(kind)))  # type: ignore[arg-type]


def _sentence(kind: Any) -> str:
    return " ".join(textwrap.dedent(str(kind.__doc__)).split())


def _table(prefix: str, entries: list[tuple[str, Any, dataclasses.Field[Any]]]) -> Iterator[str]:
    yield "| key | type | default | tag | meaning |\n|---|---|---|---|---|"
    for name, kind, spec in entries:
        cells = [f"`{prefix}{name}`", type_name(kind), f"`{_written(spec.default)}`", spec.metadata["tag"], spec.metadata["doc"]]
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _written(value: Any) -> str:
    """A value as it stands in YAML."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _ranges() -> Iterator[str]:
    yield "## Ranges\n\nBoth ends are allowed.\n\n| key | least | greatest |\n|---|---|---|"
    for key, (least, greatest) in RANGES.items():
        yield f"| `{key}` | {'' if least is None else least} | {'' if greatest is None else greatest} |"


def _rules() -> Iterator[str]:
    yield "## Rules\n\nA letter names the rule that it is about in brackets.\n\n| rule | law |\n|---|---|"
    for rule in RULES:
        yield f"| `{rule.__name__}` | {str(rule.__doc__).replace('|', ' or ')} |"


def _combinations() -> Iterator[str]:
    yield "## Precision, ZeRO and offload\n\nWhat `check` allows on two data ranks; the other cells name the rule that refuses."
    zeros = sorted(file.stem for file in (CONF / "zero").glob("*.yaml"))
    precisions = sorted(file.stem for file in (CONF / "precision").glob("*.yaml"))
    yield f"\n| | {' | '.join(f'`{zero}`' for zero in zeros)} |\n|---|{'---|' * len(zeros)}"
    verdicts = combinations(precisions, zeros)
    for precision in precisions:
        yield f"| `{precision}` | {' | '.join(verdicts[precision, zero] for zero in zeros)} |"


def combinations(precisions: list[str], zeros: list[str]) -> dict[tuple[str, str], str]:
    """For each pair "yes", or the rule that refuses it on two data ranks."""
    parts = {("precision", name): to_dict(compose([f"precision={name}"]))["precision"] for name in precisions}
    parts |= {("zero", name): to_dict(compose([f"zero={name}"]))["zero"] for name in zeros}
    verdicts = {}
    for precision, zero in itertools.product(precisions, zeros):
        config = build(Config, {"precision": parts["precision", precision], "zero": parts["zero", zero]})
        if config.zero.offload == "nvme":  # what else it needs is said by its own rules
            nvme = replace(config.zero, nvme_path="FOLDER")
            config = replace(config, zero=nvme, checkpoint=replace(config.checkpoint, mode="none"))
        try:
            check(config, 2, 2)
            verdicts[precision, zero] = "yes"
        except ConfigError as refusal:
            verdicts[precision, zero] = refusal.subject.partition("[")[2].rstrip("]")
    return verdicts


if __name__ == "__main__":
    PAGE.write_text(page())
