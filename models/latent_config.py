"""The configuration of a model converted to latent attention, as it stands in the folder that the conversion writes.

Field names are DeepSeek's where the meaning is. What no DeepSeek model has is written out: the frequencies of the rotary pairs
that were kept, the scale of the logits, and that latents are not normed; so the architecture has a name of its own, and what
reads DeepSeek folders elsewhere refuses these instead of computing something else. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.config import Fields, Rope
from models.deepseek_config import DeepseekConfig
from models.errors import ModelFileError

LATENT_ARCHITECTURE = "ConvertedLatentForCausalLM"
_COUNTS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_context": "max_position_embeddings",
    "kv_rank": "kv_lora_rank",
    "rope_dim": "qk_rope_head_dim",
    "nope_dim": "qk_nope_head_dim",
    "value_dim": "v_head_dim",
}


def latent_from_hf(values: Mapping[str, Any], source: str) -> DeepseekConfig:
    """The configuration in a converted folder's `config.json`. Raises `ModelFileError`."""
    fields = Fields(values, source)
    counts: dict[str, Any] = {ours: fields.count(theirs) for ours, theirs in _COUNTS.items()}
    turning = fields.get("rope_frequencies")
    pairs = counts["rope_dim"] // 2
    if not isinstance(turning, list) or len(turning) != pairs or not all(isinstance(each, float) for each in turning):
        raise ModelFileError(f"{source}: rope_frequencies is {turning!r}; it must be a list of {pairs} numbers")
    rope = Rope(counts["rope_dim"], 0.0, counts["max_context"], frequencies=tuple(turning))
    return DeepseekConfig(
        **counts,
        architecture=LATENT_ARCHITECTURE,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        query_rank=None,
        rope=rope,
        softmax_scale=fields.number("softmax_scale", 1.0),
        dense_layers=counts["num_layers"],
        moe=None,
        interleaved=False,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        latent_norm=False,
    )


def latent_to_hf(config: DeepseekConfig) -> dict[str, Any]:
    """What `latent_from_hf` reads."""
    return {
        "architectures": [LATENT_ARCHITECTURE],
        "model_type": "converted_latent",
        **{theirs: getattr(config, ours) for ours, theirs in _COUNTS.items()},
        "rms_norm_eps": config.norm_eps,
        "rope_frequencies": list(config.rope.frequencies or ()),
        "softmax_scale": config.softmax_scale,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": "float32",
    }
