"""A model of transformers trained further on one rank and on two, and exported again from whatever layout its checkpoint has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from framework.checkpoint.shards import Logical
from framework.convert import convert
from tests.marks import slow
from tests.runs import losses, train
from tests.starts import start

transformers = pytest.importorskip("transformers", minversion="5")
from tests.model.families import make, tensors  # noqa: E402

WORDS = ["model=hf", "name=run", "batch.global_size=4", "batch.micro_size=2", "data=synthetic", "data.synthetic_tokens=5000"]
WORDS += ["data.seq_length=16", "data.workers=0", "eval.every=-1", "monitor.sample_tokens=0", "monitor.console=none"]
WORDS += ["monitor.curve=false", "launch.threads=1", "checkpoint=sync", "steps=3", "schedule=constant", "optimizer=sgd", "optimizer.lr=0.1"]
TWO = {
    "tensor": ["parallel=tensor2", "zero=stage1"],
    "sequence": ["parallel=tensor2_sequence", "zero=stage3"],
    "context": ["parallel=context2", "zero=stage2"],
    "pipeline": ["parallel=pipeline2"],
    "zero3": ["zero=stage3"],
}


def run(words: list[str], ranks: int, source: Path, cwd: Path) -> Path:
    """The folder that transformers loads, after a training in `cwd`."""
    cwd.mkdir()
    train([*WORDS, f"model.init_from={source}", *words], cwd, ranks)
    started = start([f"run={cwd}/runs/run", "convert.to=hf", f"convert.out={cwd}/out"], task=convert)
    assert started.code == 0, started.text
    return cwd / "out"


@pytest.mark.parametrize(("name", "layout"), [slow(name, layout) for name in ("qwen3", "gpt2-untied", "llama") for layout in TWO])
def test_two_ranks_learn_what_one_learns_and_both_are_exported(name: str, layout: str, tmp_path: Path) -> None:
    twin = make(name, tmp_path / "in", max_shard_size="30KB")
    one = run([], 1, tmp_path / "in", tmp_path / "one")
    two = run(TWO[layout], 2, tmp_path / "in", tmp_path / "two")
    (source, alone, shared) = (tensors(folder) for folder in (tmp_path / "in", one, two))
    assert alone.keys() == shared.keys() == source.keys()
    kept = [key for key in source if "k_proj.bias" not in key and "c_attn.bias" not in key]  # whose gradient is rounding
    assert all(float((alone[key] - source[key]).abs().max()) > 1e-5 for key in kept)  # everything has learned
    assert all(float((alone[key] - shared[key]).abs().max()) < 1e-6 for key in kept)
    first, other = (losses(folder.parent / "runs" / "run") for folder in (one, two))
    assert first.keys() == other.keys() == {1, 2, 3}
    assert all(abs(first[step][0] - other[step][0]) < 1e-5 for step in first)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        loaded = [type(twin).from_pretrained(folder, attn_implementation="eager").eval()(ids).logits for folder in (one, two)]
    assert float((loaded[0] - loaded[1]).abs().max()) < 1e-3


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(slow("qwen3", layout) for layout in TWO),
        *(slow(name, layout) for name in ("llama", "mistral", "qwen2-untied", "gpt2-untied") for layout in ("tensor", "pipeline")),
    ],
)
def test_what_learns_nothing_comes_out_bit_for_bit_from_any_layout(name: str, layout: str, tmp_path: Path) -> None:
    make(name, tmp_path / "in")
    out = run([*TWO[layout], "optimizer.lr=0"], 2, tmp_path / "in", tmp_path / "two")
    got, want = tensors(out), tensors(tmp_path / "in")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)
    assert (tmp_path / "two" / "runs" / "run" / "hf" / "config.json").exists()


@pytest.mark.slow
def test_a_run_goes_on_when_the_folder_of_its_weights_has_lost_them(tmp_path: Path) -> None:
    """Only config.json is read again; a folder without weights is refused where training would begin."""
    make("llama", tmp_path / "in")
    run(["resume=never"], 1, tmp_path / "in", tmp_path / "one")
    (tmp_path / "in" / "model.safetensors").unlink()
    train([*WORDS, f"model.init_from={tmp_path}/in", "name=other"], tmp_path / "one", code=2)


def watch_reading() -> None:
    """Have this rank write down, module by module, how many elements it reads, and how many it holds whole of the modules before."""
    from framework.model.pretrained import Pretrained

    before: list[torch.nn.Module] = []
    fill = Pretrained.fill

    def watched(self: Pretrained, module: torch.nn.Module, parts: dict[str, Logical]) -> None:
        held = sum(parameter.numel() for each in before for parameter in each.parameters(recurse=False))
        fill(self, module, parts)
        before.append(module)
        taken = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        with open(f"read_{os.environ['RANK']}", "a") as file:
            file.write(f"{taken} {held}\n")

    Pretrained.fill = watched  # type: ignore[method-assign]


@pytest.mark.slow
def test_zero3_reads_everything_on_each_rank_and_holds_one_module_of_it(tmp_path: Path) -> None:
    """The part of a data rank is a flat piece of each tensor; tensors are read whole, one module at a time, and divided at once."""
    make("qwen3", tmp_path / "in")
    train([*WORDS, f"model.init_from={tmp_path}/in", "zero=stage3", "checkpoint=none"], tmp_path, 2, prepare=watch_reading)
    whole = sum(tensor.numel() for tensor in tensors(tmp_path / "in").values())
    for rank in range(2):
        rows = [[*map(int, line.split())] for line in (tmp_path / f"read_{rank}").read_text().splitlines()]
        assert sum(taken for taken, _ in rows) == whole
        assert [held for _, held in rows] == [0] * len(rows)
