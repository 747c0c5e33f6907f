"""P08 (NVIDIA/Megatron-LM#844): the two copies of a tied embedding, on the first and on the last stage, drift apart or get wrong
gradients. Right value: a single process, the same batch order.

Its whole kind here: every order of the two reductions (over the copies, over the data ranks) that ZeRO and precision bring.
tests/parallel/test_pipeline.py has the wider grid in fp32.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from framework.config.schema import Model, Optimizer
from tests import runs
from tests.engine import tiny
from tests.engine.tiny import ADAMW, Form
from tests.parallel.spread import SAMPLES, SEQUENCE, Held, engine_of, whole
from tests.parallel.stages import LLAMA, Stages, live, masters, plain_of
from tests.ranks import run_ranks

EMBEDDING = "embed_tokens.weight"
OPTIMIZERS = {"sgd": Optimizer(name="sgd", lr=0.1, weight_decay=0.0), "adamw": ADAMW}
STEPS = 5
# Half precision: of each weight's change over the five steps, the share by which the two may differ.
FORMS = {Form("fp32", 0): 1e-5, Form("fp32", 1): 1e-5, Form("bf16_autocast", 0): 0.05, Form("bf16", 1): 0.05, Form("fp16", 1): 0.01}
FORMS |= {Form(precision, 1, "cpu"): FORMS[Form(precision, 1)] for precision in ("fp32", "bf16", "fp16")}


def copies(found: Held) -> Held:
    return {name: entry for name, entry in found.items() if entry[0].name == EMBEDDING}


def train(rank: int, ranks: int, stages: Stages, form: Form, name: str, model: Model) -> list[tuple[Held, Held]]:
    """This rank's embeddings, masters and live weights, before the first step and after each."""
    engine = engine_of(stages.config(form, model, OPTIMIZERS[name]), stages, rank)
    data = stages.grid.place(rank).data
    found = [(copies(masters(engine)), copies(live(engine)))]
    for step in range(STEPS):
        batch = tiny.samples(step, SAMPLES, SEQUENCE, model.vocab_size)
        out = engine.step(stages.layout.share(batch, data), tiny.tokens_of(batch))
        assert not out.skipped
        found.append((copies(masters(engine)), copies(live(engine))))
    return found


def alone(name: str, model: Model) -> list[torch.Tensor]:
    one = Stages(1, 1, pipeline=1)
    engine = plain_of(one.config(Form("fp32", 0), model, OPTIMIZERS[name]))
    found = [tiny.live_weights(engine)[EMBEDDING]]
    for step in range(STEPS):
        batch = tiny.samples(step, SAMPLES, SEQUENCE, model.vocab_size)
        engine.step(one.layout.share(batch, 0), tiny.tokens_of(batch))
        found.append(tiny.live_weights(engine)[EMBEDDING])
    return found


def prove(stages: Stages, form: Form, name: str) -> None:
    ranks = run_ranks(train, stages.grid.size, stages, form, name, LLAMA, env=tiny.ONE_THREAD)
    right = alone(name, LLAMA)
    for step, want in enumerate(right):
        # `whole` fails unless the copies are equal bit for bit.
        master, _now = (whole(seen[step][side] for seen in ranks)[EMBEDDING].float() for side in (0, 1))
        if form.precision.startswith("fp32"):
            assert tiny.distance({"": master}, {"": want}) < 1e-6 * (1 if name == "sgd" else 10)
        elif step:
            assert float((master - want).norm() / (want - right[0]).norm()) < FORMS[form]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "form", [Form("fp32", 0), *(pytest.param(Form("fp32", 1, place), marks=pytest.mark.slow) for place in tiny.OFFLOADS)], ids=str
)
def test_four_processes(form: Form, name: str) -> None:
    prove(Stages(2, 1), form, name)


HALF = [form for form in FORMS if form.precision != "fp32"]


@pytest.mark.parametrize("form", [pytest.param(form, marks=pytest.mark.slow) if form.offload == "cpu" else form for form in HALF], ids=str)
def test_half_precision(form: Form) -> None:
    """DeepSpeed keeps the sums of half gradients elsewhere: without the copy's part the change would be half of the right one."""
    prove(Stages(1, 1), form, "sgd")


WORDS = [*runs.SMALL, "parallel=pipeline2", "verify.hash_every=1", "verify.tensors=true", "checkpoint=sync", "model.dropout=0.1"]


def tensors(run: Path, step: int) -> dict[int, dict[str, str]]:
    """Rank -> tensor -> hash, after `step`."""
    return {line["rank"]: line["tensors"] for line in runs.lines(run / "hashes.jsonl") if line["step"] == step}


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_after_save_and_load(stage: int, tmp_path: Path) -> None:
    """A run that was stopped in between has the same tensors on every rank, and the copies are still the same."""
    words = [*WORDS, f"zero=stage{stage}"]
    runs.train([*words, "steps=4", f"output_root={tmp_path}/straight"], tmp_path, ranks=2)
    runs.train([*words, "steps=2"], tmp_path, ranks=2)
    runs.train([*words, "steps=4"], tmp_path, ranks=2)
    straight, resumed = (tensors(tmp_path / root / "run", 4) for root in ("straight", "runs"))
    assert len(straight) == 2
    assert resumed == straight
    names = [name for name in straight[0] if name.endswith(EMBEDDING)]
    assert sorted(names) == sorted(f"{kind} {EMBEDDING}" for kind in ("exp_avg", "exp_avg_sq", "live", "master"))
    assert all(straight[0][name] == straight[1][name] for name in names)
