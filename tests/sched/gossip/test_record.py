"""Node records: what is packed comes back, and any other bytes are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from sched.gossip.load_word import LoadWord
from sched.gossip.record import RECORD, RECORD_BYTES
from sched.gossip.state import NodeRecord
from tests.sched.gossip.test_state import view_of

u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
time_s = st.floats(0, 1e6, width=32)
fill = st.integers(0, 255).map(lambda part: part / 255)
records = st.builds(
    NodeRecord,
    node=u64,
    incarnation=u32,
    version=u32,
    running=u16,
    max_running=u16,
    running_soon=u16,
    queued_tokens=u32,
    blocks_used=u32,
    blocks_soon=u32,
    blocks_total=u32,
    health=st.integers(0, 7),
    flags=u16,
    digest_epoch=u16,
    settled=u64,
    written_ms=u32,
    residual=st.floats(0, 60_000, width=16),
    age_s=time_s,
    work_s=time_s,
    prefill_a0=time_s,
    prefill_a1=time_s,
    prefill_a2=time_s,
    decode_step_s=time_s,
    dram_fill=fill,
    ssd_fill=fill,
    nic_in=fill,
    nic_out=fill,
)


@seed(1)
@settings(deadline=None)
@given(records, u16, u16, u16)
def test_a_record_survives_packing(record, interactive, standard, batch):
    record = replace(
        record,
        waiting=interactive + standard + batch,
        waiting_interactive=interactive,
        waiting_batch=batch,
    )
    data = record.pack()
    assert len(data) == RECORD_BYTES == 92
    assert NodeRecord.unpack(data) == record and record.waiting_standard == standard
    [row] = np.frombuffer(data, RECORD)
    assert NodeRecord.of_row(row.item()) == record, "the numpy layout and the struct are one"


@seed(5)
@settings(deadline=None)
@given(records, u16, u16)
def test_a_record_begins_with_the_load_word(record, interactive, batch):
    record = replace(
        record, waiting=interactive + batch + 3, waiting_interactive=interactive, waiting_batch=batch, settled=0
    )
    waiting = {"interactive": interactive, "standard": 3, "batch": batch}
    word = LoadWord.of(record, waiting, record.flags, record.digest_epoch)
    word = replace(word, version=record.version, written_ms=record.written_ms)
    assert word.pack()[:60] == record.pack()[:60]


def test_counters_saturate_instead_of_failing():
    record = NodeRecord.unpack(NodeRecord(waiting=100_000, queued_tokens=2**40).pack())
    assert (record.waiting, record.queued_tokens) == (65_535, 2**32 - 1)


@seed(2)
@given(st.binary(min_size=RECORD_BYTES, max_size=RECORD_BYTES))
def test_any_bytes_are_a_sane_record_or_refused(data):
    view = view_of("a")
    try:
        record = NodeRecord.unpack(data)
    except ValueError:
        with pytest.raises(ValueError, match="finite"):
            view.merge_packed(0.0, data)
        return
    assert record.work_s >= 0 and record.pack() == data[:-1] + b"\0"
    assert view.merge_packed(0.0, data) == (0, 1)


def test_another_length_is_refused():
    with pytest.raises(ValueError, match="92 bytes"):
        NodeRecord.unpack(b"x" * 63)
