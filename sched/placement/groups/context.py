"""Groups that divide the tokens of a prompt: context parallelism, the rival of pipelines. Pure.

Every node computes all layers of its chunks and gets the KV of the other nodes' tokens layer by layer, so

    TTFT = wait of the busiest node + prefix transfer + the end of the last chunk (sched/stripes.py)

Nodes take turns whatever their speed, so the slowest one decides.
"""

from __future__ import annotations

from collections.abc import Sequence

from sched.chunks import stage_seconds
from sched.placement.groups.group import Group, Helper, Prompt
from sched.stripes import latest_start, owner, stripe_sizes, stripes_s


def context(members: Sequence[Helper], prompt: Prompt) -> Group | None:
    """These nodes, each with some of the tokens; None if the prompt has too few blocks for all of them."""
    count, size = len(members), prompt.block_size
    try:
        most = latest_start(prompt.num_tokens, count, size)
    except ValueError:
        return None
    known = min(most, *(helper.prefix_tokens for helper in members))
    cost, chunk_tokens = members[0].cost, prompt.chunk_tokens
    sizes = stripe_sizes(prompt.num_tokens, known, count, prompt.num_layers, cost, chunk_tokens, size)
    each = [stage_seconds(sizes, known, helper.cost, 1.0) for helper in members]
    seconds = [each[owner(chunk, len(sizes), count)][chunk] for chunk in range(len(sizes))]
    hop_s = max(helper.hop_s for helper in members[1:])
    return Group(
        nodes=tuple(helper.node for helper in members),
        cuts=(),
        prefix_tokens=known,
        wait_s=max(helper.wait_s for helper in members),
        prefill_s=stripes_s(seconds, count, prompt.num_layers, hop_s),
        fetch_s=max(helper.fetch_s for helper in members) if known else 0.0,
    )
