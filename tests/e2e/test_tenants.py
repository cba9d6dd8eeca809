"""Quotas of tenants on one real store node, through upstream's calls: in the calling thread, through the event loop, in
parts, and after a restart."""

from __future__ import annotations

import os
import re

import pytest

from cache.store.client import Store
from connect.store.distributed_store import MooncakeDistributedStore
from connect.store.replicate_config import ReplicateConfig
from lab.launch import rest

SLOT = 64 << 10
QUOTA = 16 * SLOT
PINNED = ReplicateConfig(with_hard_pin=True)


@pytest.fixture
def node(start, tmp_path):
    flags = ("--model", "none", "--value-bytes", "64K", "--dram-bytes", "640K", "--ssd-path", str(tmp_path / "ssd"))
    with start("store=1", *flags, "--ssd-bytes", "16M", "--tenants", "team-a=1M,team-b") as cluster:
        yield cluster


def opened(cluster, tenant):
    made = MooncakeDistributedStore()
    address = cluster["store-0"].url.removeprefix("http://")
    assert made.setup({"local_hostname": "localhost", "master_server_addr": address, "tenant_id": tenant}) == 0
    return made


def figures(cluster, name):
    """By tenant, from /metrics."""
    lines = rest.text(f"{cluster['store-0'].url}/metrics").splitlines()
    found = (re.search(r'tenant="([^"]+)".*} (\S+)$', line) for line in lines if line.startswith(f"mooncake:{name}{{"))
    return {row[1]: float(row[2]) for row in found}


def used(cluster):
    """Slots by tenant."""
    return {name: value / SLOT for name, value in figures(cluster, "store_tenant_bytes").items()}


def test_a_tenant_at_its_quota_is_refused_until_it_removes_something(node):
    """The DRAM has ten slots, so most of the sixteen are on SSD only."""
    team_a, team_b, other = (opened(node, tenant) for tenant in ("team-a", "team-b", "default"))
    values = {f"a/{i}": os.urandom(60_000) for i in range(14)}
    assert [team_a.put(name, value) for name, value in values.items()] == [0] * 14
    large = os.urandom(2 * SLOT)
    assert team_a.put("large", large) == -1700, "its three blocks would be the 15th to the 17th"
    assert used(node) == {"team-a": 14, "team-b": 0, "other": 0}, "no part of it stays"
    assert team_a.put("a/14", b"small") == 0, "a small value takes a slot, too"
    assert team_a.put_batch(["a/15", "a/0"], [b"x", b"y"]) == 0
    assert team_a.put_batch(["a/1", "a/16", "a/14"], [b"x", b"y", b"z"]) == -1700
    assert (team_a.put("a/16", b"x"), team_a.put("a/16", b"x", PINNED), team_a.put("a/0", b"x")) == (-1700, -1700, 0)
    assert (team_a.get("a/16"), team_a.get("large"), team_a.get("a/15")) == (b"", b"", b"x")

    assert [team_b.put(f"b/{i}", b"b") for i in range(3)] == [0] * 3
    assert [other.put(f"o/{i}", large) for i in range(2)] == [0] * 2
    with Store(node["store-0"].url.removeprefix("http://")) as program:
        assert program.put(os.urandom(16), b"KV has no tenant")
        program.flush()
    assert used(node) == {"team-a": 16, "team-b": 3, "other": 7}
    assert figures(node, "store_tenant_quota_bytes") == {"team-a": QUOTA}
    refused = figures(node, "store_tenant_refusals_total")
    assert refused == {"team-a": 4, "team-b": 0, "other": 0}, "the head of the large value, and a/16 three times"
    (row,) = rest.get(f"{node['store-0'].url}/live")["nodes"]
    assert row["tenants"]["team-a"] == {"bytes": QUOTA, "quota": QUOTA, "refused": 4}

    assert team_a.remove("a/3") == 0
    assert (team_a.put("a/16", b"again"), team_a.put("a/17", b"x")) == (0, -1700)
    with Store(node["store-0"].url.removeprefix("http://")) as program:
        program.flush()
    for one in (team_a, team_b, other):
        one.close()

    node.restart("store-0")
    assert used(node) == {"team-a": 16, "team-b": 3, "other": 7}, "found on SSD"
    team_a = opened(node, "team-a")
    assert (team_a.put("a/17", b"x"), team_a.get("a/16"), team_a.get("a/0")) == (-1700, b"again", values["a/0"])
    assert team_a.remove_all() == 16 and used(node)["team-a"] == 0
    assert team_a.put("large", large) == 0 and used(node)["team-a"] == 3
    team_a.close()
