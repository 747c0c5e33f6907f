"""framework.evaluate: the run's own held-out loss again, from its checkpoint, on one process; the same from token files."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import numpy as np
import pytest

from framework.base.errors import ConfigError
from framework.base.files import write_json
from framework.config.compose import compose
from framework.data.manifest import MADE_BY
from framework.data.prepare import open_corpora
from framework.data.tokens import write_tokens
from framework.studies.evaluate import Evaluated, evaluate
from framework.trainer.folder import read_config
from tests.ranks import run_ranks
from tests.runs import PLAIN, SMALL, lines, train

WORDS = ["steps=4", "eval.every=0", "checkpoint=sync", "optimizer.lr=1e-2"]


def evaluated(rank: int, ranks: int, words: list[str], cwd: str) -> Evaluated:
    os.chdir(cwd)
    with contextlib.redirect_stdout(io.StringIO()):
        return evaluate(compose(words))


def last(run: Path) -> dict[str, float]:
    return [line for line in lines(run / "metrics.jsonl") if line["kind"] == "eval"][-1]


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        pytest.param([*PLAIN], 1, id="plain"),
        pytest.param([*SMALL, "zero=stage2"], 2, id="zero2", marks=pytest.mark.slow),
        pytest.param([*SMALL, "precision=bf16", "zero=stage1"], 1, id="bf16", marks=pytest.mark.slow),
        *(
            pytest.param([*SMALL, *words], ranks, id=" ".join(words), marks=pytest.mark.slow)
            for words, ranks in (
                (["parallel=tensor2", "zero=stage1"], 2),
                (["parallel=tensor2_sequence", "zero=stage3"], 2),
                (["parallel=pipeline2", "zero=stage1"], 2),
                (["parallel=context2", "zero=stage2"], 2),
                (["parallel=tensor2_pipeline2"], 4),
                (["precision=fp16", "zero=stage2"], 2),
                (["precision=fp16_autocast", "zero=stage0"], 1),
                (["precision=bf16_autocast", "zero=stage3"], 2),
                (["precision=bf16", "zero=stage1", "parallel=tensor2"], 2),
                (["precision=fp16", "zero=stage1", "parallel=pipeline2"], 2),
                (["precision=bf16", "zero=stage3", "parallel=context2"], 2),
            )
        ),
    ],
)
def test_the_runs_own_loss_again(words: list[str], ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train([*words, *WORDS], tmp_path, ranks)
    run = tmp_path / "runs/run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    said = last(run)
    [own] = run_ranks(evaluated, 1, ["run=runs/run"], str(tmp_path))
    half = any(word.startswith(("precision=fp16", "precision=bf16")) for word in words)
    # Split matrices add up in another order: in half precision that is seen.
    assert own.loss == pytest.approx(said["loss"], rel=1e-5 if half and ranks > 1 else 1e-6)
    assert (own.step, own.tokens, own.samples, own.bytes_per_token) == (4, said["tokens"], said["samples"], None)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    if ranks > 1:
        return
    kept = read_config(run / "config.yaml")
    monkeypatch.chdir(tmp_path)
    held_out = open_corpora(kept.data, kept.model.vocab_size, kept.seed).validation
    assert held_out is not None
    start, stop = held_out.spans[0]
    write_tokens(tmp_path / "held", [np.array(held_out.files[0].read(start, stop - start))], np.dtype("<u2"))
    write_json(tmp_path / "held.json", {"made_by": MADE_BY, "totals": {"bytes": 30, "tokens": 10}})
    [files] = run_ranks(evaluated, 1, ["run=runs/run", "data=tokens", "data.files=['hel*']"], str(tmp_path))
    assert (files.loss, files.tokens, files.bytes_per_token) == (own.loss, own.tokens, 3.0)
    assert f"{own.loss / 3:.6f} nats per byte" in files.says()


def test_what_cannot_be_evaluated_is_a_letter(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        evaluate(compose([f"run={tmp_path}/nothing"]))
    assert caught.value.subject == "run"
    train([*PLAIN, "steps=1", "checkpoint=none"], tmp_path)
    run = tmp_path / "runs/run"
    write_tokens(tmp_path / "short", [np.arange(10)], np.dtype("<u2"))
    write_tokens(tmp_path / "long", [np.arange(100) % 64], np.dtype("<u2"))
    for name, subject in {"short": "data.files", "long": "run"}.items():
        with pytest.raises(ConfigError) as caught:
            evaluate(compose([f"run={run}", "data=tokens", f"data.files=[{tmp_path}/{name}]"]))
        assert caught.value.subject == subject
