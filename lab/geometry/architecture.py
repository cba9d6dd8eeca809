"""A model as plans and the simulator see it: the groups of its KV, and its weights."""

from __future__ import annotations

from dataclasses import dataclass

from cache.groups import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One group, and its attention. FLOPs are for one token in one layer: for each token that it sees, or, of a state,
    for its update and its answer. Products with weights are not part of them."""

    group: Group
    prefill_flops: float
    decode_flops: float
    uniform_row_bytes: int  # of one token in one layer, if the layer kept K and V per head of all tokens

    @property
    def uniform(self) -> Group:
        """The same layers in a block of one kind for all: K and V per head of all tokens."""
        return Group(kind="full", layers=self.group.layers, row_bytes=self.uniform_row_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Numbers of parameters, without norms and biases."""

    shared: float  # that every token is multiplied with, the output's included
    experts: float = 0.0  # of all routed experts
    expert_share: float = 0.0  # of the routed experts, those of one token
    embedding: float = 0.0  # looked up, not multiplied; 0 if it is the output's
    shared_bytes: float = 2.0  # of one parameter, shared or of the embedding
    expert_bytes: float = 2.0  # of one parameter of a routed expert
    experts_per_token: int = 0
    routed_elements: int = 0  # of a token's row, over all layers with experts

    @property
    def parameters(self) -> float:
        return self.shared + self.experts + self.embedding

    @property
    def active(self) -> float:
        """Parameters that one token is multiplied with."""
        return self.shared + self.expert_share * self.experts

    @property
    def nbytes(self) -> float:
        """Bytes in memory."""
        return (self.shared + self.embedding) * self.shared_bytes + self.experts * self.expert_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model, without its numbers of nodes or its hardware."""

    name: str
    parts: tuple[Part, ...]
    weights: Weights
