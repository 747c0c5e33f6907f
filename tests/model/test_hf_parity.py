"""The same weights in the Hugging Face models give the same logits and loss. Skipped where transformers is not installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from framework.config import schema
from framework.model.transformer import Transformer

transformers = pytest.importorskip("transformers", minversion="5")

Scrambled = Callable[[schema.Model], Transformer]


def llama_twin(net: Transformer, model: schema.Model) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_width,
        intermediate_size=model.ffn_hidden_size,
        vocab_size=model.vocab_size,
        max_position_embeddings=model.max_positions,
        rms_norm_eps=model.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        tie_word_embeddings=model.tie_embeddings,
        pad_token_id=None,
    )
    renames = {
        "attn_norm.": "input_layernorm.",
        "attention.": "self_attn.",
        "mlp_norm.": "post_attention_layernorm.",
        "final_norm.": "norm.",
    }
    state = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        for ours, theirs in renames.items():
            name = name.replace(ours, theirs)
        state[name if name.startswith("lm_head") else f"model.{name}"] = parameter.detach().clone()
    twin = transformers.LlamaForCausalLM(config)
    twin.load_state_dict(state, strict=True)
    return twin.eval()


def gpt2_twin(net: Transformer, model: schema.Model) -> Any:
    config = transformers.GPT2Config(
        n_embd=model.hidden_size,
        n_layer=model.num_layers,
        n_head=model.num_heads,
        n_inner=model.ffn_hidden_size,
        vocab_size=model.vocab_size,
        n_positions=model.max_positions,
        layer_norm_epsilon=model.norm_eps,
        tie_word_embeddings=model.tie_embeddings,
        bos_token_id=0,
        eos_token_id=0,
    )
    own: dict[str, Tensor] = dict(net.named_parameters(remove_duplicate=False))
    state = {"transformer.wte.weight": own["embed_tokens.weight"], "transformer.wpe.weight": own["embed_positions.weight"]}
    state["lm_head.weight"] = own["lm_head.weight"]
    for kind in ("weight", "bias"):
        state[f"transformer.ln_f.{kind}"] = own[f"final_norm.{kind}"]
        for i in range(model.num_layers):
            layer, block = f"layers.{i}", f"transformer.h.{i}"
            state[f"{block}.ln_1.{kind}"] = own[f"{layer}.attn_norm.{kind}"]
            state[f"{block}.ln_2.{kind}"] = own[f"{layer}.mlp_norm.{kind}"]
            # GPT-2 keeps q, k and v in one matrix, and these four matrices as [in, out].
            state[f"{block}.attn.c_attn.{kind}"] = torch.cat([own[f"{layer}.attention.{part}_proj.{kind}"] for part in "qkv"])
            state[f"{block}.attn.c_proj.{kind}"] = own[f"{layer}.attention.o_proj.{kind}"]
            state[f"{block}.mlp.c_fc.{kind}"] = own[f"{layer}.mlp.up_proj.{kind}"]
            state[f"{block}.mlp.c_proj.{kind}"] = own[f"{layer}.mlp.down_proj.{kind}"]
    turned = {name: tensor.detach().t().clone() if ".c_" in name else tensor.detach().clone() for name, tensor in state.items()}
    twin = transformers.GPT2LMHeadModel(config)
    twin.load_state_dict(turned, strict=True)
    return twin.eval()


def agree(net: Transformer, twin: Any, ids: Tensor) -> None:
    torch.testing.assert_close(net(ids), twin(ids).logits, rtol=1e-4, atol=1e-4)
    targets = torch.full_like(ids, -100)
    targets[:, :-1] = ids[:, 1:]
    theirs = twin(ids, labels=ids).loss.item()  # shifts by itself, and takes the mean
    assert net(ids, targets).item() / (ids.numel() - len(ids)) == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": False},
        {"num_kv_heads": None, "head_dim": None},
        {"num_kv_heads": 1, "rope_theta": 10000.0},
        {"norm_eps": 0.1, "num_layers": 3},
    ],
    ids=str,
)
def test_llama(changes: dict[str, Any], llama: schema.Model, scrambled: Scrambled, ids: Tensor) -> None:
    model = replace(llama, **changes)
    net = scrambled(model)
    agree(net, llama_twin(net, model), ids)


@pytest.mark.parametrize("changes", [{}, {"num_heads": 4, "num_layers": 3}, {"norm_eps": 0.1}], ids=str)
def test_gpt2(changes: dict[str, Any], gpt2: schema.Model, scrambled: Scrambled, ids: Tensor) -> None:
    model = replace(gpt2, **changes)
    net = scrambled(model)
    agree(net, gpt2_twin(net, model), ids)
