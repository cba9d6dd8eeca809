"""--tenants: how it is read, and what a node's share makes of it."""

import pytest

from cache.arena import UNCHECKED
from cache.block import BlockGeometry
from cache.tenants import spaces
from cache.tiers.usage import OTHER
from engine.config.flags import UsageError, parse
from engine.config.tenants import parse as parse_tenants
from engine.node.local_store import open_share

ROOT_KEY = bytes(16)
GEOMETRY = BlockGeometry(1, 1, 16, 16, "float32")
SLOT = GEOMETRY.pool_bytes


@pytest.mark.parametrize(
    ("text", "tenants"),
    [
        ("none", {}),
        ("team-a", {"team-a": None}),
        ("team-a=4G, team-b,c=100", {"team-a": 4 << 30, "team-b": None, "c": 100}),
    ],
)
def test_tenants_are_read(text, tenants):
    assert parse_tenants(text) == tenants
    assert parse(["--tenants", text]).tenants == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a=4G,,b", "'' has no tenant"),
        ("=4G", "'=4G' has no tenant"),
        ("a=much", "'much' is not a size"),
        ("a=", "'' is not a size"),
        ("a=1G,a", "a is there twice"),
        ("other=1G", "'other' stands for all that is not named"),
    ],
)
def test_a_mistake_is_one_line(text, why):
    with pytest.raises(UsageError, match=f"--tenants: {why}"):
        parse(["--tenants", text])


@pytest.fixture
def share():
    """share(flag...) -> the share of a node with eight slots."""
    opened = []

    def make(*flags):
        opened.append(open_share(parse(["--dram-bytes", str(8 * SLOT), *flags]), GEOMETRY, ROOT_KEY))
        return opened[-1]

    yield make
    for one in opened:
        one.arena.region.close()


async def put(share, *keys):
    for key in keys:
        slot = share.reservations.reserve(key)
        share.commit(key, slot, UNCHECKED)


async def test_kv_of_our_engine_is_not_counted_unless_a_tenant_is_named_and_never_limited(share):
    kv = [bytes([i]) * 16 for i in range(8)]
    plain, named = share(), share("--tenants", f"default={SLOT}")
    await put(plain, *kv)
    await put(named, *kv)
    assert plain.tenants() == {}
    assert named.tenants() == {
        "default": {"bytes": 0, "quota": SLOT, "refused": 0},
        OTHER: {"bytes": 8 * SLOT, "quota": None, "refused": 0},
    }
    await put(named, spaces("default").names + bytes(10))
    assert [row["bytes"] // SLOT for row in named.tenants().values()] == [1, 7], "it has driven out a block of KV"
    for one in (plain, named):
        await one.close()


def test_a_quota_below_one_block_ends_the_start(share):
    with pytest.raises(UsageError, match=f"--tenants: a={SLOT - 1} is less than a block of {SLOT} bytes"):
        share("--tenants", f"a={SLOT - 1}")
