"""P13: documents that are packed into one row know nothing of each other, on any path.

A of 5 tokens and B of 7 make a row. B has the logits that it has alone, no token of A changes a bit of them, A's last token has
no loss for B's first, and 4 + 6 tokens count. The right values are those of the documents, one at a time, through the plain model
in float64, which knows of no documents. With rotary positions a right mask hides that positions did not begin anew; learned ones show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from framework.config.schema import Data, Model, Optimizer, Recompute
from framework.data.pack import IGNORE, MicroBatch
from framework.data.stream import StreamSettings, TrainingStream, validation_batches
from framework.data.tokens import Corpus
from framework.engine.engine import StepOut, trained_tokens
from framework.model import recompute, transformer
from framework.model.attention import causal_attention
from framework.model.places import document_mask
from framework.model.transformer import Positions, Transformer, compile_blocks
from framework.topology.grid import Place
from framework.topology.random import Streams
from tests.cases.packed import Alone, Packed, one_at_a_time, opened
from tests.cases.test_p02 import GRANULARITIES, GRIDS, SOME
from tests.engine import tiny
from tests.engine.tiny import Form
from tests.marks import slow
from tests.parallel import spread, stages
from tests.parallel.spread import Spread, engine_of, held, whole, without_key_biases
from tests.ranks import run_ranks

CPU = torch.device("cpu")
# Weights so large that tokens do attend to each other: with small ones attention is a mean, and its gradient nearly nothing.
LLAMA, GPT2 = replace(stages.LLAMA, init_std=0.2), replace(stages.GPT2, init_std=0.2)
MODELS = {"llama": LLAMA, "gpt2": GPT2, "qwen": replace(LLAMA, num_kv_heads=2, attention_bias="qkv", qk_norm=True)}
ONE = Spread(1, 1)
A, B, ROW = 5, 7, 12
TWO = Packed([A, B, 3], ROW, spread.LLAMA.vocab_size)
OF_B = slice(A, A + B)


def settings_of(layout: tiny.Layout, place: Place, context: int) -> StreamSettings:
    return StreamSettings(
        seed=3, shuffle=True, micro_size=layout.micro_size, accumulation=layout.accumulation, data_rank=place.data,
        data_size=layout.ranks, workers=0, prefetch=1, vocab_size=spread.LLAMA.vocab_size, context_rank=place.context, context_size=context,
    )  # fmt: skip


def first_step(corpus: Corpus, settings: StreamSettings) -> list[MicroBatch]:
    """As a run reads it."""
    stream = TrainingStream(corpus, settings, CPU)
    step = next(stream.start(0))
    stream.close()
    return step


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> MicroBatch:
    """A and B."""
    return first_step(TWO.corpus(tmp_path_factory.mktemp("two")), settings_of(tiny.Layout(1, 1), ONE.grid.place(0), 1))[0]


# ---------------------------------------------------------------- one process, every way through the attention


@contextmanager
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


@dataclass(frozen=True)
class Path_:
    """What is done with the plain model, what it runs under, and how far its logits may be from float64."""

    change: Callable[[Transformer], object] = lambda net: None
    under: Callable[[], AbstractContextManager[object]] = nullcontext
    tolerance: float = 1e-5


def recomputed(settings: Recompute) -> Path_:
    return Path_(lambda net: recompute.apply(net, settings, Streams(torch)))  # type: ignore[arg-type]


PATHS = {
    "flash": Path_(under=lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
    "math": Path_(under=lambda: sdpa_kernel(SDPBackend.MATH)),
    **{name: recomputed(settings) for name, settings in GRANULARITIES.items()},
    "core offloaded": recomputed(Recompute("selective", modules=("core",), offload=True)),
    "compiled": Path_(compile_blocks),
    "bf16": Path_(lambda net: net.bfloat16(), tolerance=0.1),
    "fp16": Path_(lambda net: net.half(), tolerance=0.01),
    "autocast": Path_(under=autocast, tolerance=0.1),
}
EVERY_PATH = pytest.mark.parametrize("path", [slow(name) if name == "compiled" else name for name in PATHS])
EVERY_MODEL = pytest.mark.parametrize("model", MODELS)


@EVERY_PATH
@EVERY_MODEL
def test_b_is_what_it_is_alone_and_no_token_of_a_changes_a_bit_of_it(row: MicroBatch, model: str, path: str) -> None:
    way, net = PATHS[path], tiny.transformer(MODELS[model])
    way.change(net)

    def logits_of_b(ids: Tensor) -> Tensor:
        with way.under():
            logits = net(ids, starts=row.starts)
            logits.float().logsumexp(-1).sum().backward()  # whatever is computed again, is
        return logits[0, OF_B].detach()

    alone, packed = one_at_a_time(TWO, MODELS[model]).logits[0][OF_B], logits_of_b(row.ids)
    assert float((packed.double() - alone).abs().max()) <= way.tolerance
    for place in range(A):
        ids = row.ids.clone()
        ids[0, place] = (ids[0, place] + 1) % TWO.vocabulary
        assert torch.equal(logits_of_b(ids), packed)


@EVERY_MODEL
def test_so_it_is_while_dropout_draws(row: MicroBatch, model: str) -> None:
    net = tiny.transformer(replace(MODELS[model], dropout=0.2)).train()
    found = []
    for place in range(-1, A):
        ids = row.ids.clone()
        if place >= 0:
            ids[0, place] = (ids[0, place] + 1) % TWO.vocabulary
        torch.manual_seed(1)
        found.append(net(ids, starts=row.starts)[0, OF_B])
    assert all(torch.equal(one, found[0]) for one in found)
    assert not torch.equal(net(row.ids, starts=row.starts)[0, OF_B], found[0])  # the next numbers drop others


def test_four_and_six_tokens_count(row: MicroBatch) -> None:
    assert row.targets.tolist() == [[*row.ids[0, 1:A].tolist(), IGNORE, *row.ids[0, A + 1 :].tolist(), IGNORE]]
    assert trained_tokens([row]) == 4 + 6


@EVERY_MODEL
def test_the_gradient_is_the_sum_of_the_documents_in_float64(row: MicroBatch, model: str) -> None:
    """The loss is summed in float32: its own rounding, 6e-8, is all that is left."""
    net, alone = tiny.transformer(MODELS[model]).double().eval(), one_at_a_time(TWO, MODELS[model])
    (net(*row.inputs) / alone.tokens).backward()
    gradient = {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}
    assert tiny.distance(without_key_biases(gradient), without_key_biases(alone.gradient)) < 1e-6


@EVERY_MODEL
def test_a_row_of_one_document_is_as_joined(row: MicroBatch, model: str) -> None:
    net, starts = tiny.transformer(MODELS[model]), torch.zeros_like(row.ids)
    torch.testing.assert_close(net(row.ids, starts=starts), net(row.ids), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_an_explicit_mask_that_hides_nothing_is_no_mask(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, ROW, heads, 6, generator=generator) for heads in (4, kv_heads, kv_heads))
    given = causal_attention(query, key, value, 0.0, document_mask(torch.zeros(2, ROW, dtype=torch.int64), torch.float32))
    torch.testing.assert_close(given, causal_attention(query, key, value, 0.0), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("fault", "model", "far"), [("mask", "llama", True), ("positions", "gpt2", True), ("positions", "llama", False)])
def test_a_fault_would_be_seen(row: MicroBatch, fault: str, model: str, far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask, or positions that go on: the second is invisible with rotary positions, which are relative."""
    if fault == "mask":
        monkeypatch.setattr(transformer, "document_mask", lambda starts, dtype: document_mask(torch.zeros_like(starts), dtype))
    else:
        monkeypatch.setattr(Positions, "forward", lambda self, length, device, starts=None: torch.arange(length))
    logits = tiny.transformer(MODELS[model])(row.ids, starts=row.starts)[0, OF_B]
    distance = float((logits - one_at_a_time(TWO, MODELS[model]).logits[0][OF_B]).abs().max())
    assert distance > 1e-2 if far else distance < 1e-5


