"""framework/data/tokenizer.py against the libraries themselves and against transformers."""

from __future__ import annotations

import base64
import importlib.util
import json
import pydoc_data.topics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from framework.base.errors import ConfigError
from framework.config.schema import Data, Prepare
from framework.data.preparing import prepare
from framework.data.tokenizer import open_tokenizer
from framework.data.tokens import TokenFile

tokenizers = pytest.importorskip("tokenizers")

TEXTS = ["Hello world", " two  spaces\nand a line", "naïve 日本 🙂", "", "x" * 300, "ends<|endoftext|>here", "tab\tand 1234567"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small byte-level BPE in both of its forms: gpt2/vocab.json + merges.txt, and one/tokenizer.json."""
    folder = tmp_path_factory.mktemp("bpe")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(list(pydoc_data.topics.topics.values())[:20], trainer)
    (folder / "gpt2").mkdir()
    (folder / "one").mkdir()
    inner.model.save(str(folder / "gpt2"))
    inner.save(str(folder / "one" / "tokenizer.json"))
    return folder


def as_lists(arrays: list[np.ndarray]) -> list[list[int]]:
    assert all(array.dtype == np.int64 for array in arrays)
    return [array.tolist() for array in arrays]


def test_bytes() -> None:
    tokenizer = open_tokenizer("bytes")
    assert as_lists(tokenizer.encode(TEXTS)) == [list(text.encode()) for text in TEXTS]
    assert (tokenizer.vocab_size, tokenizer.end) == (256, None)
    assert [tokenizer.decode([*text.encode()]) for text in TEXTS] == TEXTS
    assert tokenizer.decode([300, 0xC3, 97]) == "\ufffda"
    with pytest.raises(ConfigError) as caught:
        open_tokenizer("bytes", "</s>")
    assert caught.value.subject == "prepare.end_of_document"


@pytest.mark.parametrize("path", ["gpt2", "gpt2/vocab.json", "gpt2/merges.txt"])
def test_vocabulary_and_merges_are_gpt2s_as_transformers_reads_them(trained: Path, path: str) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.GPT2TokenizerFast(vocab=str(trained / "gpt2/vocab.json"), merges=str(trained / "gpt2/merges.txt"))
    tokenizer = open_tokenizer(str(trained / path))
    assert as_lists(tokenizer.encode(TEXTS)) == [reference(text)["input_ids"] for text in TEXTS]
    assert tokenizer.end == reference.convert_tokens_to_ids("<|endoftext|>") == 0
    assert tokenizer.vocab_size == len(reference) == 600
    assert [tokenizer.decode(ids.tolist()) for ids in tokenizer.encode(TEXTS)] == [text.replace("<|endoftext|>", "") for text in TEXTS]


def test_tokenizer_json_without_its_padding_truncation_and_template(trained: Path, tmp_path: Path) -> None:
    """A file may ask for rows of one length with tokens around them; a corpus wants the text's tokens alone."""
    inner = tokenizers.Tokenizer.from_file(str(trained / "one/tokenizer.json"))
    expected = [inner.encode(text).ids for text in TEXTS]
    inner.enable_padding(length=9, pad_id=1)
    inner.enable_truncation(5)
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    inner.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert as_lists(open_tokenizer(str(path)).encode(TEXTS)) == expected


def test_ids_with_a_hole_are_all_counted(trained: Path, tmp_path: Path) -> None:
    content = json.loads((trained / "one/tokenizer.json").read_text())
    content["model"]["vocab"]["far"] = 700
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert open_tokenizer(str(tmp_path)).vocab_size == 701
    assert open_tokenizer(str(tmp_path), "far").end == 700


def test_the_end_of_a_document(trained: Path, tmp_path: Path) -> None:
    source = (trained / "one/tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(source)
    assert open_tokenizer(str(tmp_path)).end == 0
    assert open_tokenizer(str(tmp_path), "none").end is None
    some = next(token for token, number in json.loads(source)["model"]["vocab"].items() if number == 400)
    assert open_tokenizer(str(tmp_path), some).end == 400
    for said in (some, {"content": some}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": said}))
        assert open_tokenizer(str(tmp_path)).end == 400
    with pytest.raises(ConfigError) as caught:
        open_tokenizer(str(tmp_path), "<nowhere>")
    assert caught.value.subject == "prepare.end_of_document"
    content = json.loads(source)
    content["added_tokens"] = []
    content["model"]["vocab"] = {"a": 0, "b": 1}
    content["model"]["merges"] = []
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        open_tokenizer(str(tmp_path))
    assert caught.value.write == "prepare.end_of_document=none"


def test_checksums_tell_tokenizers_apart(trained: Path) -> None:
    paths = ("bytes", str(trained / "gpt2"), str(trained / "one"))
    assert len({open_tokenizer(path).checksum for path in paths}) == 3
    assert open_tokenizer(paths[1]).checksum == open_tokenizer(f"{paths[1]}/vocab.json").checksum


def test_what_is_no_tokenizer_is_a_letter(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.bin").write_text("x")
    for path in (None, str(tmp_path / "nowhere"), str(tmp_path), str(tmp_path / "empty"), str(tmp_path / "a.bin")):
        with pytest.raises(ConfigError) as caught:
            open_tokenizer(path)
        assert caught.value.subject == "data.tokenizer"
        assert "tokenizer.json" in caught.value.expected


@pytest.mark.parametrize(("name", "library"), [("a.model", "sentencepiece"), ("tekken.json", "tiktoken"), ("tokenizer.json", "tokenizers")])
def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, library: str) -> None:
    content = {"config": {"default_num_special_tokens": 3, "default_vocab_size": 5, "pattern": "."}, "vocab": []}
    (tmp_path / name).write_text(json.dumps(content))
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError) as caught:
        open_tokenizer(str(tmp_path / name))
    assert library in str(caught.value.got)
    assert caught.value.write.startswith("pip install '.[")


def test_sentencepiece(tmp_path: Path) -> None:
    library = pytest.importorskip("sentencepiece")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(list(pydoc_data.topics.topics.values())[:10]))
    library.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "m"), vocab_size=400, model_type="bpe", byte_fallback=True, minloglevel=2
    )
    reference = library.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    for path in (tmp_path / "m.model", tmp_path):
        tokenizer = open_tokenizer(str(path))
        assert as_lists(tokenizer.encode(TEXTS)) == [reference.encode(one) for one in TEXTS]
    assert (tokenizer.vocab_size, tokenizer.end) == (400, reference.eos_id())
    assert [tokenizer.decode(ids.tolist()) for ids in tokenizer.encode(["Hello world", "naïve"])] == ["Hello world", "naïve"]
    assert tokenizer.decode([*tokenizer.encode(["a b"])[0].tolist(), 9999]) == "a b"
    assert open_tokenizer(str(tmp_path), "<s>").end == reference.bos_id()
    with pytest.raises(ConfigError):
        open_tokenizer(str(tmp_path), "<nowhere>")


