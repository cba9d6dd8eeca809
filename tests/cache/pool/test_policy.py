"""Eviction policies against slow models of themselves, and the table that names them."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cache.pool.policies import METHODS, choose, policies
from cache.pool.policies.fifo import FIFO
from cache.pool.policies.ranked import LFU
from cache.pool.policies.s3fifo import S3FIFO
from cache.pool.policies.shares import ClassShares
from cache.pool.policy import LRU, Facts
from tests.cache import naive_policies as naive

MODELS = {
    "lru": naive.NaiveLRU,
    "lfu": naive.NaiveLFU,
    "fifo": naive.NaiveFIFO,
    "length-aware": naive.NaiveLengthAware,
    "s3-fifo": naive.NaiveS3FIFO,
    "cost-aware": naive.NaiveCostAware,
}


class Lives(RuleBasedStateMachine):
    """Drives a policy and its model through the same legal lives."""

    policy_name = ""

    def __init__(self) -> None:
        super().__init__()
        self.both = (policies[self.policy_name](), MODELS[self.policy_name]())
        self.free, self.in_use, self.gone = set(), set(), set()
        self.count = 0

    def tell(self, method, *arguments):
        for each in self.both:
            getattr(each, method)(*arguments)

    @rule(position=st.integers(0, 3), cost=st.sampled_from([0.5, 1.0, 2.5]), again=st.booleans())
    def add(self, position, cost, again):
        """Something new, or what was here before."""
        if again and self.gone:
            item = self.gone.pop()
        else:
            item = self.count = self.count + 1
        self.tell("added", item, Facts(position, cost))
        self.free.add(item)

    @precondition(lambda self: self.free or self.in_use)
    @rule(data=st.data())
    def touch(self, data):
        self.tell("touched", data.draw(st.sampled_from(sorted(self.free | self.in_use))))

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def pin(self, data):
        item = data.draw(st.sampled_from(sorted(self.free)))
        self.tell("pinned", item)
        self.free.remove(item)
        self.in_use.add(item)

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def unpin(self, data):
        item = data.draw(st.sampled_from(sorted(self.in_use)))
        self.tell("unpinned", item)
        self.in_use.remove(item)
        self.free.add(item)

    @precondition(lambda self: self.free or self.in_use)
    @rule(data=st.data())
    def remove(self, data):
        item = data.draw(st.sampled_from(sorted(self.free | self.in_use)))
        self.leave(item)

    def leave(self, item):
        self.tell("removed", item)
        self.free.discard(item)
        self.in_use.discard(item)
        self.gone.add(item)

    @rule(goes=st.booleans())
    def victim(self, goes):
        if not self.free:
            for each in self.both:
                with pytest.raises(LookupError):
                    each.victim()
            return
        victims = [each.victim() for each in self.both]
        assert victims[0] == victims[1]
        assert victims[0] in self.free
        if goes:
            self.leave(victims[0])

    @invariant()
    def counts(self):
        assert len(self.both[0]) == len(self.both[1]) == len(self.free)


def test_fifo_keeps_its_order_through_a_look_while_all_were_pinned():
    policy = policies["fifo"]()
    for item in (1, 2):
        policy.added(item)
        policy.pinned(item)
    with pytest.raises(LookupError):
        policy.victim()
    for item in (1, 2):
        policy.unpinned(item)
    assert policy.victim() == 1


@pytest.mark.parametrize("name", policies)
def test_a_policy_is_what_its_definition_says(name):
    machine = type("Machine", (Lives,), {"policy_name": name})
    run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=40, deadline=None))


@pytest.mark.parametrize("name", policies)
def test_a_long_life(name):
    """Long enough for queues to turn and heaps to be rebuilt: 20 slots, skewed accesses as a pool makes them."""
    policy, model = policies[name](), MODELS[name]()
    here = set()
    for step in range(1500):
        item = step * step % 97 if step % 3 else step % 7
        if item in here:
            policy.touched(item)
            model.touched(item)
            continue
        if len(here) == 20:
            victim = model.victim()
            assert policy.victim() == victim
            policy.removed(victim)
            model.removed(victim)
            here.remove(victim)
        policy.added(item, Facts(item % 5, 1 + item % 3))
        model.added(item, Facts(item % 5, 1 + item % 3))
        here.add(item)
    assert len(policy) == len(model) == 20


def test_fifo_ignores_use():
    fifo = FIFO()
    for item in "abc":
        fifo.added(item)
    fifo.touched("a")
    fifo.pinned("b")
    fifo.unpinned("b")
    assert fifo.victim() == "a"


def test_fifo_returns_an_old_item_that_was_in_use_at_its_turn():
    fifo = FIFO()
    for item in "abc":
        fifo.added(item)
    fifo.pinned("a")
    assert fifo.victim() == "b"
    assert len(fifo) == 2
    fifo.unpinned("a")
    assert fifo.victim() == "a"
    assert len(fifo) == 3


def test_the_heap_of_lfu_does_not_grow_with_what_left_before_its_turn():
    lfu = LFU()
    lfu.added("stays")
    for item in range(10_000):
        lfu.added(item)
        lfu.removed(item)
    assert len(lfu._heap) < 200


def test_s3fifo_remembers_names_of_what_it_evicted_and_takes_them_into_the_main_queue():
    policy = S3FIFO()
    for item in range(20):
        policy.added(item)
    assert policy.victim() == 0
    policy.removed(0)
    policy.added(0)
    for item in range(100, 119):
        victim = policy.victim()
        assert victim != 0
        policy.removed(victim)
        policy.added(item)


# --- shares


def test_a_class_borrows_what_is_idle_and_gives_it_back_first():
    policy = ClassShares(LRU, {"interactive": 0.6, "batch": 0.4})
    for item in range(10):
        policy.added(("batch", item), Facts(service_class="batch"))
    for item in range(6):  # the cache is full: batch is above its share
        victim = policy.victim()
        assert victim == ("batch", item)
        policy.removed(victim)
        policy.added(("chat", item), Facts(service_class="interactive"))
    assert policy.victim() == ("chat", 0), "both have their share: the newcomer's class is not known, the first gives"
    policy.added("more", Facts(service_class="batch"))
    assert policy.victim() == ("batch", 6)


def test_a_class_with_nothing_evictable_gives_nothing():
    policy = ClassShares(LRU, {"batch": 0.1})
    policy.added("job", Facts(service_class="batch"))
    policy.added("chat", Facts(service_class="interactive"))
    policy.pinned("job")
    assert policy.victim() == "chat"
    policy.pinned("chat")
    with pytest.raises(LookupError):
        policy.victim()


@pytest.mark.parametrize("shares", [{"batch": 0.0}, {"batch": 1.2}, {"batch": 0.7, "interactive": 0.5}])
def test_shares_that_cannot_be(shares):
    with pytest.raises(ValueError, match="add up to 1"):
        ClassShares(LRU, shares)


# --- names


def test_the_table_of_policies():
    assert set(policies) == set(MODELS)
    for name in policies:
        assert all(callable(getattr(choose(name), method)) for method in METHODS)


def test_a_policy_from_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from cache.pool.policy import LRU\n\nclass Mine(LRU):\n    pass\n\nclass Half:\n    pass\n")
    assert type(choose(f"{file}:Mine")).__name__ == "Mine"
    assert len(choose(f"{file}:Mine", {"batch": 0.5})) == 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("clock", "--eviction must be one of lru"),
        ("{dir}/none.py:Mine", "no file"),
        ("{dir}/mine.py", "FILE.py:NAME"),
        ("{dir}/mine.py:Other", "has no class"),
        ("{dir}/mine.py:Half", "it lacks added"),
    ],
)
def test_a_wrong_name_is_explained(tmp_path, name, reason):
    (tmp_path / "mine.py").write_text("class Half:\n    pass\n")
    with pytest.raises(ValueError, match=reason):
        choose(name.format(dir=tmp_path))


def test_who_is_above_the_share_takes_nothing_from_who_is_within():
    """`took` counts blocks that are in use, too: here six of batch that nobody may evict yet."""
    policy = ClassShares(LRU, {"interactive": 0.4, "batch": 0.3})
    for item in range(4):
        policy.took("interactive")
        policy.added(("chat", item), Facts(service_class="interactive"))
    for _ in range(6):
        policy.took("batch")
    assert policy.victim_for("batch") is None, "its own are in use: it waits"
    assert policy.victim_for("interactive") == ("chat", 0), "a class may always use its own share"
    policy.added("job", Facts(service_class="batch"))
    assert policy.victim_for("batch") == policy.victim_for("interactive") == "job"
    policy.removed("job")
    assert policy.victim_for("batch") is None
    assert policy.victim_for("other") == ("chat", 0), "the others have three tenths, and nothing of it yet"
