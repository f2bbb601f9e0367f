"""Mixture-of-experts feed-forward: which experts a token takes, and their weighted sum beside the shared ones.

Routing follows DeepSeek-V2 (softmax; the best, or the best of the best groups) and DeepSeek-V3 (sigmoid; a learnt bias shifts
the choice but not the weights; groups are ranked by their two best). Scores are computed in float32. Tokens are sorted by
expert, so that an expert's weights are read once a batch, and experts without tokens are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.deepseek_config import MoEConfig, Routing
from models.linear import Linear
from models.ops import gated_silu


@dataclass(frozen=True, slots=True)
class Gated:
    """A gated feed-forward: gate and up in one projection."""

    gate_up: Linear
    down: Linear

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down(gated_silu(self.gate_up(hidden)))


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    router: Tensor
    router_bias: Tensor | None
    shared: Gated
    experts: Sequence[Gated]


def mixture(hidden: Tensor, weights: MixtureWeights, config: MoEConfig) -> Tensor:
    """The feed-forward of `hidden` [tokens, hidden size]."""
    out = weights.shared(hidden)
    experts, shares = route(hidden, weights, config)
    order = experts.flatten().argsort(stable=True)
    tokens = order // config.experts_per_token
    shares = shares.flatten()[order].to(hidden.dtype)
    start = 0
    for expert, count in enumerate(experts.flatten().bincount(minlength=config.routed_experts).tolist()):
        if count:
            chosen = tokens[start : start + count]
            result = weights.experts[expert](hidden[chosen])
            out.index_add_(0, chosen, result * shares[start : start + count, None])
        start += count
    return out


def route(hidden: Tensor, weights: MixtureWeights, config: MoEConfig) -> tuple[Tensor, Tensor]:
    """Each token's experts [tokens, experts_per_token] and the weights of their results."""
    logits = F.linear(hidden.float(), weights.router.float())
    if config.routing is Routing.BIASED:
        assert weights.router_bias is not None
        scores = logits.sigmoid()
        ranked = scores + weights.router_bias.float()
        allowed = _best_groups(ranked, config, by_best=2)
        experts = ranked.masked_fill(~allowed, float("-inf")).topk(config.experts_per_token, dim=-1).indices
    else:
        scores = logits.softmax(dim=-1)
        if config.routing is Routing.GROUP_LIMITED:
            scores = scores.masked_fill(~_best_groups(scores, config, by_best=1), 0.0)
        experts = scores.topk(config.experts_per_token, dim=-1).indices
    shares = scores.gather(1, experts)
    if config.normalise_weights:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + 1e-20)
    return experts, shares * config.weight_factor


def _best_groups(scores: Tensor, config: MoEConfig, *, by_best: int) -> Tensor:
    """Which experts [tokens, experts] are in a token's groups, ranked by the sum of their `by_best` best."""
    grouped = scores.view(len(scores), config.groups, -1)
    ranks = grouped.topk(by_best, dim=-1).values.sum(dim=-1)
    taken = torch.zeros_like(ranks, dtype=torch.bool)
    taken.scatter_(1, ranks.topk(config.groups_per_token, dim=-1).indices, True)
    return taken[..., None].expand_as(grouped).flatten(1)
