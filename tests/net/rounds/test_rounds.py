"""Messages and answers through shared memory, in one process: what is sent where, and what is added up."""

from __future__ import annotations

import ctypes
import threading
import time

import numpy as np
import pytest

from net.rounds import native
from net.rounds.desk import Desk, Heart, await_answers, new_bell, new_region
from net.rounds.layout import PAGE, Layout


@pytest.fixture
def desk():
    made = Desk(new_region("desk", LAYOUT), LAYOUT)
    yield made
    made.close()


LAYOUT = Layout(most_rows=8, hidden=16, top_k=2, dtype="float32")


def test_a_message_is_answered_once(desk):
    bell = new_bell("bell")
    assert desk.next_message(0.0) is None and desk.idle
    desk.ask(7, 8)
    assert not desk.idle
    assert await_answers([desk], bell, 0.01) == [False]
    message = desk.next_message(0.0)
    assert message is not None and message.head[:2] == [7, 8]
    desk.answered(message.number, bell)
    assert desk.idle and desk.next_message(0.0) is None
    assert await_answers([desk], bell, 0.0) == [True]
    bell.close()


def test_both_sides_sleep_until_they_are_woken(desk):
    bell = new_bell("bell")

    def serve() -> None:
        for _ in range(3):
            message = desk.next_message(10.0)
            assert message is not None
            time.sleep(0.02)
            desk.answered(message.number, bell)

    thread = threading.Thread(target=serve)
    thread.start()
    for _ in range(3):
        time.sleep(0.02)
        desk.ask(1)
        assert await_answers([desk], bell, 10.0) == [True]
    thread.join(10)
    bell.close()


def test_a_heart_beats_until_it_is_stopped(desk):
    with Heart(desk):
        deadline = time.monotonic() + 20
        while desk.beats < 3:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    stopped = desk.beats
    time.sleep(0.05)
    assert desk.beats == stopped


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_go_once_to_each_rank_and_are_added_up(dtype):
    """Ranks that answer with their rows, times the sum of the weights: the result is x times the sum of all."""
    rng = np.random.default_rng(3)
    layout = Layout(most_rows=40, hidden=24, top_k=3, dtype=dtype)
    desks = [Desk(new_region("desk", layout), layout) for _ in range(3)]
    tokens, experts, slots = 37, 9, 3
    x = rng.standard_normal((tokens, layout.hidden)).astype(dtype)
    chosen = np.stack([rng.permutation(experts)[:3] for _ in range(tokens)]).astype(np.int64)
    weights = rng.random((tokens, 3)).astype(np.float32)
    table = np.arange(experts, dtype=np.int32)[:, None].copy()
    table[4] = -1  # nobody has it
    counts, sent = np.zeros(experts, np.int64), np.empty((tokens, 3), np.int32)
    d = native.Dispatch()
    room = [np.zeros(layout.most_rows, np.int32) for _ in desks]
    for rank, desk in enumerate(desks):
        d.desks[rank], d.tokens[rank] = desk.message, room[rank].ctypes.data
    for name, array in {"x": x, "chosen": chosen, "weights": weights, "table": table}.items():
        setattr(d, name, array.ctypes.data)
    d.counts, d.sent = counts.ctypes.data, sent.ctypes.data
    d.num_tokens, d.hidden, d.top_k, d.columns, d.slots, d.ranks = tokens, layout.hidden, 3, 1, slots, 3
    d.at_scales, d.at_pair_rows = layout.at_scales, layout.at_pair_rows
    d.at_pair_slots, d.at_pair_weights = layout.at_pair_slots, layout.at_pair_weights
    d.type, d.own = {"float32": 0, "float16": 1}[dtype], -1
    native.library().mr_dispatch(ctypes.addressof(d))

    assert (counts == np.bincount(chosen.ravel(), minlength=experts)).all()
    assert (sent == np.where(chosen == 4, -1, chosen // slots)).all()
    for rank, desk in enumerate(desks):
        memory = np.frombuffer(desk.region.memory, np.uint8)[PAGE:]
        rows, pairs = d.rows[rank], d.pairs[rank]
        got = memory[: rows * layout.hidden * x.itemsize].view(dtype).reshape(rows, -1)
        at = [
            memory[a:].view(t)[:pairs] for a, t in ((layout.at_pair_rows, np.int32), (layout.at_pair_slots, np.int32))
        ]
        factor = memory[layout.at_pair_weights :].view(np.float32)[:pairs]
        here = np.where(sent == rank)
        assert (room[rank][:rows] == np.unique(here[0])).all()
        assert (got == x[room[rank][:rows]]).all()
        assert (room[rank][at[0]] == here[0]).all() and (at[1] == chosen[here] % slots).all()
        total = np.bincount(at[0], factor, minlength=rows).astype(np.float32)
        answer = memory[layout.message_bytes :][: rows * layout.hidden * x.itemsize].view(dtype).reshape(rows, -1)
        answer[:] = got * total[:, None]
    out = np.empty((tokens, layout.hidden), dtype)
    answers = (ctypes.c_void_p * 3)(*(desk.answer for desk in desks))
    native.library().mr_combine(ctypes.addressof(d), answers, None, out.ctypes.data, d.type)
    whole = x * np.where(chosen == 4, 0, weights).sum(1, keepdims=True)
    np.testing.assert_allclose(out, whole, rtol=1e-5 if dtype == "float32" else 4e-3, atol=1e-6)


def test_other_types_are_refused():
    with pytest.raises(ValueError, match="rows of int8 cannot be sent"):
        Layout(most_rows=8, hidden=16, top_k=2, dtype="int8")