def test_tekken(tmp_path: Path) -> None:
    """256 bytes, two merges, and one entry more than the vocabulary takes, behind three special ids."""
    pytest.importorskip("tiktoken")
    texts = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b"lo"]
    vocabulary = [{"rank": rank, "token_bytes": base64.b64encode(text).decode(), "token_str": None} for rank, text in enumerate(texts)]
    config = {"pattern": r"\w+|\W", "num_vocab_tokens": 259, "default_vocab_size": 261, "default_num_special_tokens": 3, "version": "v3"}
    (tmp_path / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocabulary}))
    tokenizer = open_tokenizer(str(tmp_path))
    expected = [257 + 3, ord(" ") + 3, 256 + 3, *(byte + 3 for byte in "ïlo".encode()), *(byte + 3 for byte in b"</s>")]
    assert as_lists(tokenizer.encode(["the thïlo</s>", ""])) == [expected, []]
    assert (tokenizer.vocab_size, tokenizer.end) == (261, 2)
    assert tokenizer.decode([1, *expected, 2, 900]) == "the thïlo</s>"
    assert tokenizer.decode(expected[:4]) == "the th\ufffd"


# ---------------------------------------------------------------- vocabularies of Mistral: pip install --no-deps mistral-common==1.13.1

SPOKEN = "In the beginning God created the heaven and the earth. naïve 日本語 🙂\n\tdef f(x):\n        return 12345 + x  # ɐ\n"


