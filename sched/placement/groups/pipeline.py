"""Groups that divide the layers: chunked pipeline parallelism (Mooncake, FAST'25, section 5.1). Pure.

The nodes of a group compute consecutive layers of all chunks. The group is worth it if the estimated time to first
token is well below that of the best single node:

    TTFT = wait of the busiest node + prefix transfer + sum t_k + (P - 1) max t_k + (P - 1) hops

with t_k from sched/chunks.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from sched.chunks import makespan, plan, stage_seconds
from sched.placement.groups.group import Group, Helper, Prompt

ALIKE = 1.75
"""Nodes whose learned speeds differ by no larger factor get equal shares. A node that computes other chunk sizes, or
next to busy neighbours, seems up to 1.7 times as slow as its equal, and one share too large makes all stages wait."""


def layer_cuts(num_layers: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Borders of the stages' layers, in proportion to the nodes' speeds and with at least one layer each; equal shares
    for nodes that are ALIKE. Raises ValueError if there are fewer layers than nodes."""
    count = len(speeds)
    if max(speeds) <= ALIKE * min(speeds):
        speeds = [1.0] * count
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


def pipeline(members: Sequence[Helper], prompt: Prompt) -> Group | None:
    """A pipeline of these nodes; None if the model has fewer layers."""
    if prompt.num_layers < len(members):
        return None
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
