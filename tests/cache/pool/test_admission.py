"""Admission policies: what a full pool lets in."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.pool.admission import REMEMBERED_KEYS, History, TinyLFU, admissions, choose
from cache.pool.policy import PLAIN, Facts

CHAT, BATCH = Facts(service_class="interactive"), Facts(service_class="batch")


def offer(admission, key, facts=PLAIN, victim="victim"):
    admission.wanted(key)
    return admission.admits(key, facts, victim)


def test_second_hit_takes_what_is_offered_twice():
    admission = choose("second-hit")
    assert [offer(admission, key) for key in "abab"] == [False, False, True, True]


def test_class_aware_keeps_only_batch_waiting():
    admission = choose("class-aware")
    assert offer(admission, "chat", CHAT)
    assert [offer(admission, "job", BATCH), offer(admission, "job", BATCH)] == [False, True]


def test_always_takes_everything():
    assert offer(choose("always"), "a")


@given(st.lists(st.integers(0, 30), max_size=300), st.integers(1, 8))
def test_a_history_knows_the_last_keys_and_forgets_older_ones(keys, size):
    history, order = History(size), []
    for key in keys:
        history.add(key)
        order = [known for known in order if known != key] + [key]
        assert all(known in history for known in order[-size:])
    assert sum(known in history for known in order) <= 2 * size


@given(st.lists(st.integers(0, 50), max_size=400))
def test_tinylfu_never_counts_too_low(keys):
    sketch = TinyLFU(size=1000)
    for key in keys:
        sketch.wanted(key)
    for key, count in Counter(keys).items():
        assert sketch.count(key) >= min(count, TinyLFU.MOST)


def test_tinylfu_prefers_the_one_that_is_wanted_more_often_and_forgets_old_fame():
    sketch = TinyLFU(size=100)
    for _ in range(12):
        sketch.wanted("famous")
    assert not offer(sketch, "new", victim="famous")
    for number in range(3 * 10 * 100):
        sketch.wanted(number)
        sketch.wanted("rising")
    assert sketch.count("famous") < sketch.count("rising")
    assert sketch.admits("rising", PLAIN, "famous")


def test_names():
    assert set(admissions) == {"always", "second-hit", "tinylfu", "class-aware"}
    assert REMEMBERED_KEYS > 0
    with pytest.raises(ValueError, match="--cache-admission must be one of always"):
        choose("sometimes")


def test_an_admission_from_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "class Never:\n    def wanted(self, key): pass\n    def admits(self, key, facts, victim): return False\n"
    )
    assert not offer(choose(f"{file}:Never"), "a")
