"""The shape of a DeepSeek-V2 or -V3 decoder, read from a Hugging Face `config.json`.

Latent attention caches one compressed vector (`kv_rank`) and one rotary key (`rope_dim`) a token; the first `dense_layers`
feed-forwards are dense, the others mixtures of `shared_experts` that see every token and `routed_experts` of which each
token takes `experts_per_token`. What is not computed here is refused by field: another scoring rule, quantised weights,
biased feed-forwards. Multi-token-prediction layers are left out; they do not take part in plain decoding. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from models.config import Fields, Rope, rope_fields, rope_scaling, yarn_mscale
from models.errors import ModelFileError
from models.kv_layout import NumberFormat, StateKind, latent

DEEPSEEK_ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
MLA_LAYOUT_VERSION = 1  # of the cached state's bytes: raise it when their meaning changes


class Routing(Enum):
    """How a token's experts are chosen. V2: the largest of a softmax, everywhere or in the best groups alone; V3: the largest
    sigmoids, shifted by a learnt bias that does not weigh, in the groups with the best two."""

    GREEDY = "greedy"
    GROUP_LIMITED = "group_limited_greedy"
    BIASED = "noaux_tc"


@dataclass(frozen=True, slots=True)
class MoEConfig:
    routing: Routing
    routed_experts: int
    shared_experts: int
    experts_per_token: int
    expert_size: int
    groups: int
    groups_per_token: int
    weight_factor: float
    normalise_weights: bool

    def __post_init__(self) -> None:
        if self.routed_experts % self.groups:
            raise ModelFileError(f"n_routed_experts is {self.routed_experts}; it must be a multiple of n_group ({self.groups})")
        if self.groups_per_token > self.groups:
            raise ModelFileError(f"topk_group is {self.groups_per_token}; it must not exceed n_group ({self.groups})")
        if self.experts_per_token > self.routed_experts // self.groups * self.groups_per_token:
            raise ModelFileError(
                f"num_experts_per_tok is {self.experts_per_token}; the topk_group ({self.groups_per_token}) groups hold fewer"
            )


@dataclass(frozen=True, slots=True)
class DeepseekConfig:
    """`query_rank` None: queries are projected directly. `interleaved`: the file's rotary dimensions are paired (2i, 2i+1).
    `latent_norm`: latents are normed before they are cached."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_context: int
    norm_eps: float
    query_rank: int | None
    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    rope: Rope
    softmax_scale: float
    dense_layers: int
    moe: MoEConfig | None
    interleaved: bool = True
    attention_bias: bool = False
    tied_embeddings: bool = False
    latent_norm: bool = True

    def __post_init__(self) -> None:
        if self.rope_dim % 2:
            raise ModelFileError(f"qk_rope_head_dim is {self.rope_dim}; rotary embedding needs an even number")

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def layout_name(self) -> str:
        return "mla"

    @property
    def layout_version(self) -> int:
        return MLA_LAYOUT_VERSION

    def kv_states(self, kept_as: NumberFormat) -> tuple[StateKind, ...]:
        return (latent(self.num_layers, self.kv_rank, self.rope_dim, kept_as),)

    def is_dense(self, layer: int) -> bool:
        return layer < self.dense_layers


def deepseek_from_hf(values: Mapping[str, Any], source: str) -> DeepseekConfig:
    """The configuration in a `config.json`. Raises `ModelFileError` for what is not computed here."""
    fields = Fields(values, source)
    architecture = values["architectures"][0]
    v3 = architecture == "DeepseekV3ForCausalLM"
    _refuse_unsupported(fields, v3)
    layers = fields.count("num_hidden_layers")
    dense = min(_whole(fields, "first_k_dense_replace", 0), layers)
    nope, rope_dim = fields.count("qk_nope_head_dim"), fields.count("qk_rope_head_dim")
    context = fields.count("max_position_embeddings")
    theta = rope_fields(fields).number("rope_theta", 10000.0)
    return DeepseekConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        intermediate_size=fields.count("intermediate_size"),
        num_layers=layers,
        num_heads=fields.count("num_attention_heads"),
        max_context=context,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        query_rank=fields.count_or_none("q_lora_rank"),
        kv_rank=fields.count("kv_lora_rank"),
        rope_dim=rope_dim,
        nope_dim=nope,
        value_dim=fields.count("v_head_dim"),
        rope=Rope(rope_dim, theta, context, rope_scaling(fields)),
        softmax_scale=(nope + rope_dim) ** -0.5 * _logit_amplitude(values),
        dense_layers=dense,
        moe=_moe(fields, v3) if dense < layers else None,
        interleaved=fields.flag("rope_interleave", True) if v3 else True,
        attention_bias=fields.flag("attention_bias", False),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
    )


def _moe(fields: Fields, v3: bool) -> MoEConfig:
    routing = Routing.BIASED if v3 else Routing(fields.get("topk_method") or "greedy")
    grouped = routing is not Routing.GREEDY
    return MoEConfig(
        routing=routing,
        routed_experts=fields.count("n_routed_experts"),
        shared_experts=fields.count("n_shared_experts"),
        experts_per_token=fields.count("num_experts_per_tok"),
        expert_size=fields.count("moe_intermediate_size"),
        groups=fields.count("n_group") if grouped else 1,
        groups_per_token=fields.count("topk_group") if grouped else 1,
        weight_factor=fields.number("routed_scaling_factor", 1.0),
        normalise_weights=v3 and fields.flag("norm_topk_prob", True),
    )


def _refuse_unsupported(fields: Fields, v3: bool) -> None:
    allowed: dict[str, tuple[Any, ...]] = {
        "hidden_act": (None, "silu"),
        "mlp_bias": (None, False),
        "moe_layer_freq": (None, 1),
        "quantization_config": (None,),
        "scoring_func": (None, "sigmoid" if v3 else "softmax"),
        "topk_method": (None, "noaux_tc") if v3 else (None, "greedy", "group_limited_greedy"),
    }
    if not v3:
        allowed["norm_topk_prob"] = (None, False)
    for name, values in allowed.items():
        if fields.get(name) not in values:
            raise fields.error(name, fields.get(name), ", ".join(str(value) for value in values if value is not None) or "null")


def _whole(fields: Fields, name: str, default: int) -> int:
    return 0 if fields.get(name) == 0 else fields.count(name, default) if fields.get(name) is not None else default


def _logit_amplitude(values: Mapping[str, Any]) -> float:
    """What yarn multiplies attention logits by, besides the amplitude of cos and sin."""
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if (scaling.get("rope_type") or scaling.get("type") or "default") == "default" or not scaling.get("mscale_all_dim"):
        return 1.0
    return yarn_mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2
