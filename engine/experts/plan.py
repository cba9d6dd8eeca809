"""The sizes that all ranks of a node agree on. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b

from engine.config.config import Config
from engine.experts.placing.placement import Placement, first_placement
from engine.model.model_config import ModelConfig
from net.rounds.layout import Layout


@dataclass(frozen=True, slots=True)
class Plan:
    """`layers`: the model's layers with experts; what counts layers elsewhere counts only these."""

    layers: tuple[int, ...]
    num_experts: int
    ranks: int
    slots: int  # of a rank in each layer
    hidden: int
    expert_size: int
    activation: str
    layout: Layout
    remote: int = 0  # of the ranks, the last ones: on other hosts
    added: int = 0  # of these, the last ones: they join and leave while the node serves
    gate_limit: float = 0.0  # of the activation "clamped"
    biased: bool = False  # the products of an expert have biases

    @property
    def local(self) -> int:
        """Ranks on the node's host: 0 and the next ones; none if the node shares its ranks."""
        return self.ranks - self.remote

    @property
    def shared(self) -> bool:
        """Whether the node has no experts itself: other nodes may share the ranks."""
        return not self.local

    @property
    def of_share(self) -> Plan:
        """What the experts of a rank depend on: equal for nodes whose messages differ."""
        return replace(self, layout=replace(self.layout, most_rows=1, codes="none"))

    @property
    def least(self) -> int:
        """Ranks that the node is never without, but for losses."""
        return self.ranks - self.added

    @property
    def columns(self) -> int:
        """Of the table of copies (Placement.table), one for each token in turn: up to 4 copies get equal parts."""
        return -(-self.ranks // 12) * 12

    @property
    def expert_elements(self) -> int:
        matrices = 3 * self.hidden * self.expert_size
        return matrices + self.biased * (2 * self.expert_size + self.hidden)

    @property
    def share_bytes(self) -> int:
        """Of the experts of one rank."""
        return len(self.layers) * self.slots * self.expert_elements * self.layout.item_bytes


@dataclass(frozen=True, slots=True)
class Duty:
    """What a rank must hold. `living`: ranks of the node's host whose shares are filled."""

    rank: int
    plan: Plan
    placement: Placement
    living: tuple[int, ...] = ()

    @property
    def experts(self) -> list[tuple[int, int, int]]:
        """(layer, slot, expert), of the layers with experts."""
        return [
            (layer, slot, expert)
            for layer, ranks in enumerate(self.placement.layers)
            for slot, expert in enumerate(ranks[self.rank])
        ]

    def copy_here(self, layer: int, expert: int) -> tuple[int, int] | None:
        """A living rank that has it, and its slot there; None without one."""
        others = (at for at in self.placement.holders(layer, expert) if at[0] in self.living and at[0] != self.rank)
        return next(others, None)


def plan_of(config: Config, model: ModelConfig) -> Plan:
    """For a resolved configuration and a model with experts."""
    least = config.expert_parallel_size
    added = max(0, config.max_expert_parallel_size - least)
    return Plan(
        layers=tuple(layer for layer in range(model.num_layers) if model.has_experts(layer)),
        num_experts=model.num_experts,
        ranks=least + added,
        slots=copies_of(config, model) // least,
        hidden=model.hidden_size,
        expert_size=model.expert_size,
        activation=model.activation,
        layout=Layout(
            most_rows=config.max_num_batched_tokens,
            hidden=model.hidden_size,
            top_k=model.experts_per_token,
            dtype=config.dtype,
            codes=config.expert_dispatch_dtype.replace("auto", "none"),
        ),
        remote=config.expert_remote_ranks + added,
        added=added,
        gate_limit=model.gate_limit,
        biased=model.expert_biases,
    )


def copies_of(config: Config, model: ModelConfig) -> int:
    """Of all experts of a layer together, without those on ranks that are added."""
    return config.expert_replicas * model.num_experts + config.num_redundant_experts


def group_name(fingerprint: str, plan: Plan, placement: Placement) -> str:
    """Equal for nodes that can share their ranks: the same model, and the same experts on each rank."""
    return blake2b(repr((fingerprint, plan.of_share, placement)).encode(), digest_size=8).hexdigest()


def first_of(config: Config, plan: Plan) -> Placement:
    """The placement at the start."""
    copies = plan.slots * plan.least
    sizes = len(plan.layers), plan.num_experts, plan.least
    return first_placement(*sizes, copies, config.expert_replicas, plan.added)
