"""Which experts a token passes through, and with which weights (mixture of experts: engine/model/experts/moe.py).

    plain       s = softmax(router(x))               the k largest; weight s, or s / sum of the k
    routed      s = softmax or sigmoid(router(x))    in float32, as are the products
                c = s + bias                         if the router has a bias; only the choice uses c
                the G groups of experts with the largest c (its best, or the sum of its two best), of these the k
                experts with the largest c; weight s, or s / sum of the k, times a constant

The second is that of DeepSeek-V2 (arXiv 2405.04434, 2.2) and DeepSeek-V3 (arXiv 2412.19437, 2.1.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.experts.routing_config import Routing

Router = Callable[[Tensor], tuple[Tensor, Tensor]]
"""x [T, H] -> weights [T, k] float32 and experts [T, k] int64."""


@dataclass(frozen=True, slots=True)
class PlainRouter:
    """See the module."""

    scores: Callable[[Tensor], Tensor]  # [T, H] -> [T, E]
    experts_per_token: int
    normalize: bool

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        share = self.scores(x).softmax(-1, dtype=torch.float32)
        weight, chosen = share.topk(self.experts_per_token)
        if self.normalize:
            weight = weight / weight.sum(-1, keepdim=True)
        return weight, chosen


@dataclass(frozen=True, slots=True)
class RoutedRouter:
    """See the module."""

    weight: Tensor  # [E, H] float32
    bias: Tensor | None  # [E] float32
    routing: Routing
    experts_per_token: int
    normalize: bool

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x.float(), self.weight)
        scores = logits.sigmoid() if self.routing.scoring == "sigmoid" else logits.softmax(-1)
        chosen = self._allowed(scores if self.bias is None else scores + self.bias).topk(self.experts_per_token).indices
        weight = scores.gather(1, chosen)
        if self.normalize:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        return weight * self.routing.scale, chosen

    def _allowed(self, scores: Tensor) -> Tensor:
        """scores [T, E], -inf for experts of groups that the token does not use: a biased score may be negative."""
        routing = self.routing
        if routing.groups_per_token == routing.groups:
            return scores
        grouped = scores.unflatten(1, (routing.groups, scores.shape[1] // routing.groups))
        best = grouped.amax(-1) if routing.group_score == "max" else grouped.topk(2).values.sum(-1)
        used = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(routing.groups_per_token).indices, True)
        allowed: Tensor = grouped.masked_fill(~used[..., None], -torch.inf)
        return allowed.flatten(1)
