"""The window: every layer of every cold block comes in order, ahead of its reader, and nothing comes after the end."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.beyond.window import Reader

LAYERS, NBYTES = 3, 8


def from_rows(tier: np.ndarray):
    def fill(place: int, layer: int, into: memoryview) -> None:
        into[:] = memoryview(tier[place * LAYERS + layer])

    return fill


def memory(blocks: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (blocks * LAYERS, NBYTES), np.uint8)


@settings(max_examples=40)
@given(st.integers(0, 20), st.integers(1, 7), st.integers(0, 9))
def test_all_pieces_in_order(count, window, seed):
    tier, arena = memory(30, seed), memory(10, seed + 1)
    before, blocks = arena.copy(), list(range(2, 2 + window))
    slots = np.random.default_rng(seed).permutation(30)[:count].tolist()
    reader, fill = Reader(arena, LAYERS), from_rows(tier)
    try:
        with reader.read(fill, slots, blocks, range(LAYERS)) as reading:
            for layer in range(LAYERS):
                got = [arena[places].copy() for places in reading.layer()]
                wanted = [tier[slot * LAYERS + layer] for slot in slots]
                assert np.array_equal(
                    np.concatenate(got) if got else np.empty((0, NBYTES)), np.array(wanted).reshape(-1, NBYTES)
                )
        assert reader.nbytes == count * LAYERS * NBYTES
        others = [row for row in range(len(arena)) if row // LAYERS not in blocks]
        assert np.array_equal(arena[others], before[others]), "only the window is written"
    finally:
        reader.close()


def test_it_reads_ahead_as_far_as_the_window_goes_and_stops_when_told():
    reader, fill = Reader(memory(9, 2), LAYERS), from_rows(memory(30, 1))
    try:
        with pytest.raises(KeyError), reader.read(fill, range(12), [0, 1, 2], range(LAYERS)) as reading:
            next(pieces := reading.layer())
            while reader.nbytes < 3 * LAYERS * NBYTES:
                time.sleep(0.001)
            raise KeyError("the step fails")
        assert reader.nbytes == 3 * LAYERS * NBYTES, "the rest was never read"
        pieces.close()
        with reader.read(fill, range(4), [5], range(1, LAYERS)) as reading:
            assert [len(places) for places in reading.layer()] == [3, 1]
    finally:
        reader.close()


def test_an_error_of_the_disk_reaches_the_step():
    def fill(place: int, layer: int, into: memoryview) -> None:
        if layer == 1:
            raise OSError("the disk fails")

    reader = Reader(memory(2, 2), LAYERS)
    try:
        with pytest.raises(OSError, match="the disk fails"), reader.read(fill, [0, 1], [1], range(LAYERS)) as reading:
            assert len(list(reading.layer())) == 1
            list(reading.layer())
    finally:
        reader.close()
