"""The shell of role changes: a node under gossiped load takes the role that is short."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

from engine.config.config import Config
from engine.core.engine_load import first_role
from engine.scaling.role_changes import RoleChanges, seen
from sched.gossip.load_word import CHANGING, ROLE_BITS
from sched.gossip.record import NodeRecord
from sched.membership.member import Member
from sched.role_change import BOTH
from sched.role_ratio import role_policies
from tests.net.peers import until

ROLES = ("prefill", "decode", "store")


def record(work_s: float, role: str) -> NodeRecord:
    flags = ROLE_BITS[role] | ROLE_BITS["store"]
    return NodeRecord(
        work_s=work_s, queued_tokens=9, running_soon=1, max_running=10, blocks_soon=1, blocks_total=10, flags=flags
    )


def test_a_record_tells_what_a_node_can_and_does():
    narrow = NodeRecord(flags=ROLE_BITS["prefill"] | ROLE_BITS["store"], blocks_soon=5, blocks_total=10)
    one = seen(Member("a", ("h", 1), roles=ROLES, info={"first_role": ["decode"]}), narrow)
    assert (one.can, one.does, one.home, one.blocks_soon, one.blocks_total) == (BOTH, {"prefill"}, {"decode"}, 5, 10)
    assert seen(Member("a", ("h", 1), roles=ROLES), narrow).can == {"prefill"}, "it was not started to change"
    works = [seen(Member("a", ("h", 1)), NodeRecord(work_s=0.4, queued_tokens=tokens)).work_s for tokens in (0, 1)]
    assert works == [0.0, 0.4], "the rest of a step of decodes is no prefill"
    changing = NodeRecord(flags=CHANGING)
    assert seen(Member("a", ("h", 1), roles=ROLES, info={"first_role": ["decode"]}), changing).does == frozenset()
    assert seen(Member("s", ("h", 1), roles=("store",)), NodeRecord(flags=ROLE_BITS["store"])).can == frozenset()


def test_what_a_node_begins_with():
    assert first_role(Config(role="prefill,decode", first_role="decode")) == {"decode"}
    assert first_role(Config(role="mixed")) == BOTH
    assert first_role(Config(role="prefill", first_role="decode")) == {"prefill"}, "it can do nothing else"


@pytest.mark.parametrize("policy", role_policies)
async def test_with_much_to_prefill_one_of_the_nodes_that_decode_changes_over(policy):
    begins = {"p": "prefill", "d": "decode", "e": "decode"}
    members = [Member(name, ("h", 1), roles=ROLES, info={"first_role": [role]}) for name, role in begins.items()]
    loads = {name: SimpleNamespace(does=frozenset({role})) for name, role in begins.items()}
    records = {name: record(9.0, role) for name, role in begins.items()}
    shells = [
        RoleChanges(SimpleNamespace(me=me, members=members, records=records), loads[me.node_id], 0.02, policy)
        for me in members
    ]
    for shell in shells:
        shell.start()
    try:
        async with asyncio.timeout(5):
            while sum(load.does == {"prefill"} for load in loads.values()) < 2:  # noqa: ASYNC110 - a state, no event
                await asyncio.sleep(0.005)
    finally:
        for shell in shells:
            await shell.close()
    assert loads["p"].does == {"prefill"}


async def test_a_busy_site_takes_no_role_from_another_one():
    """Two nodes at each site, and much to prefill at one: neither site can spare the only node that decodes there."""
    begins = {"wp": "prefill", "wd": "decode", "ep": "prefill", "ed": "decode"}
    members = [
        Member(name, ("h", 1), roles=ROLES, info={"first_role": [role], "site": name[0]})
        for name, role in begins.items()
    ]
    looks = Counter[str]()

    class Records(dict):
        def __init__(self, me: str) -> None:
            super().__init__({name: record(9.0 * (name[0] == "w"), role) for name, role in begins.items()})
            looks[me] += 1

    class Gossip(SimpleNamespace):
        @property
        def records(self) -> Records:
            return Records(self.me.node_id)

    loads = {name: SimpleNamespace(does=frozenset({role})) for name, role in begins.items()}
    shells = [RoleChanges(Gossip(me=me, members=members), loads[me.node_id], 0.001) for me in members]
    for shell in shells:
        shell.start()
    try:
        await until(lambda: all(looks[name] > 50 for name in begins))  # a change is wanted for 1 ms, by 4 looks
    finally:
        for shell in shells:
            await shell.close()
    assert {name: set(load.does) for name, load in loads.items()} == {name: {role} for name, role in begins.items()}
