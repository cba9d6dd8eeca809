"""The part of a prompt that a node of a group computes, and the hidden states that a stage waits for."""

from __future__ import annotations

import pytest
import torch

from engine.step.hidden import HiddenQueue, from_bytes, to_bytes
from engine.step.part import MAX_UNREAD, Stage, Stripes


def test_the_first_stage_computes_its_planned_chunks():
    part = Stage(0, 2, 4, 100)
    assert part.room(0) == 0, "nobody has said where to begin"
    part.start(32, [64, 48, 6])
    assert [part.room(done) for done in (32, 60, 96, 144, 150)] == [64, 36, 48, 6, 0]
    assert part.first and not part.last and part.share == 0.5


def test_a_later_stage_computes_what_has_arrived():
    part = Stage(2, 4, 4, 100)
    part.start(32)
    assert part.room(32) == 0
    part.available += 64
    assert part.room(32) == 64 and part.room(96) == 0
    assert part.last and not part.first


def test_a_chunk_fits_into_a_message():
    part = Stage(0, 2, 4, 100)
    part.start(0, [256, 30])
    assert [part.room(done) for done in (0, 100, 200, 256)] == [100, 100, 56, 30]


@pytest.mark.parametrize("change", [{"lost": True}, {"unread": MAX_UNREAD}])
def test_a_part_that_lost_its_blocks_or_is_far_ahead_stands_still(change):
    part = Stage(0, 2, 4, 100)
    part.start(0, [64, 64])
    for name, value in change.items():
        setattr(part, name, value)
    assert part.room(0) == 0


def test_the_layers_of_the_next_step():
    part = Stage(2, 7, 10, 100)
    assert part.layers_left == part.span == range(2, 7)
    assert part.next_layers(50, 1000) == range(2, 7)
    assert part.next_layers(50, 17) == range(2, 5), "17 tokens pass ten layers while 50 pass three"
    assert part.next_layers(50, 1) == range(2, 3), "at least one"
    part.passed(50, 5)
    assert part.layers_left == range(5, 7) and part.next_layers(50, 5) == range(5, 6)
    part.spent(0.5, "hidden")
    part.passed(0, 0)
    assert part.layers_left == range(2, 7) and part.hidden is None and part.spent_s == 0


def test_parts_of_a_chunk_are_as_far_ahead_as_the_chunk():
    part = Stage(0, 2, 4, 100)
    part.start(0, [64, 48])
    assert [part.ahead(count) for count in (64, 48, 16)] == [1.0, 0.75, 0.25]
    later = Stage(1, 2, 4, 100)
    later.start(0)
    later.arrived(32)
    assert (later.ahead(16), later.available) == (0.5, 32)
    later.arrived(64)
    later.arrived(8)
    assert (later.ahead(16), later.available) == (0.25, 104)


def stripes(index: int, nodes: int = 2, most: int = 100) -> Stripes:
    return Stripes(0, 4, 4, most, index=index, nodes=nodes)


def test_nodes_take_turns_and_the_last_one_has_the_last_chunk():
    first, last = stripes(0), stripes(1)
    for part in (first, last):
        assert part.room(32) == 0 and part.share == 1 and part.load == 0.5
        part.start(32, [32, 32, 20])
    assert first.chunks_of(0) == [(64, 96)] and first.chunks_of(1) == [(32, 64), (96, 116)]
    assert last.last and not first.last
    assert (first.stop(116), last.stop(116)) == (96, 116)


def test_a_node_computes_its_own_chunks_and_skips_the_others():
    part = stripes(1, most=24)
    part.start(32, [32, 32, 20])
    assert [part.room(done) for done in (32, 40, 56, 64, 95, 96, 110, 116)] == [24, 24, 8, 0, 0, 20, 6, 0]
    assert [part.next_begin(done) for done in (32, 33, 64, 96, 97)] == [32, 96, 96, 96, None]
    part.lost = "its blocks went to others"
    assert part.room(32) == 0


def test_what_is_delivered_counts_up_to_the_next_own_chunk():
    """The decode node has whole blocks up to the smallest of these."""
    first, last = stripes(0), stripes(1)
    for part in (first, last):
        part.start(32, [32, 32, 20])
    assert [last.owed_from(done, 116) for done in (48, 64, 100, 116)] == [48, 96, 100, 116]
    assert [first.owed_from(done, 116) for done in (80, 96)] == [80, 116]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_travel_as_bytes(dtype):
    sent = torch.randn(5, 12).to(dtype)
    got = from_bytes(memoryview(bytearray(to_bytes(sent))), 5, 12, dtype)
    assert torch.equal(got, sent)
    with pytest.raises(ValueError, match="are not 6 hidden states"):
        from_bytes(to_bytes(sent), 6, 12, dtype)


def test_hidden_states_are_taken_in_any_cut():
    queue, whole = HiddenQueue(32), torch.arange(20.0).view(10, 2)
    queue.add(whole[:4])
    queue.add(whole[4:])
    assert queue.end == 42
    assert torch.equal(queue.take(34, 5), whole[2:7])
    taken = queue.take(32, 10)
    taken.zero_()  # the model works in place
    assert queue.drop_before(35) == 0 and queue.drop_before(36) == 1
    assert torch.equal(queue.take(36, 6), whole[4:])
