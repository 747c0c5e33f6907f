"""config.json against the settings: what is read, what is refused by name, what is written; and settings that contradict it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from framework.base.errors import ConfigError
from framework.config import hf
from framework.config.compose import compose
from framework.config.schema import Model

# As transformers 4 writes it, keys that do not matter here included.
FOUR: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": [2, 3], "head_dim": 12, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.03, "intermediate_size": 96,
    "max_position_embeddings": 256, "mlp_bias": False, "num_attention_heads": 8, "num_hidden_layers": 3, "num_key_value_heads": 2,
    "pretraining_tp": 1, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.44.0", "use_cache": True, "vocab_size": 99,
}  # fmt: skip
FIVE = {key: value for key, value in FOUR.items() if not key.startswith(("rope_", "torch_"))}
FIVE |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "dtype": "bfloat16"}
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 50, "n_ctx": 64}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
MODEL = Model(
    hidden_size=64, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=12, ffn_hidden_size=96, vocab_size=99, max_positions=256,
    norm_eps=1e-6, rope_theta=500000.0, tie_embeddings=True, init_std=0.03,
)  # fmt: skip


def put(folder: Path, page: Mapping[str, Any], **changes: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**page, **changes}))
    return str(folder)


@pytest.mark.parametrize("page", [FOUR, FIVE], ids=["4", "5"])
def test_both_versions_say_the_same(page: dict[str, Any], tmp_path: Path) -> None:
    assert hf.read(put(tmp_path, page)).model == MODEL


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"attention_bias": True}, {"attention_bias": "all"}),
        ({"attention_bias": True, "mlp_bias": True}, {"bias": True}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 8}),
        ({"head_dim": None}, {"head_dim": 8}),
        ({"model_type": "qwen2"}, {"attention_bias": "qkv"}),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4}, {"attention_bias": "qkv"}),
        ({"model_type": "qwen3"}, {"qk_norm": True}),
        ({"model_type": "mistral", "sliding_window": None}, {}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_scaling": "linear", "rope_factor": 2.0}),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_positions": 64},
        ),
    ],
    ids=str,
)
def test_what_families_have_of_their_own(changes: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    assert hf.read(put(tmp_path, FOUR, **changes)).model == replace(MODEL, **wanted)


def test_gpt2_with_the_defaults_that_its_file_leaves_out(tmp_path: Path) -> None:
    model = hf.read(put(tmp_path, GPT2)).model
    assert model == Model(
        hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8, ffn_hidden_size=128, vocab_size=50, max_positions=64,
        norm="layernorm", position="learned", mlp="gelu", bias=True, dropout=0.1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("key", "page"),
    [
        ("model_type", {**FOUR, "model_type": "gemma"}),
        ("model_type", {key: value for key, value in FOUR.items() if key != "model_type"}),
        ("hidden_act", {**FOUR, "hidden_act": "gelu"}),
        ("rope_scaling: rope_type", {**FOUR, "rope_scaling": {"type": "yarn", "factor": 2.0}}),
        ("rope_parameters: rope_type", {**FIVE, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        ("rope_parameters: partial_rotary_factor", {**FIVE, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
        ("partial_rotary_factor", {**FOUR, "partial_rotary_factor": 0.25}),
        ("mlp_bias", {**FOUR, "mlp_bias": True}),
        ("attention_dropout", {**FOUR, "attention_dropout": 0.1}),
        ("quantization_config", {**FOUR, "quantization_config": {"bits": 4}}),
        ("auto_map", {**FOUR, "auto_map": {"AutoModel": "modeling_own.Own"}}),
        ("layer_types", {**FOUR, "model_type": "qwen3", "layer_types": ["full_attention", "linear_attention", "full_attention"]}),
        ("hidden_size", {**FOUR, "hidden_size": "64"}),
        ("vocab_size", {key: value for key, value in FOUR.items() if key != "vocab_size"}),
        ("num_key_value_heads", {k: v for k, v in {**FOUR, "model_type": "qwen2"}.items() if k != "num_key_value_heads"}),
        ("activation_function", {**GPT2, "activation_function": "gelu"}),
        ("scale_attn_weights", {**GPT2, "scale_attn_weights": False}),
        ("scale_attn_by_inverse_layer_idx", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
        ("attn_pdrop", {**GPT2, "attn_pdrop": 0.2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_decoder_cannot_do_is_refused_by_its_name(key: str, page: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        hf.read(put(tmp_path, page))
    assert caught.value.subject == f"{tmp_path}/config.json: {key}"
    assert caught.value.got is not None
    assert caught.value.expected


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_folder_without_a_page_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError):
        hf.read(str(tmp_path))


def test_the_page_says_what_nobody_else_has_said(tmp_path: Path) -> None:
    folder = put(tmp_path, FOUR)
    config = compose(["model=hf", f"model.init_from={folder}", "model.dropout=0.25", "model.num_layers=3", "steps=5"])
    assert config.model == replace(MODEL, init_from=folder, dropout=0.25)
    assert config.steps == 5
    assert compose(["steps=7"]).model == compose([]).model != config.model  # and nothing of it stays


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["model=hf", "model.num_layers=2"], "num_layers"),  # what the schema has as its default, said nevertheless
        (["model=hf", "model.rope_theta=10000"], "rope_theta"),
        (["model=hf", "model.num_kv_heads=null"], "num_kv_heads"),
        (["model=hf", "model.qk_norm=true"], "qk_norm"),
        (["model=tiny"], "hidden_size"),
        (["recipe=tiny"], "hidden_size"),
    ],
    ids=str,
)
def test_a_setting_that_contradicts_the_page_is_refused(words: list[str], key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([*words, f"model.init_from={put(tmp_path, FOUR)}"])
    assert caught.value.subject == f"model.{key}"
    assert f"as {tmp_path}/config.json says" in caught.value.expected


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": 64},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        {"model_type": "qwen3", "sliding_window": 64, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ],
    ids=str,
)
def test_a_window_must_hold_all_positions(changes: dict[str, Any], tmp_path: Path) -> None:
    words = ["model=hf", f"model.init_from={put(tmp_path, FOUR, **changes)}"]
    with pytest.raises(ConfigError) as caught:
        compose(words)
    assert "sliding_window of 64" in str(caught.value.got)
    assert compose([*words, caught.value.write]).model.max_positions == 64
    with pytest.raises(ConfigError):
        compose([*words, "model.max_positions=65"])


VARIANTS: dict[str, list[dict[str, Any]]] = {
    "llama": [{}, {"tie_embeddings": False}, {"bias": True}, {"attention_bias": "all"}, {"rope_scaling": "linear", "rope_factor": 4.0}],
    "mistral": [{}],
    "qwen2": [{"attention_bias": "qkv"}],
    "qwen3": [{"qk_norm": True}, {"qk_norm": True, "attention_bias": "all"}],
}
STRETCHED = {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_low_freq": 0.5, "rope_high_freq": 2.0, "rope_original_positions": 64}


@pytest.mark.parametrize("family", VARIANTS)
def test_what_is_written_is_read_again(family: str, tmp_path: Path) -> None:
    for changes in [*VARIANTS[family], {**VARIANTS[family][0], **STRETCHED}]:
        model = replace(MODEL, **changes)
        assert hf.family_of(model, family) == family
        page = hf.write(model, family, "bf16", FOUR)
        assert hf.read(put(tmp_path, page)).model == model
        four = {key: value for key, value in page.items() if key not in ("rope_parameters", "dtype")}
        assert hf.read(put(tmp_path, four)).model == model
        assert (page["torch_dtype"], page["dtype"], page["eos_token_id"]) == ("bfloat16", "bfloat16", [2, 3])


def test_a_family_is_found_for_a_model_and_none_for_a_mixture() -> None:
    assert hf.family_of(replace(MODEL, attention_bias="qkv"), None) == "qwen2"
    assert hf.family_of(replace(MODEL, attention_bias="qkv"), "mistral") == "qwen2"
    assert hf.family_of(MODEL, None) == "llama"
    assert hf.family_of(replace(MODEL, hidden_size=66), None) == "mistral"
    for changes in ({"norm": "layernorm"}, {"qk_norm": True, "attention_bias": "qkv"}, {"mlp": "gelu"}, {"position": "learned"}):
        with pytest.raises(ConfigError, match=r"convert\.to"):
            hf.family_of(replace(MODEL, **changes), None)
