"""The shell of role changes: a node under gossiped load takes the role that is short."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from engine.role_changes import RoleChanges, seen
from sched.load_word import ROLE_BITS
from sched.member import Member
from sched.record import NodeRecord
from sched.role_change import BOTH

ROLES = ("prefill", "decode", "store")
ALL = sum(ROLE_BITS.values())


def record(work_s: float) -> NodeRecord:
    return NodeRecord(work_s=work_s, running_soon=1, max_running=10, blocks_soon=5, blocks_total=10, flags=ALL)


def test_a_record_tells_what_a_node_can_and_does():
    narrow = NodeRecord(flags=ROLE_BITS["prefill"] | ROLE_BITS["store"], blocks_soon=5, blocks_total=10)
    one = seen(Member("a", ("h", 1), roles=ROLES), narrow)
    assert (one.can, one.does, one.blocks_soon, one.blocks_total) == (BOTH, {"prefill"}, 5, 10)
    assert seen(Member("s", ("h", 1), roles=("store",)), NodeRecord(flags=ROLE_BITS["store"])).can == frozenset()


async def test_of_nodes_with_much_to_prefill_one_gives_decode_up():
    members = [Member(name, ("h", 1), roles=ROLES) for name in "ab"]
    loads = {name: SimpleNamespace(does=BOTH) for name in "ab"}
    shells = [
        RoleChanges(
            SimpleNamespace(me=me, members=members, records={name: record(9.0) for name in "ab"}),
            loads[me.node_id],
            hold_s=0.02,
        )
        for me in members
    ]
    for shell in shells:
        shell.start()
    try:
        async with asyncio.timeout(5):
            while all(load.does == BOTH for load in loads.values()):  # noqa: ASYNC110 - a state, no event
                await asyncio.sleep(0.005)
    finally:
        for shell in shells:
            await shell.close()
    assert sorted(len(load.does) for load in loads.values()) == [1, 2], "the records still say that both do both"
    assert {"prefill"} in [load.does for load in loads.values()]
