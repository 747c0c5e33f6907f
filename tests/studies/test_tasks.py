"""Tasks of lm-evaluation-harness on a run: its numbers against the exported weights on a plain model. Skipped without lm_eval, but for
the letters."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from framework.base.errors import ConfigError, DataError, FrameworkError
from framework.base.files import write_json
from framework.config.compose import compose
from framework.convert import convert
from framework.data.manifest import MADE_BY
from framework.data.tokenizer import ByteTokenizer
from framework.data.tokens import write_tokens
from framework.evaluate import evaluate
from framework.model.transformer import Transformer
from framework.studies import tasks
from framework.trainer.folder import read_config
from tests.ranks import run_ranks
from tests.runs import PLAIN, SMALL, train
from tests.starts import Started, assert_one_letter, start

BYTES = ["data=pydocs", "model.vocab_size=256", "data.seq_length=32", "data.cache=cache", "steps=3", "optimizer.lr=1e-2", "checkpoint=sync"]
needs_harness = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval")

QUESTIONS = [
    {"question": "The assert statement", "choices": [" is a keyword", " debugs", " is convenient"], "answer": 2},
    {"question": "An object has", "choices": [" type", " a type", " no"], "answer": 1},
    {"question": "Names refer to ", "choices": ["objects", "numbers and many more things than that, which is long"], "answer": 0},
]
TEXTS = ["Names refer to objects.", "The following sections describe the standard types that are built into the interpreter.\n" * 2]


def write_task(folder: Path, name: str, rows: list[dict[str, Any]], **settings: Any) -> Path:
    """A task's YAML (which JSON is) with its own data beside it."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}}, "test_split": "test"}
    (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **data, "metadata": {"version": 1.0}, **settings}))
    return folder / f"{name}.yaml"


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    choice = write_task(
        tmp_path, "choice", QUESTIONS, output_type="multiple_choice", doc_to_text="{{question}}", doc_to_choice="{{choices}}",
        doc_to_target="{{answer}}", target_delimiter="", metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
    )  # fmt: skip
    whole = write_task(
        tmp_path, "whole", [{"text": text} for text in TEXTS], output_type="loglikelihood_rolling", doc_to_text="",
        doc_to_target="{{text}}", metric_list=[{"metric": "byte_perplexity"}],
    )  # fmt: skip
    rows = [{"question": "The ", "answer": "x"}, {"question": "An object ", "answer": "y"}]
    written = write_task(
        tmp_path, "written", rows, output_type="generate_until", doc_to_text="{{question}}", doc_to_target="{{answer}}",
        generation_kwargs={"until": ["\n"], "max_gen_toks": 5, "do_sample": False}, metric_list=[{"metric": "exact_match"}],
    )  # fmt: skip
    return [str(choice), str(whole), str(written)]


class Plain:
    """The exported weights in the plain model, one text at a time, in float64."""

    def __init__(self, run: Path, out: Path) -> None:
        done = start([f"run={run}", f"convert.out={out}"], task=convert)
        assert done.code == 0, done.text
        self.length = read_config(run / "config.yaml").data.seq_length
        self.net = Transformer(read_config(run / "config.yaml").model).eval().double()
        self.net.load_state_dict(load_file(out / "model.safetensors"), strict=False)

    def log_likelihood(self, before: bytes, text: bytes) -> float:
        """Nats of `text` behind `before`; no more than the model sees at once."""
        whole = (before + text)[-self.length - 1 :]
        with torch.no_grad():
            likelihoods = self.net(torch.tensor([[*whole[:-1]]]))[0].log_softmax(dim=-1)
        return sum(float(likelihoods[at - 1, whole[at]]) for at in range(len(whole) - len(text), len(whole)))


def evaluated(rank: int, ranks: int, words: list[str], cwd: str) -> Started:
    os.chdir(cwd)
    return start(words, task=evaluate)


