"""BlockPool: two lifetimes, eviction, and books that always balance."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache.pool.block_pool import BlockPool, IntegrityError, OutOfBlocks
from cache.pool.policies import policies
from cache.pool.policies.shares import ClassShares
from cache.pool.policy import LRU, PLAIN

KEYS = [bytes([i]) * 16 for i in range(12)]


class PoolModel(RuleBasedStateMachine):
    """Random legal use of a small pool, with a plain model of who references what."""

    @initialize(num_blocks=st.integers(1, 6), policy=st.sampled_from(sorted(policies)))
    def start(self, num_blocks, policy):
        self.evicted = []
        self.forgetting = None  # the key that a rule drops now
        self.pool = BlockPool(num_blocks, policies[policy]())
        self.pool.watch(self.note_eviction)
        self.request_refs = []  # a block id per reference
        self.transfer_refs = []
        self.named = {}  # key -> block id

    def note_eviction(self, key, is_named):
        if is_named or key == self.forgetting:
            return
        assert self.named.pop(key) not in self.held
        self.evicted.append(key)

    @property
    def held(self):
        return {*self.request_refs, *self.transfer_refs}

    @rule(count=st.integers(0, 7))
    def allocate(self, count):
        free_before = self.pool.num_free
        if count > free_before:
            usage = self.pool.usage()
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            assert self.pool.usage() == usage
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not self.held & set(blocks)
        assert not set(self.named.values()) & set(blocks)
        assert self.pool.num_free == free_before - count
        self.request_refs += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def name(self, data, key):
        block_id = data.draw(st.sampled_from(sorted(self.held)))
        if self.pool.key_of(block_id) not in (None, key):
            return
        named = self.pool.name(block_id, key)
        assert named == (self.named.setdefault(key, block_id) == block_id)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def name_again(self, data, key):
        block_id = data.draw(st.sampled_from(sorted(self.held)))
        if self.pool.key_of(block_id) not in (None, key):
            return
        before = self.named.get(key)
        again = self.pool.name_again(block_id, key)
        assert again == (before in (None, block_id))
        if before not in self.held:
            self.named[key] = block_id

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4), transfer=st.booleans())
    def match_and_take(self, keys, transfer):
        found = self.pool.match(keys)
        run = [key in self.named for key in keys]
        assert len(found) == (run.index(False) if False in run else len(run))
        assert found == [self.named[key] for key in keys[: len(found)]]
        if transfer:
            self.pool.hold(found)
            self.transfer_refs += found
        else:
            self.pool.acquire(found)
            self.request_refs += found

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def hold(self, data):
        block_id = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.hold([block_id])
        self.transfer_refs.append(block_id)

    @rule(data=st.data(), transfer=st.booleans())
    def give_back(self, data, transfer):
        refs = self.transfer_refs if transfer else self.request_refs
        count = data.draw(st.integers(0, len(refs)))
        given, refs[:] = refs[:count], refs[count:]
        (self.pool.unhold if transfer else self.pool.release)(given)

    @rule(key=st.sampled_from(KEYS))
    def forget(self, key):
        self.forgetting = key
        assert self.pool.forget(key) == (self.named.pop(key, None) is not None)
        self.forgetting = None

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4), wanted_at=st.floats(0.0, 10.0))
    def put_aside(self, keys, wanted_at):
        self.pool.put_aside([(key, wanted_at) for key in keys])
        assert all((key in self.pool._aside) >= (key in keys and key in self.named) for key in KEYS)

    @invariant()
    def books_balance(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        usage = self.pool.usage()
        assert usage["held"] == len(self.held)
        assert usage["cached"] == len(set(self.named.values()) - self.held)
        assert usage["free"] + usage["cached"] == self.pool.num_free
        assert usage["evictions"] == len(self.evicted)
        assert self.pool.references() == {"request": len(self.request_refs), "transfer": len(self.transfer_refs)}
        assert {key: self.pool.lookup(key) for key in KEYS} == {key: self.named.get(key) for key in KEYS}
        assert all(key in self.named for key in KEYS if key in self.pool._aside)


TestPool = PoolModel.TestCase


def test_a_transfer_keeps_a_block_that_its_request_gave_back():
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.hold([block])
    pool.release([block])
    with pytest.raises(OutOfBlocks, match="1 blocks requested, but only 0 of 1"):
        pool.allocate(1)
    pool.unhold([block])
    assert pool.allocate(1) == [block]


def test_the_tail_of_a_prefix_is_evicted_first():
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block, key in zip(blocks, KEYS, strict=False):
        pool.name(block, key)
    pool.release(blocks)
    pool.allocate(1)
    assert pool.match(KEYS[:3]) == blocks[:2]


def cached(count: int) -> BlockPool:
    """A full pool whose blocks were used in the order of KEYS, each by itself."""
    pool = BlockPool(count)
    for block, key in zip(pool.allocate(count), KEYS, strict=False):
        pool.name(block, key)
        pool.release([block])
    return pool


def evicted(pool: BlockPool, count: int) -> list[int]:
    gone: list[int] = []
    pool.watch(lambda key, here: None if here else gone.append(KEYS.index(key)))
    pool.allocate(count)
    return gone


def test_what_is_put_aside_is_evicted_first_and_what_is_wanted_last_before_the_rest():
    pool = cached(5)
    pool.put_aside([(KEYS[2], 10.0), (KEYS[4], 99.0), (KEYS[3], float("inf"))])
    assert evicted(pool, 5) == [3, 4, 2, 0, 1]


def test_a_hit_ends_that_and_a_block_in_use_waits():
    pool = cached(4)
    pool.put_aside([(key, 10.0) for key in KEYS[:4]])
    pool.acquire([pool.lookup(KEYS[0])])
    pool.release([pool.lookup(KEYS[0])])
    pool.touch([pool.lookup(KEYS[1])])
    pool.hold([pool.lookup(KEYS[2])])
    assert evicted(pool, 1) == [3]
    pool.unhold([pool.lookup(KEYS[2])])
    assert evicted(pool, 1) == [2], "still aside"
    assert evicted(pool, 2) == [0, 1]


@pytest.mark.parametrize(("policy", "unwanted"), [(LRU(), 3), (ClassShares(LRU, {"batch": 0.5}), 1)])
def test_new_content_in_unwanted_room_takes_the_place_of_nothing_else(policy, unwanted):
    pool = BlockPool(5, policy)
    for key in KEYS[:4]:
        pool.name(block := pool.allocate_for(PLAIN), key)
        pool.release([block])
    pool.put_aside([(KEYS[2], 10.0), (KEYS[3], 10.0)])
    assert pool.num_unwanted == unwanted
    for _ in range(unwanted):
        pool.allocate_for(PLAIN)
    assert {KEYS[0], KEYS[1]} <= {*pool.keys()}


def test_only_what_is_here_is_put_aside_and_entries_do_not_gather():
    pool = cached(2)
    pool.put_aside([(KEYS[7], 1.0)])
    assert len(pool._aside) == 0
    for turn in range(1000):
        pool.put_aside([(KEYS[0], float(turn))])
    assert len(pool._aside._order) <= 80
    pool.allocate(1)
    assert pool.lookup(KEYS[0]) is None


def test_an_evicted_block_has_no_key():
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.name(block, KEYS[0])
    pool.release([block])
    assert pool.allocate(1) == [block]
    assert pool.key_of(block) is None


def test_the_second_block_of_a_key_stays_unnamed():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    assert pool.name(first, KEYS[0])
    assert pool.name(first, KEYS[0]), "naming twice is the same name"
    assert not pool.name(second, KEYS[0])
    pool.release([first, second])
    assert pool.usage() | {"evictions": 0} == {
        "total": 2,
        "free": 1,
        "cached": 1,
        "held": 0,
        "named": 1,
        "evictions": 0,
    }


def test_a_prompt_that_is_computed_again_leaves_from_its_end():
    """The first of its blocks is still cached, and so was the older one."""
    pool = BlockPool(4)
    (old,) = pool.allocate(1)
    assert pool.name_again(old, KEYS[0])
    pool.release([old])
    first, second = pool.allocate(2)
    assert not pool.name_again(first, KEYS[0]) and pool.name_again(second, KEYS[1])
    pool.release([first, second])
    assert pool.match(KEYS[:2]) == [first, second]
    pool.allocate(3)
    assert pool.match(KEYS[:2]) == [first]


def test_misuse_is_refused():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.name(block, KEYS[0])
    with pytest.raises(ValueError, match="already"):
        pool.name(block, KEYS[1])
    with pytest.raises(ValueError, match="no such reference"):
        pool.unhold([block])
    pool.release([block])
    with pytest.raises(ValueError, match="no such reference"):
        pool.release([block])
    with pytest.raises(ValueError, match="not held"):
        pool.name(block, KEYS[0])
    with pytest.raises(ValueError, match="is free"):
        pool.acquire([1 - block])
    pool.check_integrity()


def test_integrity_notices_wrong_books():
    pool = BlockPool(2)
    pool.allocate(1)
    pool._free.append(0)
    with pytest.raises(IntegrityError, match="in use"):
        pool.check_integrity()


def test_a_transfer_reference_that_nobody_answers_for_is_noticed():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.hold([first, first, second])
    pool.release([first, second])
    pool.check_transfer_owners([first, second, first])
    with pytest.raises(IntegrityError, match="1 blocks are held for unknown transfers"):
        pool.check_transfer_owners([first, second])
    with pytest.raises(IntegrityError, match="blocks of running transfers are not held"):
        pool.check_transfer_owners([first, first, second, second])


def test_errors_name_the_group_and_the_block():
    pool = BlockPool(8)
    plain, windowed, state = pool.allocate(3)
    pool.assign([windowed], 1)
    pool.assign([state], 2)
    pool.name(windowed, KEYS[0])
    pool.check_request_owners([plain, windowed, state])
    with pytest.raises(IntegrityError, match=rf"unknown requests: group 1: \[{windowed}\], group 2: \[{state}\]"):
        pool.check_request_owners([plain])
    with pytest.raises(IntegrityError, match=rf"not held: group 0: \[{plain}\]"):
        pool.check_request_owners([plain, plain, windowed, state])
    assert pool.usage_by_group() == {g: {"cached": 0, "held": 1} for g in range(3)}
    pool.release([windowed])
    assert pool.usage_by_group()[1] == {"cached": 1, "held": 0}
    pool.check_integrity()

    pool._request_refs[state] = 0  # its reference is lost, and the block with it
    with pytest.raises(IntegrityError, match=rf"neither free nor cached nor held: group 2: \[{state}\]"):
        pool.check_integrity()
    pool._request_refs[state] = 1
    pool.check_integrity()


def test_a_free_block_is_of_no_group():
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.assign(blocks, 3)
    pool.name(blocks[0], KEYS[0])
    pool.release(blocks)
    assert [pool.group_of(block) for block in blocks] == [3, 0]  # cached, free
    pool.allocate(2)  # evicts
    assert [pool.group_of(block) for block in blocks] == [0, 0]
    pool.check_integrity()
    pool.release(blocks)
    pool._group_of[blocks[0]] = 1
    with pytest.raises(IntegrityError, match=rf"still belong to groups: group 1: \[{blocks[0]}\]"):
        pool.check_integrity()
