"""The planner of requests beyond memory: room, forecast, and refusals with their arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sched.beyond import ColdSteps, Room, forecast, no_room, room_of, too_slow

ROOMS = st.builds(
    room_of,
    st.integers(0, 5000),
    st.tuples(st.integers(0, 100_000), st.integers(0, 1000)),
    st.sampled_from([1, 4, 16, 64]),
    st.integers(1, 1 << 22),
    st.integers(1, 4096),
)


@given(
    st.integers(0, 5000), st.integers(0, 1000), st.integers(0, 9), st.sampled_from([1, 16, 64]), st.integers(1, 4096)
)
def test_a_room_leaves_half_of_the_arena_to_others(arena, cold, far, size, step):
    room = room_of(arena, (cold, far), size, 100, step)
    if room is None:
        assert arena < 6 or not cold or size >= step
        return
    assert (room.window_blocks > 0) == (far > 0) and room.hot_blocks >= 2 and 2 * room.arena_blocks <= arena
    assert size <= room.chunk_tokens < step + size, "a step's budget fits unless the arena is too small"


@given(ROOMS, st.data())
def test_cold_blocks_are_what_the_hot_ones_do_not_hold(room, data):
    if room is None:
        return
    tokens = data.draw(st.integers(0, 2 * room.tokens))
    cold = room.cold_of(tokens)
    assert cold >= 0 and (cold + room.hot_blocks) * room.block_size >= tokens
    assert cold == 0 or (cold + room.hot_blocks - 1) * room.block_size < tokens
    assert (no_room(tokens, 0, room, "n") is None) == (cold <= room.cold_blocks)


@given(ROOMS, st.integers(1, 1 << 13), st.integers(0, 1 << 13), st.floats(1e-4, 10))
def test_a_forecast_grows_with_the_prompt_and_falls_with_what_is_known(room, prompt, known, prefill_s):
    if room is None:
        return
    steps = ColdSteps(0.01, 1e9, 1e8)
    known = min(known, prompt) // room.chunk_tokens * room.chunk_tokens
    found = forecast(prompt, 16, known, room, steps, prefill_s)
    longer = forecast(2 * prompt, 16, known, room, steps, prefill_s)
    whole = forecast(prompt, 16, 0, room, steps, prefill_s)
    assert found.cold_bytes == room.cold_of(prompt) * room.block_bytes <= longer.cold_bytes
    assert found.near_bytes <= room.near_blocks * room.block_bytes
    assert found.token_s <= longer.token_s and found.prompt_s <= longer.prompt_s
    assert prefill_s <= found.prompt_s <= whole.prompt_s
    in_memory = found.near_bytes + room.hot_bytes(prompt)
    assert in_memory + found.far_bytes == -(-prompt // room.block_size) * room.block_bytes
    assert found.token_s == pytest.approx(0.01 + in_memory / 1e9 + found.far_bytes / 1e8)


def test_it_learns_all_coefficients():
    steps = ColdSteps()
    for _ in range(8):
        for near, far in ((10_000_000, 0), (40_000_000, 0), (80_000_000, 5_000_000), (80_000_000, 50_000_000)):
            steps.observe(near, far, 0.02 + near / 2e9 + far / 2e8)
    assert steps.token_s(160_000_000, 0) == pytest.approx(0.02 + 0.08, rel=0.05)
    assert steps.read_s(0, 100_000_000) == pytest.approx(0.5, rel=0.05)


def test_the_reasons_have_the_numbers_and_the_flags():
    room = Room(16, 1000, hot_blocks=4, window_blocks=1, near_blocks=6)
    assert no_room(150, 10, room, "d") is None
    reason = no_room(150, 26, room, "d")
    assert reason is not None
    for word in ("150 tokens", "26 to generate", "7 blocks of 1000 bytes (0.007 MB)", "the 4", "has 6", "of d"):
        assert word in reason
    assert "--dram-bytes" in reason and "--ssd-path" in reason
    more = no_room(350, 26, Room(16, 1000, 4, 1, near_blocks=6, far_blocks=9), "d")
    assert more is not None and "its SSD 9 (0.009 MB)" in more and "--ssd-bytes" in more
    found = forecast(150, 10, 0, room, ColdSteps(0.5), 1.0)
    assert too_slow(found, "batch", 1.0, "d") is None
    slow = too_slow(found, "standard", 0.1, "d")
    assert slow is not None and "2 tokens/s" in slow and "0.1 s (--slo)" in slow and "--kv-cache-bytes" in slow
