"""The shape of a decoder that reads global state projected from an encoder's output, and of its weights.

`config.json` has Hugging Face's field names where the meaning is theirs; the architecture has a name of our own, because no
published weights have this shape (`models.projected` says what is ours). The folder's tensors have the names that
`projected_shapes` lists, fused as they are computed. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.config import Fields, Rope, rope_fields, rope_scaling
from models.errors import ModelFileError
from models.kv_layout import NumberFormat, StateKind, grouped_query, sliding_window
from models.weights import EMBED, FINAL_NORM, HEAD

PROJECTED_ARCHITECTURE = "ProjectedGlobalForCausalLM"
PROJECTED_LAYOUT_VERSION = 1  # of the cached KV's bytes: raise it when their meaning changes
SOURCE_NORM = "source_norm.weight"
SOURCE_KV = "source_kv.weight"


@dataclass(frozen=True, slots=True)
class ProjectedConfig:
    """`window`: how many tokens back every layer sees by itself. Beyond it, decoder layers see what the encoder left."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    encoder_layers: int
    decoder_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    max_context: int
    norm_eps: float
    rope: Rope
    tied_embeddings: bool

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(
                f"num_attention_heads is {self.num_heads}; it must be a multiple of num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ModelFileError(f"head_dim is {self.head_dim}; rotary embedding needs an even number")

    @property
    def num_layers(self) -> int:
        return self.encoder_layers + self.decoder_layers

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer of the cache: the encoder's, the one source of global state, the decoder's."""
        return (*[self.window] * self.encoder_layers, None, *[self.window] * self.decoder_layers)

    @property
    def layout_name(self) -> str:
        return "projected"

    @property
    def layout_version(self) -> int:
        return PROJECTED_LAYOUT_VERSION

    def kv_states(self, kept_as: NumberFormat) -> tuple[StateKind, ...]:
        """Global state first, then that of the windows."""
        return (
            grouped_query(1, self.num_kv_heads, self.head_dim, kept_as),
            sliding_window(self.num_layers, self.num_kv_heads, self.head_dim, kept_as, self.window),
        )


def projected_from_hf(values: Mapping[str, Any], source: str) -> ProjectedConfig:
    """The configuration in a `config.json`. Raises `ModelFileError` for what is not computed here."""
    fields = Fields(values, source)
    for name, allowed in (("hidden_act", "silu"), ("quantization_config", None)):
        if fields.get(name) not in (None, allowed):
            raise fields.error(name, fields.get(name), allowed or "null")
    heads, hidden = fields.count("num_attention_heads"), fields.count("hidden_size")
    head_dim = fields.count("head_dim", hidden // heads)
    context = fields.count("max_position_embeddings")
    return ProjectedConfig(
        architecture=PROJECTED_ARCHITECTURE,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        encoder_layers=fields.count("num_encoder_layers"),
        decoder_layers=fields.count("num_decoder_layers"),
        num_heads=heads,
        num_kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=head_dim,
        window=fields.count("sliding_window"),
        max_context=context,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=Rope(head_dim, rope_fields(fields).number("rope_theta", 10000.0), context, rope_scaling(fields)),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
    )


def projected_shapes(config: ProjectedConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor's name -> the shape it must have."""
    hidden, size = config.hidden_size, config.intermediate_size
    queries, kv = config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBED: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    shapes |= {SOURCE_NORM: (hidden,), SOURCE_KV: (kv, hidden)}
    for layer in range(config.num_layers):
        decoder = layer >= config.encoder_layers
        parts: dict[str, tuple[int, ...]] = {
            "attention_norm.weight": (hidden,),
            "qkv.weight": (queries + kv, hidden),
            "output.weight": (hidden, 2 * queries if decoder else queries),
            "feed_forward_norm.weight": (hidden,),
            "gate_up.weight": (2 * size, hidden),
            "down.weight": (hidden, size),
        }
        if decoder:
            parts["global_query.weight"] = (queries, hidden)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in parts.items()}
    return shapes
