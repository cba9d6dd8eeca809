"""Who may leave: the last node of a role, at its site, only by force."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.config.config import Config
from engine.node.leaving import Leaving
from net.http.common.frontend import Refused
from sched.gossip.record import NodeRecord
from sched.membership.member import Member


def leaving(sites: dict[str, str], me: str, role: str) -> Leaving:
    """The end of node `me`. sites: of the nodes, all with this role."""
    info = {name: {"site": site} if site else {} for name, site in sites.items()}
    nodes = {name: Member(name, ("h", 1), roles=(role,), info=told) for name, told in info.items()}
    records = dict.fromkeys(sites, NodeRecord(blocks_total=10))
    gossip: Any = SimpleNamespace(me=nodes[me], members=[*nodes.values()], records=records)
    serving: Any = SimpleNamespace()
    return Leaving(Config(node_id=me, role=role), gossip, serving)


@pytest.mark.parametrize(
    ("sites", "where"),
    [({"a": ""}, "the cluster"), ({"a": "east", "b": "west", "c": "west"}, "site east")],
)
def test_the_last_node_of_a_role_stays_unless_it_is_forced(sites, where):
    """A site without a role takes no request, whatever other sites have."""
    one = leaving(sites, "a", "decode")
    with pytest.raises(Refused, match=f"no other node of {where} has role decode"):
        one.ask(None, 0.0, force=False)
    assert not one.begun
    one.ask(None, 0.0, force=True)
    assert one.begun


def test_one_of_several_leaves():
    one = leaving({"a": "east", "b": "west", "c": "west"}, "b", "decode")
    one.ask(None, 0.0, force=False)
    assert one.begun
