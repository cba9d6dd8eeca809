"""Chooses a group of prefill nodes for one long prompt: chunked pipeline parallelism (Mooncake, FAST'25, section 5.1).

The nodes of a group compute consecutive layers of all chunks. A group exists for one prompt, and any prefill nodes can
form it, because every node has all weights. It is worth it if the estimated time to first token is well below that of
the best single node:

    TTFT = wait of the busiest node + prefix transfer + sum t_k + (P - 1) max t_k + (P - 1) hops

with t_k from sched/chunks.py. All nodes need the KV of the same prefix, each for its own layers, so what is known is
the shortest of the nodes' prefixes, each its own or the pool's, and the transfer is the longest of their fetches. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from sched.chunks import makespan, plan, stage_seconds


@dataclass(frozen=True, slots=True)
class Helper:
    """What is known of one prefill node."""

    node: str
    wait_s: float  # until its accepted prefill work is done
    cost: tuple[float, float, float]  # coefficients of its prefill model
    prefix_tokens: int  # leading tokens of the prompt that it has or fetches, whole blocks
    hop_s: float = 0.0  # to send the hidden states of a chunk to it
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
    """The stages of one prompt. Stage i computes the layers [cuts[i], cuts[i + 1])."""

    nodes: tuple[str, ...]
    cuts: tuple[int, ...]
    prefix_tokens: int
    wait_s: float
    prefill_s: float  # from the begin of the first stage to the first token
    fetch_s: float = 0.0  # until all of them have the prefix

    @property
    def ready_s(self) -> float:
        """Without the fetch."""
        return self.wait_s + self.prefill_s

    def as_dict(self) -> dict[str, object]:
        """JSON-ready, for explain."""
        return {
            "nodes": list(self.nodes),
            "layers": [[a, b] for a, b in zip(self.cuts, self.cuts[1:], strict=False)],
            "prefix_tokens": self.prefix_tokens,
            "wait_s": self.wait_s,
            "prefill_s": self.prefill_s,
        }


def layer_cuts(num_layers: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Borders of the stages' layers, in proportion to the nodes' speeds and with at least one layer each. Raises
    ValueError if there are fewer layers than nodes."""
    count = len(speeds)
    if num_layers < count:
        raise ValueError(f"{num_layers} layers cannot be divided among {count} nodes")
    total = sum(speeds)
    shares = [speed / total * num_layers for speed in speeds]
    sizes = [max(1, int(share)) for share in shares]
    while sum(sizes) < num_layers:
        sizes[max(range(count), key=lambda i: shares[i] - sizes[i])] += 1
    while sum(sizes) > num_layers:
        sizes[min((i for i in range(count) if sizes[i] > 1), key=lambda i: shares[i] - sizes[i])] -= 1
    return tuple(accumulate(sizes, initial=0))


def best_group(lead: Helper, others: Sequence[Helper], prompt: Prompt) -> Group | None:
    """The group of `lead` and some of `others` with the least time to first token, lead first; None if there is none
    of two or more nodes."""
    best: Group | None = None
    ordered = sorted(others, key=lambda helper: (helper.wait_s, -helper.prefix_tokens, helper.node))
    for count in range(2, min(prompt.max_nodes, len(ordered) + 1, prompt.num_layers) + 1):
        group = _group([lead, *ordered[: count - 1]], prompt)
        if best is None or group.ready_s < best.ready_s:
            best = group
    return best


def worth_it(group: Group, alone_s: float, least_gain: float) -> bool:
    """Whether the group saves at least this share of `alone_s`, the seconds of the best single node: a group makes
    several nodes busy, and estimates err."""
    return group.ready_s < (1 - least_gain) * alone_s


def _group(members: Sequence[Helper], prompt: Prompt) -> Group:
    speeds = [1 / max(_whole_s(helper, prompt), 1e-12) for helper in members]
    cuts = layer_cuts(prompt.num_layers, speeds)
    known = min(helper.prefix_tokens for helper in members)
    sizes = plan(prompt.num_tokens, known, len(members), members[0].cost, prompt.chunk_tokens, prompt.block_size)
    each = [
        stage_seconds(sizes, known, helper.cost, (end - begin) / prompt.num_layers)
        for helper, begin, end in zip(members, cuts, cuts[1:], strict=False)
    ]
    slowest = [max(seconds) for seconds in zip(*each, strict=True)]
    hops_s = sum(helper.hop_s for helper in members[1:])
    return Group(
        nodes=tuple(helper.node for helper in members),
        cuts=cuts,
        prefix_tokens=known,
        wait_s=max(helper.wait_s for helper in members),
        prefill_s=makespan(slowest, len(members)) + hops_s,
        fetch_s=max(helper.fetch_s for helper in members) if known else 0.0,
    )


def _whole_s(helper: Helper, prompt: Prompt) -> float:
    """Seconds of the whole prompt on the node alone, without the fixed time of its steps."""
    n = float(prompt.num_tokens)
    return helper.cost[1] * n + helper.cost[2] * n * n