def answered(words: list[str], cwd: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """What framework.evaluate writes, by task and metric."""
    [done] = run_ranks(evaluated, 1, [*words, "evaluate.out=out.json"], str(cwd), env={"HF_HUB_OFFLINE": "1"}, timeout=400)
    assert done.code == 0, done.text
    kept = json.loads((cwd / "out.json").read_text())
    assert kept["step"] == 3
    assert all(f"{line['metric']} {line['value']:.4f}" in done.text for line in kept["tasks"])
    return {(line["task"], line["metric"]): line for line in kept["tasks"]}


@needs_harness
@pytest.mark.parametrize(
    ("words", "ranks", "tolerance"),
    [
        pytest.param([*PLAIN, *BYTES], 1, 1e-5, id="plain"),
        pytest.param([*SMALL, *BYTES, "parallel=tensor2", "zero=stage1"], 2, 1e-5, id="tensor2", marks=pytest.mark.slow),
        pytest.param([*SMALL, *BYTES, "precision=bf16", "zero=stage2"], 2, 5e-2, id="bf16", marks=pytest.mark.slow),
    ],
)
def test_numbers_of_tasks_are_those_of_the_exported_weights(
    words: list[str], ranks: int, tolerance: float, tmp_path: Path, files: list[str]
) -> None:
    train(words, tmp_path, ranks)
    found = answered(["run=runs/run", f"evaluate.tasks=[{','.join(files)}]"], tmp_path)
    plain = Plain(tmp_path / "runs/run", tmp_path / "out")
    right = {"acc": 0, "acc_norm": 0}
    for row in QUESTIONS:
        # Spaces at the end of the question count with the answer.
        kept = row["question"].rstrip()
        moved = row["question"][len(kept) :]
        sums = [plain.log_likelihood(kept.encode(), (moved + each).encode()) for each in row["choices"]]
        norms = [value / len(each) for value, each in zip(sums, row["choices"], strict=True)]
        right["acc"] += max(range(len(sums)), key=sums.__getitem__) == row["answer"]
        right["acc_norm"] += max(range(len(norms)), key=norms.__getitem__) == row["answer"]
    for metric, count in right.items():
        assert found["choice", metric]["value"] == pytest.approx(count / 3)
        assert found["choice", metric]["samples"] == 3
    total, length = 0.0, plain.length
    for text in TEXTS:
        ids = b"\n" + text.encode()  # bytes have no token that ends a document
        for at in range(1, len(ids), length):
            stop = min(at + length, len(ids))
            total += plain.log_likelihood(ids[:at], ids[at:stop])
    nbytes = sum(len(text.encode()) for text in TEXTS)
    assert found["whole", "byte_perplexity"]["value"] == pytest.approx(math.exp(-total / nbytes), rel=tolerance)
    assert found["written", "exact_match"]["value"] == 0.0


@needs_harness
def test_what_the_harness_cannot_do_is_a_letter(tmp_path: Path, files: list[str]) -> None:
    train([*PLAIN, *BYTES], tmp_path)
    (tmp_path / "whole.jsonl").unlink()
    odd = write_task(
        tmp_path, "odd", [{"q": "a"}], output_type="generate_until", doc_to_text="{{q}}", doc_to_target="{{q}}",
        generation_kwargs={"until": ["x"], "top_k": 5}, metric_list=[{"metric": "exact_match"}],
    )  # fmt: skip
    for name, said in {files[1]: "whole", str(odd): "top_k"}.items():
        refused(name, said, tmp_path)


@needs_harness
@pytest.mark.slow
def test_a_task_that_does_not_exist_is_a_letter_with_one_that_does(tmp_path: Path) -> None:
    train([*PLAIN, *BYTES], tmp_path)
    refused("hellaswagg", "evaluate.tasks=[hellaswag]", tmp_path)


def refused(name: str, said: str, cwd: Path) -> None:
    """That the task `name` is refused with a letter in which `said` stands."""
    words = ["run=runs/run", f"evaluate.tasks=[{name}]"]
    [done] = run_ranks(evaluated, 1, words, str(cwd), env={"HF_HUB_OFFLINE": "1"}, timeout=400)
    assert done.code == 2, done.text
    assert_one_letter(done.text, said)


@needs_harness
def test_examples_and_limits_reach_the_harness(tmp_path: Path, files: list[str]) -> None:
    train([*PLAIN, *BYTES], tmp_path)
    few = write_task(
        tmp_path, "few", QUESTIONS, output_type="multiple_choice", doc_to_text="{{question}}", doc_to_choice="{{choices}}",
        doc_to_target="{{answer}}", metric_list=[{"metric": "acc"}], fewshot_split="test",
    )  # fmt: skip
    words = ["run=runs/run", f"evaluate.tasks=[{few}]"]
    assert answered([*words, "evaluate.limit=2"], tmp_path)["few", "acc"]["samples"] == 2
    [done] = run_ranks(seen, 1, [*words, "evaluate.num_fewshot=2", "evaluate.max_length=64"], str(tmp_path))
    assert max(done) == 64  # two examples before each question are longer than that


def seen(rank: int, ranks: int, words: list[str], cwd: str) -> list[int]:
    """Lengths of what the model was shown."""
    from framework.engine.engine import PlainEngine

    os.chdir(cwd)
    kept, lengths = PlainEngine.logits, []
    PlainEngine.logits = lambda self, ids: (lengths.append(ids.shape[1]), kept(self, ids))[1]  # type: ignore[method-assign]
    with contextlib.redirect_stdout(io.StringIO()):
        tasks.answer(compose(words))
    return lengths


def test_without_the_harness_the_letter_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train([*PLAIN, "steps=1"], tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        tasks.answer(compose([f"run={tmp_path}/runs/run", "evaluate.tasks=[hellaswag]"]))
    assert caught.value.write == "pip install '.[harness]'"


def test_the_tokenizer_is_that_of_the_runs_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path / "t", [np.arange(200) % 64], np.dtype("<u2"))
    kept, given = compose(["data=tokens", "data.files=[t]", "model.vocab_size=300"]), compose(["run=run"])

    def letter(*words: str) -> FrameworkError:
        with pytest.raises(FrameworkError) as caught:
            tasks.tokenizer_of(compose(["run=run", *words]), kept)
        assert isinstance(caught.value, ConfigError | DataError)
        return caught.value

    assert letter().write == "data.tokenizer=PATH"
    chosen = tasks.tokenizer_of(compose(["run=run", "data.tokenizer=bytes"]), kept)
    assert chosen.kind == "bytes"
    assert tasks.tokenizer_of(given, compose(["data=pydocs"])).kind == "bytes"
    write_json(tmp_path / "t.json", {"made_by": MADE_BY, "tokenizer": {"xxh3_128": ByteTokenizer.checksum}})
    assert tasks.tokenizer_of(compose(["run=run", "data.tokenizer=bytes"]), kept).kind == "bytes"
    write_json(tmp_path / "t.json", {"made_by": MADE_BY, "tokenizer": {"xxh3_128": "another"}})
    assert "made with another" in str(letter("data.tokenizer=bytes").got)
    kept = compose(["data=synthetic", "model.vocab_size=64"])
    assert "the model knows 64" in str(letter("data.tokenizer=bytes").got)
