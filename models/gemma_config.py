"""The shape of a Gemma 2 or Gemma 3 text decoder, read from a Hugging Face `config.json`.

Most layers see a sliding window of tokens, the others the whole context: every second one in Gemma 2, every sixth in Gemma 3,
unless the file lists them. Gemma 3's window layers turn at a rotary base of their own. Images are not supported. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.config import Fields, GemmaTraits, ModelConfig, Rope, layer_windows, rope_scaling

GEMMA_ARCHITECTURES = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")


def gemma_from_hf(values: Mapping[str, Any], source: str) -> ModelConfig:
    """The configuration in a `config.json`. Raises `ModelFileError` for what is not computed here."""
    fields = Fields(values, source)
    architecture = values["architectures"][0]
    gemma3 = architecture == "Gemma3ForCausalLM"
    _refuse_unsupported(fields)
    context, head_dim = fields.count("max_position_embeddings"), fields.count("head_dim", 256)
    whole, window_rope = _ropes(values, source, gemma3, head_dim, context)
    attention_bias = fields.flag("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=fields.count("num_attention_heads"),
        num_kv_heads=fields.count("num_key_value_heads"),
        head_dim=head_dim,
        max_context=context,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=whole.theta,
        rope_scaling=whole.scaling,
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=gemma3,
        layer_windows=_windows(fields, gemma3),
        gemma=GemmaTraits(
            embedding_scale=fields.count("hidden_size") ** 0.5,
            softmax_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
            attention_cap=None if gemma3 else _cap(fields, "attn_logit_softcapping"),
            logit_cap=_cap(fields, "final_logit_softcapping"),
            window_rope=window_rope,
        ),
    )


def _windows(fields: Fields, gemma3: bool) -> tuple[int | None, ...]:
    every = fields.count("sliding_window_pattern", 6 if gemma3 else 2)
    layers = range(1, fields.count("num_hidden_layers") + 1)
    return layer_windows(fields, ["sliding_attention" if layer % every else "full_attention" for layer in layers])


def _ropes(values: Mapping[str, Any], source: str, gemma3: bool, head_dim: int, context: int) -> tuple[Rope, Rope]:
    """Of global layers and of window layers; Gemma 2 has one for both."""
    nested = values.get("rope_parameters")
    if not gemma3:
        rotary = Fields(nested or values, source)
        one = Rope(head_dim, rotary.number("rope_theta", 10000.0), context, rope_scaling(Fields(values, source)))
        return one, one
    if isinstance(nested, Mapping) and "full_attention" in nested:
        kinds = [nested["full_attention"], nested["sliding_attention"]]
    else:
        local = {"rope_theta": values.get("rope_local_base_freq", 10000.0)}
        kinds = [{"rope_theta": values.get("rope_theta", 1e6), **(values.get("rope_scaling") or {})}, local]
    ropes = [
        Rope(
            head_dim,
            Fields(kind, f"{source} rope_parameters").number("rope_theta"),
            context,
            rope_scaling(Fields({"rope_parameters": kind}, source)),
        )
        for kind in kinds
    ]
    return ropes[0], ropes[1]


def _cap(fields: Fields, name: str) -> float | None:
    return None if fields.get(name) is None else fields.number(name)


def _refuse_unsupported(fields: Fields) -> None:
    allowed: dict[str, tuple[Any, ...]] = {
        "hidden_activation": (None, "gelu_pytorch_tanh"),
        "use_bidirectional_attention": (None, False),
        "quantization_config": (None,),
    }
    for name, values in allowed.items():
        if fields.get(name) not in values:
            raise fields.error(name, fields.get(name), ", ".join(str(value) for value in values if value is not None) or "null")
