"""P12 (deepspeedai/DeepSpeed#1809): no setting is ignored. A key that does not exist is refused; one that exists reaches the run.

The first half misspells every key of every shipped recipe in its YAML. The second gives every leaf of the schema another
value and finds it again in a live run: tests/cases/settings.py says how for each, and a leaf that is missing there fails here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import torch.distributed as dist
from omegaconf import OmegaConf

from framework.base.errors import ConfigError
from framework.config.check import value_at
from framework.config.compose import ROOT, compose, leaves
from framework.data.tokens import write_tokens
from framework.launch.environment import Process
from tests.cases.settings import STAGE_0, STARTS, TABLE, live
from tests.marks import slow
from tests.ranks import launch, run_ranks
from tests.starts import assert_one_letter, start

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
Path_ = tuple[str, ...]


def recipe(name: str) -> Any:
    return OmegaConf.to_container(OmegaConf.load(ROOT / "recipes" / f"{name}.yaml"))


def keys(tree: Any, above: Path_ = ()) -> Iterator[Path_]:
    """The path of every key of a recipe but the defaults list, blocks and leaves alike."""
    for key, value in tree.items():
        if (*above, key) != ("defaults",):
            yield (*above, key)
            if isinstance(value, dict):
                yield from keys(value, (*above, key))


def with_a_letter_less(word: str) -> str:
    return word[: len(word) // 2] + word[len(word) // 2 + 1 :]


def write_damaged(name: str, path: Path_, folder: Path) -> str:
    """The recipe with one key misspelt, in a folder for --config-dir; the dotted key as it stands there now."""
    tree = recipe(name)
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    wrong = with_a_letter_less(path[-1])
    inner[wrong] = inner.pop(path[-1])
    (folder / "recipe").mkdir(exist_ok=True)
    (folder / "recipe" / "damaged.yaml").write_text("# @package _global_\n" + OmegaConf.to_yaml(OmegaConf.create(tree)))
    return ".".join((*path[:-1], wrong))


@pytest.mark.parametrize("name", [n if n == "tiny" else pytest.param(n, marks=pytest.mark.slow) for n in RECIPES])
def test_every_misspelt_key_of_a_recipe_is_refused(name: str, tmp_path: Path) -> None:
    paths = list(keys(recipe(name)))
    assert len(paths) > 5
    for path in paths:
        wrong = write_damaged(name, path, tmp_path)
        with pytest.raises(ConfigError) as caught:
            compose(["recipe=damaged"], extra=tmp_path)
        assert caught.value.subject == wrong
        assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", RECIPES)
def test_a_misspelt_group_or_choice_of_a_recipe_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    for index, entry in enumerate(recipe(name)["defaults"]):
        [(group, choice)] = entry.items()
        misspelt = f"override /{with_a_letter_less(group.removeprefix('override /'))}"
        for damaged, named in (({misspelt: choice}, misspelt), ({group: f"{choice}x"}, f"{choice}x")):
            tree = recipe(name)
            tree["defaults"][index] = damaged
            text = "# @package _global_\n" + OmegaConf.to_yaml(OmegaConf.create(tree))
            (tmp_path / "recipe" / "damaged.yaml").write_text(text)
            with pytest.raises(ConfigError) as caught:
                compose(["recipe=damaged"], extra=tmp_path)
            assert named.removeprefix("override /") in caught.value.letter()


@pytest.mark.parametrize("path", [("steps",), ("optimizer", "lr"), ("batch", "micro_size")], ids=".".join)
def test_the_command_refuses_them_with_code_2(path: Path_, tmp_path: Path) -> None:
    wrong = write_damaged("tiny", path, tmp_path)
    started = start(["--config-dir", str(tmp_path), "recipe=damaged"])
    assert (started.code, started.given) == (2, None)
    assert_one_letter(started.text, wrong)


@pytest.mark.slow
def test_so_does_the_deepspeed_launcher(tmp_path: Path) -> None:
    wrong = write_damaged("tiny", ("data", "seq_length"), tmp_path)
    words = ["framework.train", "--config-dir", str(tmp_path), "recipe=damaged", f"output_root={tmp_path}/runs"]
    completed = launch(words, ranks=2, cwd=tmp_path, timeout=120)
    assert completed.code == 2
    assert_one_letter(completed.stdout + completed.stderr, wrong)
    assert not (tmp_path / "runs").exists()


# ---------------------------------------------------------------- values

LEAVES = {key: (kind, spec) for key, kind, spec in leaves()}
ONE_CHOICE = {key for key, (kind, _) in LEAVES.items() if get_origin(kind) is Literal and len(get_args(kind)) == 1}
ON_TWO_RANKS: dict[str, dict[str, tuple[Any, Callable[[Any], Any]]]] = {
    "tensor": {
        "parallel.tensor": (2, lambda model: dist.get_world_size(model.layers[0].mlp.down_proj.split.group)),
        "parallel.sequence": (True, lambda model: model.layers[0].mlp.down_proj.split.sequence),
    },
    "pipeline": {
        "parallel.pipeline": (2, lambda module: module.num_stages),
        # By parameters the positions alone would outweigh three blocks.
        "parallel.partition": ("uniform", lambda module: {((0, 2), (2, 4)): "uniform"}.get(module.forward_funcs[0].cut.bounds)),
    },
    "context": {
        "parallel.context": (2, lambda model: dist.get_world_size(model.layers[0].attention.core.group)),
    },
}
"""Settings that one process cannot have, by axis: the value, and how it is found in the live model of four blocks and learned positions."""
OTHER_PROGRAMS = {"verify.steps": "verify", "verify.matrix": "verify", "launch.num_procs": "launch"}
OTHER_PROGRAMS |= dict.fromkeys(("launch.parallel_jobs", "launch.job_limit", "launch.fail_fast", "launch.objective"), "a sweep")
OTHER_PROGRAMS |= dict.fromkeys((f"launch.{name}" for name in ("hostfile", "include", "exclude", "launcher", "node_rank")), "launch")
OTHER_PROGRAMS |= dict.fromkeys(("launch.master_addr", "launch.master_port", "launch.dry_run", "launch.print"), "launch")
OTHER_PROGRAMS |= dict.fromkeys((f"launch.{name}" for name in ("supervise", "restarts", "hang_factor", "hang_least", "elastic")), "launch")
OTHER_PROGRAMS |= {key: "plan" for key in LEAVES if key.startswith("plan.")}
OTHER_PROGRAMS |= {key: "prepare" for key in LEAVES if key.startswith("prepare.") or key == "data.tokenizer"}
OTHER_PROGRAMS |= {key: "evaluate" for key in LEAVES if key.startswith("evaluate.")}
OTHER_PROGRAMS |= {"against": "report", "report.out": "report"}
OTHER_PROGRAMS |= {"run": "convert", "convert.to": "convert", "convert.out": "convert", "convert.dtype": "convert"}
"""Settings that their own meaning gives to another program, with its name; tested where it is."""


ELSEWHERE = {"zero.nvme_path", "model.init_from"}
"""Settings of what not every machine can compile, and of a folder that is made first: found again by tests/trainer/test_swapping.py and
tests/model/test_pretrained.py."""
ELSEWHERE |= {"alerts.straggler", "alerts.communication", "alerts.drift_every", "alerts.rollbacks", "profile.rank"}
"""Settings of two ranks or of a fault: tests/trainer/test_alerting.py and test_profiling.py."""
ELSEWHERE |= {"alerts.utilisation_low", "alerts.utilisation_high"}
"""Of accelerators: tests/monitor/test_alerts.py."""


def test_every_leaf_of_the_schema_is_in_the_table() -> None:
    assert set(LEAVES) == set(TABLE) | ONE_CHOICE | ELSEWHERE | set(OTHER_PROGRAMS) | set().union(*ON_TWO_RANKS.values())
    for key, program in OTHER_PROGRAMS.items():
        assert key.startswith(f"{program}.") or program in LEAVES[key][1].metadata["doc"]


def test_no_value_in_the_table_is_what_the_run_would_have_anyway() -> None:
    for name, spec in STARTS.items():
        without = compose([*STAGE_0, *spec.words])
        for key, leaf in TABLE.items():
            if leaf.start == name:
                assert leaf.value not in (LEAVES[key][1].default, value_at(without, key)), key


def live_model(rank: int, ranks: int, words: list[str], axis: str, cwd: str) -> dict[str, Any]:
    os.chdir(cwd)
    from framework.base.log import Log
    from framework.trainer.build import build

    run = build(compose(words), Process(rank, rank, ranks, ranks), Log())
    run.feed.close()
    return {key: read(run.engine.engine.module) for key, (_, read) in ON_TWO_RANKS[axis].items()}  # type: ignore[union-attr]


@pytest.mark.parametrize("axis", ON_TWO_RANKS)
def test_values_that_need_two_ranks_reach_them(axis: str, tmp_path: Path) -> None:
    wanted = {key: value for key, (value, _) in ON_TWO_RANKS[axis].items()}
    words = [*STAGE_0, *(f"{key}={value}" for key, value in wanted.items()), "model.num_layers=4", "model.position=learned"]
    for found in run_ranks(live_model, 2, words, axis, str(tmp_path)):
        assert found == wanted


DEAR = ("choosy", "probed", "kept", "auto", "tracked", "memory", "recomputed", "anew")


@pytest.mark.parametrize("name", [slow(name) if name in DEAR else name for name in STARTS])
def test_every_value_reaches_the_live_run(name: str, tmp_path: Path) -> None:
    for file in ("one", "two"):
        write_tokens(tmp_path / file, [np.arange(500) % 250], np.dtype("<u2"))
    expected = {key: leaf.value for key, leaf in TABLE.items() if leaf.start == name}
    assert expected, f"no setting uses the start {name}"
    [found] = run_ranks(live, 1, name, str(tmp_path), env={"WANDB_MODE": "offline", "WANDB_SILENT": "true"}, timeout=240)
    assert found == {key: _placed(value, tmp_path) for key, value in expected.items()}


def _placed(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_placed(item, folder) for item in value]
    if isinstance(value, float):
        return pytest.approx(value)
    return value.replace("TMP", str(folder)) if isinstance(value, str) else value
