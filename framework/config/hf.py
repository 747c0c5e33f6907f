"""config.json of a Hugging Face model as our Model settings, and back. JSON alone, no torch.

transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`, `dtype`) are read; what is written serves both.
Whatever decides what the weights compute and the decoder cannot do is refused by its name in the file; nothing is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from framework.base.errors import ConfigError
from framework.config.schema import Model

CONFIG = "config.json"
CLASSES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}  # fmt: skip
"""model_type: the class that transformers makes of it."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Of config.json what is no matter of the decoder, and goes along."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
OF_TRAINING = {"init_from", "dropout", "init_std"}
"""Settings of Model that do not change what given weights compute."""


@dataclass(frozen=True)
class Published:
    """What a config.json says: the settings, and how many positions its attention sees at most (None: all that there are)."""

    model: Model
    family: str
    window: int | None
    path: str


class Page:
    """A config.json as it is read: every letter names its path and the key."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self.values, self.path = values, path

    def get(self, key: str, missing: Any = None) -> Any:
        """The value; `missing` where there is none, or null."""
        value = self.values.get(key)
        return missing if value is None else value

    def number(self, key: str, missing: int | None = None) -> int:
        """A whole number, 1 or more."""
        value = self.get(key, missing)
        if type(value) is not int or value < 1:
            raise self.refused(key, value, "a whole number, 1 or more")
        return value

    def real(self, key: str, missing: float) -> float:
        value = self.get(key, missing)
        if type(value) not in (int, float):
            raise self.refused(key, value, "a number")
        return float(value)

    def only(self, key: str, allowed: Sequence[Any], missing: Any) -> Any:
        """The value, which the decoder can do if it is one of `allowed`."""
        value = self.get(key, missing)
        if value not in allowed:
            raise self.refused(key, value, " or ".join(map(str, allowed)) + ": the decoder has nothing else")
        return value

    def refused(self, key: str, got: object, expected: str, write: str = "") -> ConfigError:
        return ConfigError(f"{self.path}: {key}", "nothing" if got is None else got, expected, write)


def read(folder: str) -> Published:
    """The settings of the model in a Hugging Face folder. Raises ConfigError."""
    path = Path(folder, CONFIG)
    write = "the name of a folder with config.json and *.safetensors"
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError("model.init_from", f"{path}: {error.strerror}", "a Hugging Face folder", write) from None
    except ValueError as error:
        raise ConfigError(str(path), f"no JSON: {error}", "the config.json of a model") from None
    if not isinstance(values, dict):
        raise ConfigError(str(path), type(values).__name__, "the config.json of a model")
    page = Page(values, str(path))
    family = page.only("model_type", tuple(CLASSES), None)
    for key, expected in (("auto_map", "a model that transformers itself has"), ("quantization_config", "weights that are not quantised")):
        if page.get(key):
            raise page.refused(key, page.get(key), expected)
    if family == "gpt2":
        return Published(_gpt2(page), family, None, str(path))
    model = _llama(page, family)
    return Published(model, family, _window(page, family, model.num_layers), str(path))


def _llama(page: Page, family: str) -> Model:
    """Llama, and those that came of it."""
    page.only("hidden_act", ("silu", "swish"), "silu")
    page.only("attention_dropout", (0,), 0)
    page.only("partial_rotary_factor", (1,), 1)
    hidden, heads = page.number("hidden_size"), page.number("num_attention_heads")
    usual_width = 128 if family == "qwen3" and "head_dim" not in page.values else hidden // heads
    return Model(
        hidden_size=hidden,
        num_layers=page.number("num_hidden_layers"),
        num_heads=heads,
        # Where the key is missing the others mean a number of their own: nobody meant that.
        num_kv_heads=page.number("num_key_value_heads", heads if family == "llama" or "num_key_value_heads" in page.values else None),
        head_dim=page.number("head_dim", usual_width),
        ffn_hidden_size=page.number("intermediate_size"),
        vocab_size=page.number("vocab_size"),
        max_positions=page.number("max_position_embeddings"),
        norm_eps=page.real("rms_norm_eps", 1e-6),
        tie_embeddings=page.only("tie_word_embeddings", (True, False), False),
        init_std=page.real("initializer_range", 0.02),
        qk_norm=family == "qwen3",
        **_biases(page, family),
        **_rope(page),
    )


def _biases(page: Page, family: str) -> dict[str, Any]:
    if family in ("mistral", "qwen2"):
        return {"bias": False, "attention_bias": "qkv" if family == "qwen2" else "none"}
    attention = page.only("attention_bias", (True, False), False)
    mlp = page.only("mlp_bias", (True, False) if attention else (False,), False) if family == "llama" else False
    return {"bias": mlp, "attention_bias": "all" if attention and not mlp else "none"}


def _rope(page: Page) -> dict[str, Any]:
    """Of transformers 5 `rope_parameters`; of 4 `rope_theta` and `rope_scaling`, which may be null."""
    given = page.get("rope_parameters", page.get("rope_scaling", {}))
    key = "rope_parameters" if page.get("rope_parameters") else "rope_scaling"
    rope = Page({"rope_theta": page.get("rope_theta"), **given} if isinstance(given, dict) else {"rope_type": given}, f"{page.path}: {key}")
    kind = rope.only("rope_type", ("default", "linear", "llama3"), rope.get("type", "default"))
    rope.only("partial_rotary_factor", (1,), 1)
    settings: dict[str, Any] = {"rope_theta": rope.real("rope_theta", 10000.0)}
    if kind != "default":
        settings |= {"rope_scaling": kind, "rope_factor": rope.real("factor", 1.0)}
    if kind == "llama3":
        settings["rope_low_freq"] = rope.real("low_freq_factor", 1.0)
        settings["rope_high_freq"] = rope.real("high_freq_factor", 4.0)
        settings["rope_original_positions"] = rope.number("original_max_position_embeddings")
    return settings


def _window(page: Page, family: str, layers: int) -> int | None:
    """How far attention sees in the layer where it sees least; None: to the beginning."""
    kinds = set(page.get("layer_types", ()))
    for kind in sorted(kinds - {"full_attention", "sliding_attention"}):
        raise page.refused("layer_types", kind, "full_attention: the decoder has nothing else")
    usual = None if "sliding_window" in page.values else 4096
    if family == "mistral":
        return page.get("sliding_window", usual)
    in_force = page.get("use_sliding_window", False) and page.get("max_window_layers", 0) < layers
    return page.get("sliding_window", usual) if in_force or "sliding_attention" in kinds else None


def _gpt2(page: Page) -> Model:
    page.only("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    page.only("scale_attn_weights", (True,), True)
    page.only("scale_attn_by_inverse_layer_idx", (False,), False)
    page.only("add_cross_attention", (False,), False)
    dropout = page.real("resid_pdrop", 0.1)
    for key in ("embd_pdrop", "attn_pdrop"):
        page.only(key, (dropout,), 0.1)
    hidden, heads = page.number("n_embd"), page.number("n_head")
    return Model(
        hidden_size=hidden,
        num_layers=page.number("n_layer"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_hidden_size=page.number("n_inner", 4 * hidden),
        vocab_size=page.number("vocab_size"),
        max_positions=page.number("n_positions"),
        norm="layernorm",
        norm_eps=page.real("layer_norm_epsilon", 1e-5),
        position="learned",
        mlp="gelu",
        bias=True,
        tie_embeddings=page.only("tie_word_embeddings", (True, False), True),
        dropout=dropout,
        init_std=page.real("initializer_range", 0.02),
    )


def refuse_contradictions(model: Model, published: Published) -> None:
    """Raise ConfigError where settings that somebody gave say something else than config.json.

    Rotary positions may be more or fewer than there; a window of attention must hold all of them.
    """
    for spec in fields(Model):
        if spec.name in OF_TRAINING or (spec.name == "max_positions" and model.position == "rope"):
            continue
        given, said = _effective(model, spec.name), _effective(published.model, spec.name)
        if given != said:
            write = f"model=hf, and no other model.{spec.name}"
            raise ConfigError(f"model.{spec.name}", given, f"{said}, as {published.path} says", write)
    if published.window is not None and published.window < model.max_positions:
        got = f"{model.max_positions} with a sliding_window of {published.window} in {published.path}"
        write = f"model.max_positions={published.window}"
        raise ConfigError("model.max_positions", got, "no more positions than the window: the decoder's attention sees all", write)


def _effective(model: Model, name: str) -> Any:
    """A setting, or what its null stands for."""
    return {"num_kv_heads": model.kv_heads, "head_dim": model.head_width}.get(name, getattr(model, name))


# ---------------------------------------------------------------- out


def family_of(model: Model, wanted: str | None) -> str:
    """The model_type that says what `model` is: `wanted` where it can, or else the first that can. Raises ConfigError where none can."""
    rotary = (model.norm, model.position, model.mlp) == ("rmsnorm", "rope", "swiglu")
    plain = rotary and not model.qk_norm
    bare = not model.bias and model.attention_bias == "none"
    whole_heads = model.kv_heads == model.num_heads and model.head_width * model.num_heads == model.hidden_size
    fits = {
        "llama": plain and model.attention_bias != "qkv" and model.hidden_size % model.num_heads == 0,  # so its class demands
        "mistral": plain and bare,
        "qwen2": plain and model.attention_bias == "qkv",
        "qwen3": rotary and model.qk_norm and not model.bias and model.attention_bias != "qkv",
        "gpt2": (model.norm, model.position, model.mlp, model.bias) == ("layernorm", "learned", "gelu", True)
        and whole_heads and not model.qk_norm,
    }  # fmt: skip
    if wanted is not None and fits.get(wanted):
        return wanted
    for family, fit in fits.items():
        if fit:
            return family
    got = f"norm {model.norm}, position {model.position}, mlp {model.mlp}, bias {model.bias}, attention_bias {model.attention_bias}, "
    got += f"qk_norm {model.qk_norm}, num_kv_heads {model.kv_heads}, head_dim {model.head_width}"
    raise ConfigError("convert.to", f"hf of a model with {got}", f"what one of {', '.join(CLASSES)} can say", "convert.to=weights")


def write(model: Model, family: str, dtype: str, carried: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json. `carried` is that of the model that training began from: its token ids go along."""
    head = {"architectures": [CLASSES[family]], "model_type": family, "dtype": DTYPES[dtype], "torch_dtype": DTYPES[dtype]}
    ids = {key: carried.get(key) for key in TOKEN_IDS}
    tail = {"vocab_size": model.vocab_size, "tie_word_embeddings": model.tie_embeddings, "initializer_range": model.init_std}
    return {**head, **(_as_gpt2(model) if family == "gpt2" else _as_llama(model, family)), **tail, **ids}


def _as_gpt2(model: Model) -> dict[str, Any]:
    return {
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_inner": model.ffn_hidden_size,
        "n_positions": model.max_positions,
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": "gelu_new",
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), model.dropout),
    }


def _as_llama(model: Model, family: str) -> dict[str, Any]:
    scaling: dict[str, Any] = {}
    if model.rope_scaling != "none":
        scaling = {"rope_type": model.rope_scaling, "factor": model.rope_factor}
    if model.rope_scaling == "llama3":
        scaling |= {"low_freq_factor": model.rope_low_freq, "high_freq_factor": model.rope_high_freq}
        scaling["original_max_position_embeddings"] = model.rope_original_positions
    own: dict[str, dict[str, Any]] = {
        "llama": {"attention_bias": model.out_bias, "mlp_bias": model.bias},
        "mistral": {"sliding_window": None},
        "qwen2": {"use_sliding_window": False, "sliding_window": None},
        "qwen3": {"attention_bias": model.out_bias, "use_sliding_window": False, "sliding_window": None},
    }
    return {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_width,
        "intermediate_size": model.ffn_hidden_size,
        "max_position_embeddings": model.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling or None,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta, **scaling},
        **own[family],
    }
