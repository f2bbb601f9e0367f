"""The shape of a Llama-like decoder, read from a Hugging Face `config.json` or from GGUF metadata.

Decides nothing but whether a configuration is one that `models.llama` computes exactly; everything else is refused with the
name of the field, the value found and the values allowed. Rotary scaling follows the published rules that Llama models
carry, `linear` (positions divided by a factor) and `llama3` (long wavelengths divided, short ones kept, a ramp between), and
yarn (the same with bounds in dimensions, and a larger amplitude; Peng et al. 2023).
Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.errors import ModelFileError
from models.kv_layout import NumberFormat, StateKind, grouped_query, sliding_window

HF_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
GQA_LAYOUT_VERSION = 1  # of the cached KV's bytes: raise it when their meaning changes
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """`kind` is "linear" (only `factor` counts), "llama3" or "yarn".

    Wavelengths that turn less than `low_freq_factor` times in the original context are divided, those that turn more than
    `high_freq_factor` times are kept. yarn rounds these bounds to whole dimensions if `truncate`, and multiplies cos and sin
    by `amplitude`.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    amplitude: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of `dim` dimensions. `frequencies` replaces those that follow from theta, one a pair."""

    dim: int
    theta: float
    max_context: int
    scaling: RopeScaling | None = None
    frequencies: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class GemmaTraits:
    """What sets Gemma apart from Llama, besides norms after attention and feed-forward, and gelu: scaled embeddings, its own
    scale of attention logits, caps on logits, and another rotary base in window layers."""

    embedding_scale: float
    softmax_scale: float
    attention_cap: float | None
    logit_cap: float | None
    window_rope: Rope


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that `models.llama` needs to know of a model besides its weights. `layer_windows`: how many tokens each layer
    sees back, None for all; empty if all layers see everything."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[int | None, ...] = ()
    gemma: GemmaTraits | None = None

    @property
    def rope(self) -> Rope:
        return Rope(self.head_dim, self.rope_theta, self.max_context, self.rope_scaling)

    @property
    def layout_name(self) -> str:
        return "gqa"

    @property
    def layout_version(self) -> int:
        return GQA_LAYOUT_VERSION

    def kv_states(self, kept_as: NumberFormat) -> tuple[StateKind, ...]:
        """Global state first, then that of each window."""
        windows = [window for window in self.layer_windows if window is not None]
        whole = grouped_query(self.num_layers - len(windows), self.num_kv_heads, self.head_dim, kept_as)
        return (
            whole,
            *(
                sliding_window(windows.count(window), self.num_kv_heads, self.head_dim, kept_as, window)
                for window in sorted(set(windows))
            ),
        )

    def window(self, layer: int) -> int | None:
        return self.layer_windows[layer] if self.layer_windows else None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(
                f"num_attention_heads is {self.num_heads}; it must be a multiple of num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ModelFileError(f"head_dim is {self.head_dim}; rotary embedding needs an even number")


class Fields:
    """Typed access to a mapping of metadata, with errors that name `source` and field."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self._source = source

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def count(self, name: str, default: int | None = None) -> int:
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, value, "a positive integer")
        return value

    def count_or_none(self, name: str) -> int | None:
        return None if self._values.get(name) is None else self.count(name)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(name, value, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def error(self, name: str, value: object, allowed: str) -> ModelFileError:
        found = "is missing" if value is None else f"is {value!r}"
        return ModelFileError(f"{self._source}: {name} {found}; allowed: {allowed}")


def config_from_hf(values: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """The configuration in a Hugging Face `config.json`. Raises `ModelFileError` for what is not computed here."""
    fields = Fields(values, source)
    architecture = _hf_architecture(fields)
    _refuse_unsupported(fields)
    heads = fields.count("num_attention_heads")
    hidden = fields.count("hidden_size")
    qwen2 = architecture == "Qwen2ForCausalLM"
    attention_bias = fields.flag("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=fields.count("head_dim", hidden // heads) if fields.get("head_dim") is not None else hidden // heads,
        max_context=fields.count("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_fields(fields).number("rope_theta", 10000.0),
        rope_scaling=rope_scaling(fields),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=qwen2 or attention_bias,
        output_bias=attention_bias and not qwen2,
        qk_norm=architecture == "Qwen3ForCausalLM",
        layer_windows=_hf_windows(fields, architecture),
    )


def _hf_architecture(fields: Fields) -> str:
    found = fields.get("architectures")
    name = found[0] if isinstance(found, list) and found else None
    if name not in HF_ARCHITECTURES:
        raise fields.error("architectures", found, ", ".join(HF_ARCHITECTURES))
    return str(name)


def _refuse_unsupported(fields: Fields) -> None:
    if fields.get("hidden_act") not in (None, "silu"):
        raise fields.error("hidden_act", fields.get("hidden_act"), "silu")
    if fields.get("mlp_bias"):
        raise fields.error("mlp_bias", True, "false")
    window = fields.get("sliding_window")
    if window is not None and fields.get("architectures") == ["LlamaForCausalLM"]:
        raise fields.error("sliding_window", window, "null (attention over the whole context)")


def layer_windows(fields: Fields, default_kinds: list[str]) -> tuple[int | None, ...]:
    """The window of each layer; `default_kinds`: what each layer is where the file does not say."""
    if fields.get("sliding_window") is None or fields.get("use_sliding_window") is False:
        return ()
    window = fields.count("sliding_window")
    kinds = fields.get("layer_types") or default_kinds
    known = ("sliding_attention", "full_attention")
    if len(kinds) != len(default_kinds) or not set(kinds) <= set(known):
        raise fields.error("layer_types", kinds, f"{len(default_kinds)} of {', '.join(known)}")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()


def _hf_windows(fields: Fields, architecture: str) -> tuple[int | None, ...]:
    layers = fields.count("num_hidden_layers")
    if architecture == "MistralForCausalLM":
        return layer_windows(fields, ["sliding_attention"] * layers)
    if not fields.get("use_sliding_window"):
        return ()
    first = fields.get("max_window_layers") or 0
    return layer_windows(fields, ["sliding_attention" if i >= first else "full_attention" for i in range(layers)])


def rope_fields(fields: Fields) -> Fields:
    """Where the rotary fields are: `rope_parameters` in the newer form of config.json, the top level in the older one."""
    nested = fields.get("rope_parameters")
    return Fields(nested, "config.json rope_parameters") if isinstance(nested, Mapping) else fields


def rope_scaling(fields: Fields) -> RopeScaling | None:
    values = fields.get("rope_parameters") or fields.get("rope_scaling")
    if values is None:
        return None
    scaling = Fields(values, "config.json rope scaling")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in _ROPE_TYPES:
        raise scaling.error("rope_type", kind, ", ".join(_ROPE_TYPES))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", scaling.number("factor"))
    if kind == "yarn":
        return _yarn(scaling)
    return RopeScaling(
        "llama3",
        factor=scaling.number("factor"),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_context=scaling.count("original_max_position_embeddings"),
    )


def _yarn(scaling: Fields) -> RopeScaling:
    factor = scaling.number("factor")
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if scaling.get("attention_factor") is not None:
        amplitude = scaling.number("attention_factor")
    elif mscale and all_dim:
        amplitude = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    else:
        amplitude = yarn_mscale(factor, 1.0)
    return RopeScaling(
        "yarn",
        factor=factor,
        low_freq_factor=scaling.number("beta_slow", 1.0),
        high_freq_factor=scaling.number("beta_fast", 32.0),
        original_context=scaling.count("original_max_position_embeddings"),
        amplitude=amplitude,
        truncate=scaling.flag("truncate", True),
    )


def yarn_mscale(factor: float, mscale: float) -> float:
    """How much larger attention logits' amplitude gets when the context is stretched by `factor` (yarn, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` from which `config_from_hf` reads the same configuration."""
    values: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": config.architecture.removesuffix("ForCausalLM").lower(),
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": "float32",
    }
    if config.architecture != "Qwen2ForCausalLM":
        values["attention_bias"] = config.qkv_bias
    if any(config.layer_windows):
        values["sliding_window"] = next(window for window in config.layer_windows if window is not None)
        values["use_sliding_window"] = True
        values["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in config.layer_windows]
    if config.rope_scaling is not None:
        values["rope_scaling"] = _rope_scaling_to_hf(config.rope_scaling)
    return values


def _rope_scaling_to_hf(scaling: RopeScaling) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        values["low_freq_factor"] = scaling.low_freq_factor
        values["high_freq_factor"] = scaling.high_freq_factor
        values["original_max_position_embeddings"] = scaling.original_context
    if scaling.kind == "yarn":
        values["beta_slow"], values["beta_fast"] = scaling.low_freq_factor, scaling.high_freq_factor
        values["original_max_position_embeddings"] = scaling.original_context
        values["attention_factor"], values["truncate"] = scaling.amplitude, scaling.truncate
    return values


def config_from_gguf(metadata: Mapping[str, Any], source: str, *, tied_embeddings: bool) -> ModelConfig:
    """The configuration in GGUF metadata. `tied_embeddings`: the file has no separate output matrix."""
    fields = Fields(metadata, source)
    prefix = fields.get("general.architecture")
    if prefix not in GGUF_ARCHITECTURES:
        raise fields.error("general.architecture", prefix, ", ".join(GGUF_ARCHITECTURES))
    scaling = fields.get(f"{prefix}.rope.scaling.type")
    if scaling not in (None, "none"):
        raise fields.error(f"{prefix}.rope.scaling.type", scaling, "none")
    heads = fields.count(f"{prefix}.attention.head_count")
    hidden = fields.count(f"{prefix}.embedding_length")
    head_dim = fields.count(f"{prefix}.attention.key_length", hidden // heads)
    if fields.count(f"{prefix}.rope.dimension_count", head_dim) != head_dim:
        raise fields.error(f"{prefix}.rope.dimension_count", fields.get(f"{prefix}.rope.dimension_count"), str(head_dim))
    return ModelConfig(
        architecture=GGUF_ARCHITECTURES[prefix],
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=hidden,
        intermediate_size=fields.count(f"{prefix}.feed_forward_length"),
        num_layers=fields.count(f"{prefix}.block_count"),
        num_heads=heads,
        num_kv_heads=fields.count(f"{prefix}.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_context=fields.count(f"{prefix}.context_length"),
        norm_eps=fields.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number(f"{prefix}.rope.freq_base", 10000.0),
        tied_embeddings=tied_embeddings,
        qkv_bias=prefix == "qwen2",
        qk_norm=prefix == "qwen3",
    )
