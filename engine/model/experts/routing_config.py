"""The part of a ModelConfig about the choice of experts, if it is another than a softmax's largest shares. Does not
import torch."""

from __future__ import annotations

from dataclasses import dataclass

SCORINGS = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a token's experts are chosen and weighted (engine/model/experts/routing.py)."""

    scoring: str = "softmax"  # of SCORINGS
    biased: bool = False
    """For the choice alone, a learnt number of each expert is added to its score."""
    groups: int = 1
    """Groups of equally many experts."""
    groups_per_token: int = 1
    """The groups that a token's experts are chosen from."""
    group_score: str = "max"  # of GROUP_SCORES: the best expert's, or the sum of the two best
    scale: float = 1.0
    """Factor of the weights, after they are normalized."""

    def problem(self, num_experts: int, experts_per_token: int) -> str | None:
        """Why a model with these numbers of experts cannot be routed like this; None if it can."""
        if self.scoring not in SCORINGS or self.group_score not in GROUP_SCORES:
            return f"routing by {self.scoring} and {self.group_score} is not implemented"
        if self.groups < 1 or num_experts % self.groups:
            return f"{num_experts} experts cannot be split into n_group {self.groups} equal groups"
        if not 1 <= self.groups_per_token <= self.groups:
            return f"topk_group is {self.groups_per_token}, the model has {self.groups} groups"
        size = num_experts // self.groups
        if self.groups > 1 and self.group_score == "top2" and size < 2:
            return f"n_group {self.groups} leaves one expert per group, and a group's score is that of two"
        if experts_per_token > self.groups_per_token * size:
            return f"num_experts_per_tok is {experts_per_token}, the chosen groups have {self.groups_per_token * size}"
        return None
