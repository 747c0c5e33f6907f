"""The house rules (house.py) held against framework/; then each fault planted in a small tree, and found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import house
from tests.house import Rule

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("rule", house.RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps(rule: Rule) -> None:
    sources = house.read(ROOT)
    assert "framework.config.schema" in sources, "the source was not found"
    found = house.letters(sources, rule)
    assert not found, "\n".join(found)


def test_test_files_mirror_the_rooms_under_unique_names() -> None:
    files = list((ROOT / "tests").rglob("test_*.py"))
    stems = sorted(path.stem for path in files)
    assert [stem for stem in set(stems) if stems.count(stem) > 1] == []
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in files if path.parent != ROOT / "tests"}
    assert folders <= {*house.FLOORS, "cases"}


# ---------------------------------------------------------------- and a bad one

SEVEN = "a: int, b: int, c: int, d: int, e: int, g: int, h: int"
LONG = "\n".join(f"    x{i} = {i}" for i in range(house.FUNCTION_LINES))
FAULTS: tuple[tuple[Rule, str, str, str], ...] = (
    (house.rooms, "cellar/wine.py", "", "cellar/ is no room"),
    (house.rooms, "tune.py", "", "tune.py is no entry file"),
    (house.floors, "config/a.py", "from framework.trainer.loop import run", "imports framework.trainer.loop"),
    (house.floors, "model/a.py", "def f() -> None:\n    import framework.engine.engine", "imports framework.engine.engine"),
    (house.floors, "engine/a.py", "from ..monitor import meters", "imports framework.monitor"),  # the same floor is not a lower one
    (house.floors, "engine/a.py", "from framework import trainer", "imports framework.trainer"),
    (house.floors, "studies/a.py", "from framework import train", "imports framework.train"),
    (house.floors, "plan.py", "import framework.train", "imports framework.train"),
    (house.circles, "model/norm.py", "from framework.model import mlp", "circle: framework.model."),
    (house.torch_free, "planner/a.py", "def f() -> None:\n    import torch.nn", "reaches torch"),
    (house.torch_free, "topology/grid.py", "from deepspeed import comm", "reaches deepspeed"),
    (house.torch_free, "launch/a.py", "from framework.topology import groups", "reaches torch through framework.topology.groups"),
    (house.environment, "data/a.py", "import os\nx = os.environ['A']", "touches os.environ"),
    (house.environment, "data/a.py", "from os import getenv", "touches os.environ"),
    (house.process_state, "data/a.py", "def f() -> None:\n    global x\n    x = 1", "global statement"),
    (house.process_state, "data/a.py", "seen: dict[str, int] = {}", "starts empty"),
    (house.process_state, "data/a.py", "seen = set()", "starts empty"),
    (house.habits, "data/a.py", "print(1)", "print in library code"),
    (house.habits, "engine/a.py", "import torch.distributed as dist\ndist.new_group([0])", "makes a process group"),
    (house.habits, "data/a.py", "try:\n    x = 1\nexcept Exception:\n    pass", "swallows"),
    (house.habits, "data/a.py", "try:\n    x = 1\nexcept:\n    pass", "swallows"),
    (house.names, "data/utils.py", "", "utils.py says nothing"),
    (house.names, "data/stream_v2.py", "", "is a copy"),
    (house.heads, "data/a.py", "NO DOCSTRING", "no module docstring"),
    (house.heads, "data/__init__.py", "import json", "holds more than its docstring"),
    (house.budgets, "data/a.py", "#\n" * house.FILE_LINES, f"{house.FILE_LINES + 2} lines (budget"),
    (house.budgets, "train.py", "#\n" * house.ENTRY_LINES, "in an entry file"),
    (house.budgets, "data/a.py", f"def f() -> None:\n{LONG}", f"f has {house.FUNCTION_LINES + 1} lines"),
    (house.budgets, "data/a.py", f"class A:\n    def f(self, {SEVEN}) -> None: ...", "f has 7 parameters"),
    (house.budgets, "data/a.py", f"# house: \ndef f({SEVEN}) -> None: ...", "f has 7"),  # no reason given
    (house.signatures, "data/a.py", "class A:\n    def f(self, a, b: int) -> None: ...", "f: parameter a has no type"),
    (house.signatures, "data/a.py", "def f(*rest) -> None: ...", "f: parameter rest has no type"),
    (house.signatures, "data/a.py", "def f(**more: int) -> None:\n    g(**more)", "f passes **more through"),
    (house.loop_is_a_page, "trainer/loop.py", "def run(rank: int) -> None: ...", "the loop names rank"),
    (house.loop_is_a_page, "trainer/loop.py", "def run(engine: object) -> None:\n    engine.zero_stage", "the loop names zero_stage"),
)  # fmt: skip


def plant(root: Path, name: str, body: str) -> None:
    path = root / "framework" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x = 1\n" if body == "NO DOCSTRING" else f'"""A file."""\n{body}\n')


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small house in good order."""
    for room in [*filter(None, house.FLOORS), "."]:
        plant(tmp_path, f"{room}/__init__.py", "")
    plant(tmp_path, "train.py", "import os\n\nfrom framework.trainer import loop\n\nprint(os.environ, loop)")
    plant(tmp_path, "trainer/loop.py", "from framework.engine.engine import step\n\n\ndef run(engine: object) -> None:\n    step(engine)")
    plant(tmp_path, "engine/engine.py", "from ..model.mlp import Mlp\n\n\ndef step(engine: object) -> None:\n    engine.zero_grad()")
    plant(tmp_path, "monitor/meters.py", "")
    plant(tmp_path, "model/mlp.py", "import torch\n\nfrom framework.model.norm import Norm\n\nMlp = (torch, Norm)")
    plant(tmp_path, "model/norm.py", "Norm = 1")
    plant(tmp_path, "topology/groups.py", "import os\n\nimport torch\n\n\ngroup = torch.distributed.new_group([len(os.environ)])")
    long = "# house: a table that reads best in one piece\n" + "#\n" * house.FILE_LINES
    plant(tmp_path, "config/table.py", f"{long}\ndef f({SEVEN}) -> None: ...")
    return tmp_path


@pytest.mark.parametrize("rule", house.RULES, ids=lambda rule: rule.__name__)
def test_a_house_in_order_has_no_finding(rule: Rule, tree: Path) -> None:
    assert house.letters(house.read(tree), rule) == []


@pytest.mark.parametrize(("rule", "name", "body", "expected"), FAULTS, ids=[f"{rule.__name__}-{name}" for rule, name, _, _ in FAULTS])
def test_a_planted_fault_is_found(rule: Rule, name: str, body: str, expected: str, tree: Path) -> None:
    plant(tree, name, body)
    found = house.letters(house.read(tree), rule)
    assert [letter for letter in found if expected in letter], found
