"""Cold: whatever a request computes, loses and computes again, every token lies in one place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.step.cold import Cold

SIZE = 4


class Tier:
    """Both arenas as lists of tokens: a block is the list of the positions written to it."""

    def __init__(self, blocks: int, slots: int) -> None:
        self.arena = [[-1] * SIZE for _ in range(blocks)]
        self.slots = [[-1] * SIZE for _ in range(slots)]
        self.closed = 0
        self.stored: list[bytes] = []
        self.named: list[tuple[bytes, int]] = []
        self.seen: list[tuple[int, int, float]] = []  # the second: how many slots

    def store(self, block_id: int, slot: int, key: bytes) -> int:
        self.slots[slot] = list(self.arena[block_id])
        self.stored.append(key)
        return 7

    def read(self, slots, window, layers):
        raise NotImplementedError

    def name(self, key, slot, block_checksum, facts) -> None:
        self.named.append((key, slot))

    def ran(self, tokens, slots, hot, seconds) -> None:
        self.seen.append((tokens, len(slots), seconds))

    def close(self) -> None:
        self.closed += 1


def compute(cold: Cold, tier: Tier, start: int, count: int) -> None:
    """Write tokens start .. start + count, and check that all before them are where they should be."""
    before = cold.make_room(start, count)
    assert before == len(cold.slots) * SIZE <= start
    for position in range(start, start + count):
        tier.arena[cold.hot[position // SIZE - len(cold.slots)]][position % SIZE] = position
    kept = [token for slot in cold.slots for token in tier.slots[slot]]
    kept += [token for block in cold.hot for token in tier.arena[block]]
    assert kept[: start + count] == list(range(start + count))


@given(st.integers(2, 6), st.integers(1, 3), st.data())
def test_every_token_is_in_one_place(hot, window, data):
    total = data.draw(st.integers(1, 120))
    found = data.draw(st.integers(0, (total - 1) // SIZE))
    need = max(0, -(-total // SIZE) - hot)
    tier = Tier(hot + window + 3, found + need)
    for slot in range(found):
        tier.slots[slot] = list(range(slot * SIZE, (slot + 1) * SIZE))
    cold = Cold(hot, window, SIZE, 3)
    assert not cold.open
    cold.lodge(tier, range(found), range(found, found + max(0, need - found)))
    cold.keys = [b"%d" % place for place in range(total)]
    blocks = data.draw(st.permutations(range(len(tier.arena))))[: cold.arena_blocks]
    cold.seat(blocks)
    start = cold.cold_tokens
    while start < total:
        count = min(data.draw(st.integers(1, cold.chunk_tokens)), total - start)
        compute(cold, tier, start, count)
        assert len(cold.hot) <= hot and len(cold.window) == window
        assert sorted(cold.hot + cold.free + cold.window) == sorted(blocks), "it keeps the blocks that it was given"
        start += count
        if data.draw(st.booleans()) and start < total:  # it loses its blocks
            cold.unseat()
            cold.seat(blocks[::-1])
            blocks, start = blocks[::-1], cold.cold_tokens
    assert len(cold.slots) <= max(found, need)
    moved = cold.take_moved()
    assert [place for place, _, _ in moved] == list(range(found, len(cold.slots))) and not cold.take_moved()
    assert cold.slots[found:] == list(range(found, len(cold.slots))), "spare slots are taken in order"
    assert tier.stored == [b"%d" % place for place, _, _ in moved]
    cold.close()
    cold.close()
    assert tier.closed == 1 and not cold.open
