"""Groups that divide the tokens of a prompt."""

from __future__ import annotations

from sched.placement.groups.context import context
from sched.placement.groups.group import Helper, Prompt, best_group

COST = (0.002, 1e-3, 1e-8)
PROMPT = Prompt(num_tokens=8000, num_layers=30, chunk_tokens=1024, block_size=16, max_nodes=4)
ALONE_S = 8 * 0.002 + 8000 * 1e-3 + 8000 * 8000 * 1e-8


def idle(name: str, wait_s: float = 0.0, prefix: int = 0, hop_s: float = 0.0) -> Helper:
    return Helper(name, wait_s, COST, prefix, hop_s)


def test_two_idle_nodes_take_little_more_than_half():
    group = best_group(idle("a"), [idle("b")], PROMPT, context)
    assert group is not None and group.nodes == ("a", "b") and group.cuts == ()
    assert 0.5 * ALONE_S < group.ready_s < 0.6 * ALONE_S
    assert group.as_dict()["layers"] == []


def test_a_node_behind_a_slow_link_does_not_help():
    """Every chunk waits for the layers of the one before: 30 layers of a chunk take longer than the chunk."""
    near = context([idle("a"), idle("b")], PROMPT)
    far = context([idle("a"), idle("b", hop_s=0.4)], PROMPT)
    assert near is not None and far is not None and far.prefill_s > near.prefill_s + 1


def test_a_group_leaves_a_chunk_for_every_node():
    known = context([idle("a", prefix=7984), idle("b", prefix=7984)], PROMPT)
    assert known is not None and known.prefix_tokens == 7968, "a block and the rest are computed"
    assert best_group(idle("a"), [idle("b")], Prompt(16, 30, 1024, 16, 4), context) is None