# ---------------------------------------------------------------- many ranks: one step, and an evaluation, as a run makes them

MANY = Packed([5, 7, 1, 11, 3, 4, 5, 12, 2, 1, 1, 2, 6, 24, 9, 3, 4], ROW, spread.LLAMA.vocab_size)
"""Eight rows, of which no two have the same boundaries."""
RATE = 1024.0  # so big that the change of the weights is the gradient to fp32's last digits; divided away again
BIG_SGD = Optimizer(name="sgd", lr=RATE, weight_decay=0.0)


@dataclass
class Seen:
    """What one rank has seen: (sum of losses, tokens) of an evaluation before the step, the step, its part of the gradient."""

    evaluated: tuple[float, int]
    out: StepOut
    gradient: spread.Held


def learn(rank: int, spread: Spread, form: Form, model: Model, settings: Recompute, folder: Path, tokens: int) -> Seen:
    config = replace(spread.config(form, model, BIG_SGD), recompute=settings, data=Data(seq_length=ROW, documents="apart"))
    corpus, place = opened(folder, ROW), spread.grid.place(rank)
    reading = settings_of(spread.layout, place, spread.context)
    engine = engine_of(config, spread, rank)
    evaluated = engine.evaluate(validation_batches(corpus, reading, 0, CPU))
    before = held(engine, tiny.masters(engine))
    out = engine.step(first_step(corpus, reading), tokens)
    after = held(engine, tiny.masters(engine))
    return Seen(evaluated, out, {name: (part, (before[name][1].double() - value) / RATE) for name, (part, value) in after.items()})


