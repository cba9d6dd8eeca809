"""A step model whose experts are spread over ranks: copies, imbalance, bytes between ranks, masked ranks. Pure.

Attention is data parallel and experts are expert parallel over W ranks, one GPU each, as DeepSeek and Kimi serve them:

    shared weights    whole on each rank, which also reads all of them: W times the memory and the bytes of a step
    products, reads   those of experts x imbalance: the busiest rank holds up the others (load by mean load)
    dispatch          a token goes once to each other rank that has one of its k experts: (W - 1) (1 - (1 - 1/W)^k) of
                      them, if routing is even; a row of one byte per element goes there, one of two comes back, in
                      every layer with experts; all ranks send at once, at `link_bytes_s` each, the busiest one longest.
                      Not hidden behind products: an upper bound
    copies            C of each expert: C times the memory of the experts, so less KV. The tokens of an expert spread
                      over its copies: a copy is used with 1/C of the probability, and is read when it is used. A
                      large batch reads C times the bytes
    masked            M ranks are lost: W - M do all of the work, with the KV of W - M. They read what they hold: of
                      each expert C (W - M) / W copies, on average

Without copies a node that lost a rank does not serve (lab/formulas/expert_failures.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lab.geometry.architecture import Weights
from lab.simulator.models.step_models import StepModel

THERE_BYTES, BACK_BYTES = 1, 2
"""Of one element of a row: fp8 there, the weighted sum in 16 bits back."""


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """Raises ValueError for numbers that fit no group of ranks."""

    ranks: int
    copies: int = 1
    imbalance: float = 1.2  # with EPLB; without it 2 and more are common (DeepSeek-V3, arXiv 2412.19437, 3.4)
    link_bytes_s: float = 50e9  # of a rank, in each direction: a NIC of 400 Gbit/s between hosts
    masked: int = 0

    def __post_init__(self) -> None:
        if not 1 < self.ranks <= 1024 or not 1 <= self.copies <= self.ranks or not 0 <= self.masked < self.ranks:
            raise ValueError(
                f"{self.ranks} ranks cannot have {self.copies} copies of an expert and {self.masked} masked"
            )
        if self.imbalance < 1 or not self.link_bytes_s > 0:
            raise ValueError(f"imbalance {self.imbalance} is below 1, or --expert-link-gbit-s is not positive")

    def others(self, experts_per_token: int) -> float:
        """Mean number of other ranks that a token goes to."""
        alive = self.ranks - self.masked
        return (alive - 1) * (1 - (1 - 1 / alive) ** experts_per_token)


def dispatch_s(weights: Weights, given: ExpertRanks) -> float:
    """Seconds per token of a step, for the way there and back in all layers."""
    alive = given.ranks - given.masked
    nbytes = given.others(weights.experts_per_token) * weights.routed_elements * (THERE_BYTES + BACK_BYTES)
    return given.imbalance * nbytes / (alive * given.link_bytes_s)


def with_ranks(model: StepModel, weights: Weights, memory_bytes: float, given: ExpertRanks) -> StepModel:
    """`model`: of `weights` on all ranks together, evenly loaded, with `memory_bytes`. Raises ValueError."""
    if not weights.experts:
        raise ValueError(f"{model.name} has no experts: leave out --expert-ranks")
    share = (given.ranks - given.masked) / given.ranks
    every = given.ranks * (weights.shared + weights.embedding) * weights.shared_bytes  # whole on each rank
    held = every + given.copies * weights.experts * weights.expert_bytes  # masked ranks hold their part too
    room = share * (memory_bytes - held)
    if room <= 0:
        raise ValueError(
            f"{held / 1e9:.0f} GB of weights with --expert-copies {given.copies} do not fit into the "
            f"{memory_bytes / 1e9:.0f} GB of {model.name}"
        )
    active = weights.expert_share * weights.experts / weights.active  # share of the products that is experts'
    busier = (1 + active * (given.imbalance - 1)) / share
    way = dispatch_s(weights, given)
    a0, a1, a2 = model.prefill
    w, p, d0, d1, k = model.decode
    living = max(1.0, given.copies * share)  # of each expert: those that a step may use
    expert_s = living * model.expert_s * given.imbalance / share
    # Each rank reads all shared weights with its own memory, however many others there are.
    read = given.ranks * (w - model.expert_s) + expert_s
    return replace(
        model,
        name=f"{model.name}, {given.copies} copies of experts on {given.ranks - given.masked} of {given.ranks} ranks",
        prefill=(a0, a1 * busier + way, a2 / share),
        # The way is no part of p, of which the read of weights hides what is shorter.
        decode=(read, p * busier, d0, d1 / share + way, k / share),
        expert_s=expert_s,
        expert_share=model.expert_share / living,
        kv_tokens=int(0.9 * room / model.token_bytes),
        nic_bytes_s=model.nic_bytes_s * share,
    )
