"""The nodes and the prompt that a group is chosen for, the chosen group, and whether it is worth it. Pure.

A group exists for one prompt, and any prefill nodes can form it, because every node has all weights. All of its nodes
need the KV of the same prefix, so what is known is the shortest of the nodes' prefixes, each its own or the pool's, and
the transfer is the longest of their fetches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Helper:
    """What is known of one prefill node."""

    node: str
    wait_s: float  # until its accepted prefill work is done
    cost: tuple[float, float, float]  # coefficients of its prefill model
    prefix_tokens: int  # leading tokens of the prompt that it has or fetches, whole blocks
    hop_s: float = 0.0  # to send it what a chunk passes on: hidden states to a stage, or the KV of one layer
    fetch_s: float = 0.0  # to fetch what it does not have of the prefix


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt, and the limits of its group."""

    num_tokens: int
    num_layers: int  # of the model
    chunk_tokens: int  # of the largest chunk: the token budget of a step
    block_size: int  # tokens; chunks end at borders of blocks
    max_nodes: int


@dataclass(frozen=True, slots=True)
class Group:
    """The nodes of one prompt. In a pipeline, node i computes the layers [cuts[i], cuts[i + 1]) of all tokens; without
    cuts, all layers of some tokens."""

    nodes: tuple[str, ...]
    cuts: tuple[int, ...]
    prefix_tokens: int
    wait_s: float
    prefill_s: float  # from the begin of the first node to the first token
    fetch_s: float = 0.0  # until all of them have the prefix

    @property
    def ready_s(self) -> float:
        """Without the fetch."""
        return self.wait_s + self.prefill_s

    def as_dict(self) -> dict[str, object]:
        """JSON-ready, for explain. `layers` is empty if the nodes divide the tokens."""
        return {
            "nodes": list(self.nodes),
            "layers": [[a, b] for a, b in zip(self.cuts, self.cuts[1:], strict=False)],
            "prefix_tokens": self.prefix_tokens,
            "wait_s": self.wait_s,
            "prefill_s": self.prefill_s,
        }


Divide = Callable[[Sequence[Helper], Prompt], Group | None]
"""How these nodes would compute the prompt together; None if they cannot."""


def best_group(lead: Helper, others: Sequence[Helper], prompt: Prompt, divide: Divide) -> Group | None:
    """The group of `lead` and some of `others` with the least time to first token, lead first; None if there is none
    of two or more nodes."""
    best: Group | None = None
    ordered = sorted(others, key=lambda helper: (helper.wait_s, -helper.prefix_tokens, helper.node))
    for count in range(2, min(prompt.max_nodes, len(ordered) + 1) + 1):
        group = divide([lead, *ordered[: count - 1]], prompt)
        if group is not None and (best is None or group.ready_s + group.fetch_s < best.ready_s + best.fetch_s):
            best = group
    return best


def worth_it(group: Group, alone_s: float, least_gain: float) -> bool:
    """Whether the group saves at least this share of `alone_s`, the seconds of the best single node: a group makes
    several nodes busy, and estimates err."""
    return group.ready_s < (1 - least_gain) * alone_s
