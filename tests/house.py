"""The rules of the house as code: floors, circles, torch-free rooms, budgets and habits. Reads source, imports none of it.

Every rule is a function from the parsed files to findings; test_house.py applies them all.
A file whose head has a line `# house: REASON` is excused from the size budgets, from nothing else.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FLOORS = {
    **dict.fromkeys(("base", "checkpoint"), 1),
    **dict.fromkeys(("config", "topology"), 2),
    **dict.fromkeys(("data", "planner", "launch", "model"), 3),
    **dict.fromkeys(("parallel", "compress", "infer", "engine", "monitor"), 4),
    "trainer": 5,
    "studies": 6,
    "": 7,  # the entry files, beside the rooms
}
ENTRIES = {"train", "plan", "prepare", "generate", "convert", "verify", "report", "evaluate"}
TORCH_FREE = re.compile(r"framework\.((base|config|launch|planner)\..*|topology\.grid)")
HEAVY = {"torch", "deepspeed"}
FILE_LINES, FUNCTION_LINES, PARAMETERS, ENTRY_LINES = 350, 50, 6, 60
FORBIDDEN_NAME = re.compile(r"utils?|helpers?|common|misc|constants|.*_(old|new|copy|v\d+)")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One parsed file of framework/. `module` is its dotted name, without `.__init__`."""

    path: Path
    module: str
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        parts = self.module.split(".")
        is_room = len(parts) > 2 or (len(parts) == 2 and self.path.name == "__init__.py")
        return parts[1] if is_room else ""

    @property
    def is_entry(self) -> bool:
        return self.room == "" and self.path.name != "__init__.py"

    @cached_property
    def excused(self) -> bool:
        head = "\n".join(self.text.splitlines()[:40])
        return re.search(r"^# house: \S", head, re.MULTILINE) is not None

    def functions(self) -> Iterator[Function]:
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))

    def imports(self) -> Iterator[tuple[int, str, list[str]]]:
        """(line, dotted module, names taken from it) for every import at any depth, relative ones resolved."""
        package = self.module.split(".") if self.path.name == "__init__.py" else self.module.split(".")[:-1]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name, []) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                yield node.lineno, ".".join([*above, *filter(None, [node.module])]), [alias.name for alias in node.names]


House = dict[str, Source]
Findings = Iterator[tuple[Source, int, str]]
Rule = Callable[[House], Findings]


