"""The names of our parameters in Hugging Face files: one table per family, read in both directions. Pure.

Llama, Mistral, Qwen2 and Qwen3 have the same names; GPT-2 joins query, key and value, and keeps its matrices as [in, out].
"""

from __future__ import annotations

from framework.checkpoint.export import Entry
from framework.config import parameters
from framework.config.schema import Model

LLAMA = {
    "attn_norm": "input_layernorm",
    "attention.": "self_attn.",
    "mlp_norm": "post_attention_layernorm",
    "final_norm": "model.norm",
    "layers.": "model.layers.",
    "embed_tokens": "model.embed_tokens",
}
GPT2 = {
    "attn_norm": "ln_1",
    "attention.q_proj": "attn.c_attn",
    "attention.k_proj": "attn.c_attn",
    "attention.v_proj": "attn.c_attn",
    "attention.o_proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
    "final_norm": "transformer.ln_f",
    "layers.": "transformer.h.",
    "embed_tokens": "transformer.wte",
    "embed_positions": "transformer.wpe",
}
BUFFERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Ends of names that older files have beside the weights: they follow from the settings."""


def entries(model: Model, family: str) -> tuple[Entry, ...]:
    """Every tensor of the files of `family`, in the order of the forward pass. A tied head is not among them."""
    parts: dict[str, list[str]] = {}
    for entry in parameters.table(model):
        if entry.tied_to is None:
            parts.setdefault(name_of(entry.name, family), []).append(entry.name)
    return tuple(Entry(name, tuple(members), turned=_is_turned(name)) for name, members in parts.items())


def name_of(name: str, family: str) -> str:
    """The name in the files of the tensor that has, or is a part of, our `name`."""
    for ours, theirs in (GPT2 if family == "gpt2" else LLAMA).items():
        name = name.replace(ours, theirs)
    return name


def _is_turned(name: str) -> bool:
    """Of GPT-2's names: whether it is the weight of what is called Conv1D there."""
    return ".c_" in name and name.endswith(".weight")


def prefix(family: str) -> str:
    """Of every name but the head's; files of a model that was saved without its head lack it."""
    return "transformer." if family == "gpt2" else "model."
