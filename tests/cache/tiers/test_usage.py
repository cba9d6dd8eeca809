"""What each tenant has in one share: counted as in the tiers themselves, and limited by quotas."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.arena import Arena, checksum
from cache.offer import Contents, Offer
from cache.protocol import OVER, PRESENT
from cache.ssd import SsdTier, backends
from cache.tenants import SPACE_BYTES, spaces
from cache.tiers.granting import Granting
from cache.tiers.local_store import LocalStore, NoSpace, QuotaReached
from cache.tiers.usage import OTHER, Usage
from net.transfer.common.memory import Region

SLOT = 3000
ROOT = b"r" * 16
VALUE = bytes(range(100))


def key_of(tenant: str, i: int, part: bool = False) -> bytes:
    """`tenant` "": the key of KV."""
    digest = random.Random(i).randbytes(16)
    space = spaces(tenant)[part] if tenant else digest[:SPACE_BYTES]
    return space + digest[SPACE_BYTES:]


def share(slots: int, tenants: dict[str, int | None], directory=None, backend="lmdb", ssd_bytes=256 << 10):
    region = Region.private("dram", slots * SLOT)
    ssd = SsdTier(directory, SLOT, ssd_bytes, ROOT, backend=backend) if directory is not None else None
    return region, LocalStore(Arena(region, SLOT), ssd, usage=Usage(tenants, SLOT))


def put(store: LocalStore, key: bytes, **options: bool) -> bool:
    slot = store.reservations.reserve(key, **options)
    if slot is None:
        return False
    store.arena.memory(slot)[: len(VALUE)] = VALUE
    store.commit(key, slot, checksum(VALUE), len(VALUE))
    return True


def used(store: LocalStore) -> dict[str, int]:
    return {name: row["bytes"] // SLOT for name, row in store.tenants().items()}


def test_the_spaces_of_a_tenant_never_change():
    """Values on SSD and clients of other versions have them in their keys."""
    names, parts = spaces("default")
    assert (names.hex(), parts.hex()) == ("7b592afc5396", "4c5912c60f3b")


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), backend=st.sampled_from([None, *sorted(backends)]), slots=st.integers(2, 5))
def test_usage_is_what_the_tiers_have(tmp_path_factory, seed, backend, slots):
    """After any puts, evictions, spills to SSD, reads back, replacements and removals."""
    asyncio.run(random_use(tmp_path_factory.mktemp("usage"), seed, backend, slots))


async def random_use(directory, seed, backend, slots):
    rng = random.Random(seed)
    tenants = {"a": None, "b": 6 * SLOT}
    options = {"directory": directory, "backend": backend} if backend else {}
    region, store = share(slots, tenants, **options)
    keys = [key_of(rng.choice(["a", "b", ""]), i, rng.random() < 0.5) for i in range(24)]
    coming: dict[int, bytes] = {}
    owners = {space: name for name in tenants for space in spaces(name)}

    def model():
        found = dict.fromkeys([*tenants, OTHER], 0)
        for key in {*store.keys(), *coming.values()}:
            found[owners.get(key[:SPACE_BYTES], OTHER)] += 1
        return found

    for _ in range(80):
        key = rng.choice(keys)
        try:
            match rng.randrange(6):
                case 0 | 1:
                    put(store, key)
                case 2:
                    if len(coming) < slots - 1 and (slot := store.reservations.reserve(key)) is not None:
                        coming[slot] = key
                case 3 if key not in coming.values():
                    put(store, key, copy=True, over=True)
                case 4:
                    await store.remove(rng.sample(keys, 3))
                case 5:
                    pins = await store.pinning.pin_each([key])
                    store.pinning.unpin([pin.slot for pin in pins if pin is not None])
        except NoSpace:
            await store.wait_for_room(1)
        except QuotaReached:
            assert owners.get(key[:SPACE_BYTES]) == "b" and used(store)["b"] >= 6
        if coming and rng.random() < 0.2:
            slot, _ = coming.popitem()
            store.reservations.abandon(slot)
        if rng.random() < 0.3:
            await store.drain()
            assert used(store) == model()
    for slot in coming:
        store.reservations.abandon(slot)
    coming.clear()
    await store.drain()
    assert used(store) == model()
    after = model()
    await store.close()
    region.close()
    if backend is not None:
        region, store = share(slots, tenants, directory, backend)
        on_ssd = used(store)
        assert on_ssd == model() and sum(on_ssd.values()) == len(store.keys())
        assert all(on_ssd[name] <= after[name] for name in after)
        await store.close()
        region.close()


@pytest.fixture
async def pool():
    """A share in which tenant a may have two blocks."""
    region, store = share(8, {"a": 2 * SLOT + 1, "b": None})
    yield store
    await store.close()
    region.close()


async def test_a_tenant_at_its_quota_is_refused_and_others_go_on(pool):
    assert put(pool, key_of("a", 1)) and put(pool, key_of("a", 2, part=True))
    with pytest.raises(QuotaReached):
        pool.reservations.reserve(key_of("a", 3))
    assert not put(pool, key_of("a", 1)), "here"
    assert put(pool, key_of("b", 3)) and put(pool, key_of("", 4)) and put(pool, key_of("c", 5))
    assert pool.tenants() == {
        "a": {"bytes": 2 * SLOT, "quota": 2 * SLOT + 1, "refused": 1},
        "b": {"bytes": SLOT, "quota": None, "refused": 0},
        OTHER: {"bytes": 2 * SLOT, "quota": None, "refused": 0},
    }
    await pool.remove([key_of("a", 1)])
    assert put(pool, key_of("a", 3))


async def test_blocks_that_are_being_written_count(pool):
    slot = pool.reservations.reserve(key_of("a", 1))
    assert put(pool, key_of("a", 2))
    with pytest.raises(QuotaReached):
        pool.reservations.reserve(key_of("a", 3))
    assert pool.reservations.reserve(key_of("a", 1)) is None, "it is being written"
    pool.reservations.abandon(slot)
    assert put(pool, key_of("a", 3))


async def test_a_home_answers_over_for_new_blocks_and_takes_copies(pool):
    """Copies were acknowledged when they were put, so they are counted and not refused."""
    granting = Granting(pool, lambda key: False)
    keys = [key_of("a", i) for i in range(3)]
    first = granting.grant(0.0, keys, Offer(decide=True))
    assert min(first[:2]) >= 0 and first[2:] == [OVER]
    for slot in first[:2]:
        pool.reservations.abandon(slot)
    copies = granting.grant(0.0, keys, Offer(contents=Contents([1, 2, 3], [10, 10, 10])))
    assert min(copies) >= 0 and used(pool)["a"] == 3
    assert granting.grant(0.0, [key_of("a", 9), keys[0], key_of("b", 9)], Offer())[:2] == [OVER, PRESENT]
    for slot in copies:
        pool.reservations.abandon(slot)


def test_a_quota_below_one_block_is_a_mistake():
    with pytest.raises(ValueError, match="a=2999 is less than a block of 3000 bytes"):
        Usage({"a": SLOT - 1}, SLOT)
