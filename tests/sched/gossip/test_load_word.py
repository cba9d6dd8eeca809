"""The load word's bytes, and the account of claims against a model that knows whose they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sched.gossip.load_word import COUNTERS, PAGE_BYTES, WORD, WORD_BYTES, ClaimLedger, Load, LoadWord, TornWord
from sched.gossip.state import NodeRecord, node_key

RECORD = NodeRecord(
    node=node_key("n"),
    incarnation=7,
    version=3,
    running=4,
    waiting=3,
    max_running=32,
    queued_tokens=9000,
    blocks_used=70_000,
    blocks_total=90_000,
    work_s=1.5,
    prefill_a0=0.25,
    prefill_a1=0.5,
    decode_step_s=0.125,
    dram_fill=0.2,
    ssd_fill=1.0,
)


def test_a_word_has_64_bytes_and_says_what_was_put_in():
    word = LoadWord.of(RECORD, {"interactive": 1, "batch": 2}, flags=3, digest_epoch=9)
    assert (WORD.size, len(word.pack()), PAGE_BYTES) == (60, WORD_BYTES, 96)
    back = LoadWord.unpack(word.pack())
    assert back == word, "0.2 and 1.0 are multiples of 1/255"
    assert (back.waiting_interactive, back.waiting_standard, back.waiting_batch, back.waiting) == (1, 0, 2, 3)
    assert back.node == node_key("n") % 2**32
    other = NodeRecord(node=node_key("n"), incarnation=7, version=2, prefill_a0=0.25, prefill_a1=0.5, age_s=4.0)
    assert back.onto(other).prefill == RECORD.prefill
    assert (back.onto(other).work_s, back.onto(other).blocks_used, back.onto(other).age_s) == (1.5, 70_000, 0.0)


@given(st.integers(0, 63), st.integers(1, 255))
def test_a_changed_byte_is_a_torn_word(position, change):
    data = bytearray(LoadWord.of(RECORD, {}).pack())
    data[position] ^= change
    with pytest.raises(TornWord):
        LoadWord.unpack(bytes(data))


@given(st.integers(1, 59))
def test_a_word_read_while_the_next_is_written_is_torn(cut):
    old, new = LoadWord.of(RECORD, {}).pack(), LoadWord(version=2, work_s=3.0, running=1, waiting_batch=77).pack()
    mixed = new[:cut] + old[cut:]
    if mixed not in (old, new):
        with pytest.raises(TornWord):
            LoadWord.unpack(mixed)


def test_counts_saturate_and_nonsense_is_refused():
    word = LoadWord.unpack(LoadWord(running=1 << 20, blocks_used=1 << 40, version=2**32 + 5).pack())
    assert (word.running, word.blocks_used, word.version) == (0xFFFF, 0xFFFFFFFF, 5)
    with pytest.raises(ValueError, match="not finite"):
        LoadWord.unpack(LoadWord(work_s=float("nan")).pack())
    with pytest.raises(ValueError, match="64 bytes"):
        LoadWord.unpack(b"short")


def test_age_survives_the_wrap_of_its_clock():
    unix_s = 1_900_000_000.0
    assert LoadWord(written_ms=int(unix_s * 1000) % 2**32).age_s(unix_s + 2.5) == 2.5
    assert LoadWord(written_ms=2**32 - 1000).age_s(2**32 / 1000 + 1.0) == pytest.approx(2.0, abs=0.002)
    assert LoadWord(written_ms=5000).age_s(4.0) == 0.0


def test_a_page_adds_claims_to_the_work():
    page = LoadWord(work_s=2.0, settled=1_000_000).pack() + COUNTERS.pack(3_000_000, 0, 500_000, 0)
    load = Load.unpack(page)
    assert (load.claimed, load.claimed_by_message, load.outstanding) == (3_500_000, 500_000, 2_500_000)
    assert load.wait_s == pytest.approx(4.5)


TTL_S = 10
EVENTS = st.lists(
    st.tuples(st.sampled_from(["claim", "release", "arrive", "wait"]), st.integers(1, 50), st.integers(0, 6)),
    max_size=60,
)


@given(EVENTS)
def test_the_sum_of_open_claims_is_right_and_bounded_in_time(events):
    """The model knows each claim. While nobody ends a claim that had expired, both agree; at any time what is
    outstanding is no more than what was claimed within one life."""
    ledger, now, claimed, released = ClaimLedger(TTL_S), 0, 0, 0
    model: list[list[int]] = []  # [made at, amount]
    history: list[tuple[int, int]] = []
    for kind, amount, pick in events:
        model = [claim for claim in model if claim[0] + TTL_S > now]
        if kind == "claim":
            claimed += amount
            model.append([now, amount])
            history.append((now, amount))
        elif kind == "wait":
            now += pick
        elif model:
            _, amount = model.pop(pick % len(model))
            if kind == "release":
                released += amount
            else:
                ledger.seen(now, claimed, released)
                ledger.end(amount)
        ledger.seen(now, claimed, released)
        assert 0 <= ledger.settled <= claimed
        assert ledger.outstanding == claimed - ledger.settled
        assert ledger.outstanding <= sum(amount for made, amount in history if made + TTL_S > now)
        if not any(kind == "wait" for kind, _, _ in events):
            assert ledger.outstanding == sum(amount for _, amount in model)
    ledger.seen(now + TTL_S, claimed, released)
    assert ledger.outstanding == 0