def walk(
    rank: int, ranks: int, spread: Spread, form: Form, model: str, names: Sequence[str], folder: Path
) -> dict[str, Seen]:
    tokens = sum(target is not None for row in MANY.rows() for piece in row for target in piece.targets)
    choices = {"none": Recompute(), **GRANULARITIES}
    return {name: learn(rank, spread, form, MODELS[model], choices[name], folder, tokens) for name in names}


def as_one_at_a_time(spread: Spread, form: Form, model: str, names: Sequence[str], folder: Path, tolerance: float) -> None:
    MANY.corpus(folder)
    alone: Alone = one_at_a_time(MANY, MODELS[model])
    ranks = run_ranks(walk, spread.grid.size, spread, form, model, names, folder, env=tiny.ONE_THREAD, timeout=600)
    for name in names:
        found = without_key_biases(whole(seen[name].gradient for seen in ranks))
        assert tiny.distance(found, without_key_biases(alone.gradient)) < tolerance, name
        for seen in (rank[name] for rank in ranks):
            assert seen.out.loss == pytest.approx(alone.loss, rel=tolerance)
            assert seen.evaluated[1] == alone.tokens
            assert seen.evaluated[0] == pytest.approx(alone.loss * alone.tokens, rel=tolerance)


FP32 = Form("fp32", 0)
FOUR_BLOCKS = ("none", "full", "core")


@pytest.mark.parametrize("model", [slow("llama"), slow("gpt2"), "qwen"])
def test_a_step_is_that_of_the_documents_one_at_a_time(model: str, tmp_path: Path) -> None:
    as_one_at_a_time(ONE, FP32, model, ["none", *SOME, "full offloaded", "core"], tmp_path, 1e-5)


TWO_RANKS = [("tensor 2, sequence", "gpt2"), ("context 2", "gpt2"), ("pipeline 2", "gpt2")]
TWO_RANKS += [slow(grid, model) for grid, stages_ in GRIDS.items() for model in MODELS if (grid, model) not in TWO_RANKS]


@pytest.mark.parametrize(("grid", "model"), TWO_RANKS)
def test_so_it_is_in_every_layout(grid: str, model: str, tmp_path: Path) -> None:
    where, stages_ = GRIDS[grid]
    if MODELS[model].kv_heads % where.tensor:
        pytest.skip("fewer key heads than tensor ranks")
    as_one_at_a_time(where, Form("fp32", stages_[-1]), model, FOUR_BLOCKS, tmp_path, 1e-5)


HALF = [Form("bf16_autocast", 0), Form("bf16", 1), Form("fp16", 2), Form("bf16", 3)]
HALF_GRIDS = [*(("context 2", form) for form in HALF), ("tensor 2, sequence", HALF[0]), ("tensor 2, sequence", HALF[1])]
HALF_GRIDS += [("pipeline 2", HALF[0]), ("pipeline 2", HALF[1])]


@pytest.mark.parametrize(("grid", "form"), [HALF_GRIDS[0], *(slow(*row) for row in HALF_GRIDS[1:])], ids=str)
def test_so_it_is_in_half_precision(grid: str, form: Form, tmp_path: Path) -> None:
    """Products are rounded to 8 or 11 bits; joined documents are off by more than a third."""
    as_one_at_a_time(GRIDS[grid][0], form, "qwen", FOUR_BLOCKS, tmp_path, 5e-2)


def test_joined_documents_are_far_off() -> None:
    """What the tests above must not accept."""
    joined = Packed([sum(MANY.lengths)], ROW, MANY.vocabulary)
    assert [*joined.documents[0]] == [token for document in MANY.documents for token in document]
    apart, mixed = one_at_a_time(MANY, MODELS["gpt2"]), one_at_a_time(joined, MODELS["gpt2"])
    assert tiny.distance(without_key_biases(mixed.gradient), without_key_biases(apart.gradient)) > 0.3
