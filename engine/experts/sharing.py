"""Nodes that share the ranks of their experts: they know each other by gossip. Does not import torch.

Each of them tells in its gossip where its ranks join, and the name of its group: the model and which experts each rank
has. The others tell their ranks, which then come to all nodes of the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engine.config.config import Config
from engine.config.net_options import open_expert_door
from engine.experts.plan import first_of, group_name, plan_of
from engine.model.model_config import ModelConfig
from net.rounds.door import parsed

EXPERTS = "experts"
"""The entry of a member's information: [name of the group, HOST:PORT]."""


class Sharing:
    """One node's part. `door` is open from the constructor on. Raises UsageError if it cannot be."""

    def __init__(self, config: Config, model: ModelConfig, fingerprint: str) -> None:
        plan = plan_of(config, model)
        self._group = group_name(fingerprint, plan, first_of(config, plan))
        self.door = open_expert_door(config)

    @property
    def told(self) -> dict[str, list[str]]:
        """For other nodes."""
        return {EXPERTS: [self._group, self.door.where]}

    def heard(self, members: Iterable[Mapping[str, Any]]) -> None:
        """What all nodes that are here tell."""
        self.door.share(where for told in members if (where := self._shares(told)) is not None)

    def _shares(self, told: Mapping[str, Any]) -> str | None:
        """Where the ranks of a node of this group join; None for another node."""
        match told.get(EXPERTS):
            case [str(group), str(where)] if group == self._group:
                try:
                    parsed(where)
                except ValueError:
                    return None
                return where
        return None


def sharing_of(config: Config, model: ModelConfig, fingerprint: str) -> Sharing | None:
    """None for a node that shares no ranks. Raises UsageError."""
    return Sharing(config, model, fingerprint) if config.computes and config.shares_experts else None
