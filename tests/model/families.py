"""Tiny random models of transformers, family by family, in awkward shapes: eight heads, two of keys, widths that are no quotient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROPE = {"rope_type": "default", "rope_theta": 500000.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SHAPE: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 10, "intermediate_size": 56,
    "vocab_size": 61, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_parameters": ROPE,
    "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None, "attn_implementation": "eager",
}  # fmt: skip
GPT2_SHAPE: dict[str, Any] = {
    "n_embd": 48, "n_layer": 2, "n_head": 8, "n_inner": 56, "vocab_size": 61, "n_positions": 512, "layer_norm_epsilon": 1e-6,
    "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager", **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**SHAPE, "tie_word_embeddings": True}),
    "llama-untied-biased": ("Llama", {**SHAPE, "attention_bias": True, "mlp_bias": True}),
    "llama-attention-bias": ("Llama", {**SHAPE, "attention_bias": True}),
    "llama-stretched": ("Llama", {**SHAPE, "rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", {**SHAPE, "rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}}),
    "mistral": ("Mistral", {**SHAPE, "sliding_window": None}),
    "mistral-tied": ("Mistral", {**SHAPE, "sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {**SHAPE, "tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2", SHAPE),
    "qwen3": ("Qwen3", {**SHAPE, "tie_word_embeddings": True}),
    "qwen3-untied": ("Qwen3", SHAPE),
    "qwen3-untied-biased": ("Qwen3", {**SHAPE, "attention_bias": True}),
    "gpt2": ("GPT2", GPT2_SHAPE),
    "gpt2-untied": ("GPT2", {**GPT2_SHAPE, "tie_word_embeddings": False, "n_inner": None}),
}


def make(name: str, folder: Path, max_shard_size: str = "5GB", dtype: torch.dtype = torch.float32) -> Any:
    """A model whose every parameter is random, saved in `folder`; in eval mode."""
    import transformers

    prefix, shape = FAMILIES[name]
    config = getattr(transformers, f"{prefix}Config")(**shape)
    head = "GPT2LMHeadModel" if prefix == "GPT2" else f"{prefix}ForCausalLM"
    model = getattr(transformers, head)(config).to(dtype)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            centre = 1.0 if "norm" in key or (".ln_" in key and key.endswith("weight")) else 0.0
            parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model.eval()


def tensors(folder: Path) -> dict[str, Tensor]:
    """Everything in the safetensors files of a folder."""
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