def mistral(name: str) -> Path:
    """A file of that package, which is not imported."""
    found = importlib.util.find_spec("mistral_common")
    if found is None or found.origin is None:
        pytest.skip("mistral-common is not installed")
    return Path(found.origin).parent / "data" / name


def merged(parts: list[bytes], rank: Callable[[bytes], float | None]) -> list[bytes]:
    """Byte pairs by the book (Sennrich et al. 2016): join the neighbours of the lowest rank, the leftmost of them, until none is known."""
    while True:
        ranks = [(found, at) for at in range(len(parts) - 1) if (found := rank(parts[at] + parts[at + 1])) is not None]
        if not ranks:
            return parts
        at = min(ranks)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.mark.parametrize(
    ("name", "size"),
    [("tokenizer.model.v1", 32_000), ("mistral_instruct_tokenizer_240323.model.v3", 32_768)],
)
def test_sentencepiece_of_mistral_is_byte_pairs_by_the_book(name: str, size: int) -> None:
    library = pytest.importorskip("sentencepiece")
    file = mistral(name)
    inner = library.SentencePieceProcessor(model_file=str(file))
    kept = [number for number in range(size) if not (inner.is_control(number) or inner.is_unknown(number) or inner.is_byte(number))]
    scores = {inner.id_to_piece(number).encode(): -inner.get_score(number) for number in kept}
    numbers = {inner.id_to_piece(number).encode(): number for number in range(size)}
    tokenizer = open_tokenizer(str(file))
    assert (tokenizer.vocab_size, tokenizer.end) == (size, numbers[b"</s>"])
    expected = []
    for piece in merged([letter.encode() for letter in "▁" + SPOKEN.replace(" ", "▁")], scores.get):
        known = [piece] if piece in numbers else [b"<0x%02X>" % byte for byte in piece]
        expected += [numbers[each] for each in known]
    assert as_lists(tokenizer.encode([SPOKEN, ""])) == [expected, []]


@pytest.mark.parametrize("name", ["tekken_240718.json", "tekken_240911.json"])
def test_tekken_of_mistral_is_byte_pairs_by_the_book_and_more_than_two_bytes_hold(name: str, tmp_path: Path) -> None:
    library = pytest.importorskip("regex")
    pytest.importorskip("tiktoken")
    content = json.loads(mistral(name).read_text())
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in content["vocab"] if entry["rank"] < 131_072 - 1000}
    pieces = library.findall(content["config"]["pattern"], SPOKEN)
    assert "".join(pieces) == SPOKEN
    expected = [1000 + ranks[part] for piece in pieces for part in merged([bytes([byte]) for byte in piece.encode()], ranks.get)]
    tokenizer = open_tokenizer(str(mistral(name)))
    assert as_lists(tokenizer.encode([SPOKEN])) == [expected]
    assert (tokenizer.vocab_size, tokenizer.end) == (131_072, 2)
    assert max(expected) > 0xFFFF
    (tmp_path / "a.txt").write_text(SPOKEN)
    data = Data(kind="text", files=(str(tmp_path / "a.txt"),), tokenizer=str(mistral(name)))
    prepare(data, Prepare(out=str(tmp_path / "out")), 1, lambda progress: None)
    file = TokenFile(str(tmp_path / "out"))
    assert file.read(0, file.num_tokens).tolist() == [*expected, 2]