def read(root: Path) -> House:
    house = {}
    for path in sorted((root / "framework").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text()
        house[module] = Source(path.relative_to(root), module, text, ast.parse(text))
    return house


def ours(source: Source, house: House) -> Iterator[tuple[int, str]]:
    """(line, module of ours) for every import of `source`; `from a import b` means a.b where that is a file."""
    for line, name, taken in source.imports():
        if name.split(".")[0] == "framework":
            below = [f"{name}.{item}" for item in taken if f"{name}.{item}" in house]
            yield from ((line, module) for module in (below or [name]))


def rooms(house: House) -> Findings:
    for source in house.values():
        if source.room not in FLOORS:
            yield source, 1, f"{source.room}/ is no room of the house"
        if source.is_entry and source.path.stem not in ENTRIES:
            yield source, 1, f"{source.path.name} is no entry file of the house"


def floors(house: House) -> Findings:
    for source in house.values():
        for line, module in ours(source, house):
            second = module.partition(".")[2].split(".")[0]
            there = house[module].room if module in house else second if second in FLOORS else ""
            own_room = there == source.room and there != ""
            if second and not own_room and FLOORS.get(there, 9) >= FLOORS.get(source.room, 0):
                yield source, line, f"imports {module}, which is not on a lower floor"


def circles(house: House) -> Findings:
    graph = {name: {module for _, module in ours(source, house)} & house.keys() - {name} for name, source in house.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        ring = error.args[1]
        yield house[ring[0]], 1, f"circle: {' > '.join(reversed(ring))}"


def torch_free(house: House) -> Findings:
    """Neither directly nor through another module of ours, at any depth."""
    direct = {name: sorted({module.split(".")[0] for _, module, _ in source.imports()} & HEAVY) for name, source in house.items()}
    graph = {name: {module for _, module in ours(source, house)} & house.keys() for name, source in house.items()}
    for name in filter(TORCH_FREE.fullmatch, house):
        seen, todo = {name}, [name]
        while todo:
            here = todo.pop()
            if direct[here]:
                yield house[name], 1, f"reaches {direct[here][0]}" + (f" through {here}" if here != name else "")
                break
            todo.extend(graph[here] - seen)
            seen |= graph[here]


def environment(house: House) -> Findings:
    touches = {"environ", "environb", "getenv", "putenv"}
    for source in house.values():
        if source.is_entry or source.room == "launch" or source.module == "framework.topology.groups":
            continue
        lines = [line for line, module, taken in source.imports() if module == "os" and touches & set(taken)]
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in {f"os.{name}" for name in touches}:
                lines.append(node.lineno)
        yield from ((source, line, "touches os.environ outside launch/, topology/groups.py and the entry files") for line in lines)


def process_state(house: House) -> Findings:
    """`global`, and containers at module level that start empty: something will fill them."""
    for source in house.values():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Global):
                yield source, node.lineno, "global statement"
        for statement in source.tree.body:
            value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
            if value is not None and ast.unparse(value) in {"[]", "{}", "list()", "dict()", "set()"}:
                yield source, statement.lineno, "module-level state: a container that starts empty"


def habits(house: House) -> Findings:
    for source in house.values():
        for node in ast.walk(source.tree):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called == "print" and not source.is_entry:
                yield source, getattr(node, "lineno", 1), "print in library code"
            if called.split(".")[-1] == "new_group" and source.module != "framework.topology.groups":
                yield source, getattr(node, "lineno", 1), "makes a process group outside topology/groups.py"
            if isinstance(node, ast.ExceptHandler):
                wide = node.type is None or ast.unparse(node.type) in {"Exception", "BaseException"}
                if wide and all(isinstance(statement, ast.Pass | ast.Continue) for statement in node.body):
                    yield source, node.lineno, "swallows every exception"


def names(house: House) -> Findings:
    for source in house.values():
        if FORBIDDEN_NAME.fullmatch(source.path.stem):
            yield source, 1, f"{source.path.name} says nothing about what it holds, or is a copy"


def heads(house: House) -> Findings:
    """Every file says first what it is; an __init__.py says nothing else."""
    for source in house.values():
        if ast.get_docstring(source.tree) is None:
            yield source, 1, "no module docstring"
        if source.path.name == "__init__.py" and len(source.tree.body) > 1:
            yield source, source.tree.body[1].lineno, "__init__.py holds more than its docstring"


def budgets(house: House) -> Findings:
    for source in house.values():
        lines = source.text.count("\n")
        if source.is_entry and lines > ENTRY_LINES:
            yield source, 1, f"{lines} lines in an entry file (budget {ENTRY_LINES})"
        if source.excused:
            continue
        if lines > FILE_LINES and source.path.name != "schema.py":
            yield source, 1, f"{lines} lines (budget {FILE_LINES})"
        for function in source.functions():
            length = (function.end_lineno or 0) - function.lineno + 1
            count = len([item for item in parameters(function) if item.arg not in {"self", "cls"}])
            if length > FUNCTION_LINES:
                yield source, function.lineno, f"{function.name} has {length} lines (budget {FUNCTION_LINES})"
            if count > PARAMETERS:
                yield source, function.lineno, f"{function.name} has {count} parameters (budget {PARAMETERS})"


def parameters(function: Function) -> list[ast.arg]:
    given = function.args
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, [given.vararg, given.kwarg])]


def signatures(house: House) -> Findings:
    for source in house.values():
        for function in source.functions():
            for item in parameters(function):
                if item.annotation is None and item.arg not in {"self", "cls"}:
                    yield source, function.lineno, f"{function.name}: parameter {item.arg} has no type"
            words = [word for call in ast.walk(function) if isinstance(call, ast.Call) for word in call.keywords]
            passed = {ast.unparse(word.value) for word in words if word.arg is None}
            if function.args.kwarg is not None and function.args.kwarg.arg in passed:
                yield source, function.lineno, f"{function.name} passes **{function.args.kwarg.arg} through"


def loop_is_a_page(house: House) -> Findings:
    """The loop names no ZeRO, tracker, rank or path."""
    source = house.get("framework.trainer.loop")
    for node in ast.walk(source.tree) if source else ():
        name = next((getattr(node, part) for part in ("id", "attr", "arg") if isinstance(getattr(node, part, None), str)), "")
        if source and re.search(r"zero(?!_grad)|wandb|rank|path", name, re.IGNORECASE):
            yield source, getattr(node, "lineno", 1), f"the loop names {name}"


RULES: tuple[Rule, ...] = (
    rooms, floors, circles, torch_free, environment, process_state, habits, names, heads, budgets, signatures, loop_is_a_page,
)  # fmt: skip


def letters(house: House, rule: Rule) -> list[str]:
    """What `rule` finds, one line each: path, line, fault."""
    return [f"{source.path}:{line}: {text}" for source, line, text in rule(house)]
