"""A recorded trace is a trace: the simulator's reader takes it, equal prefixes have equal ids, others have not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.observe.trace_recorder import BLOCK_TOKENS, TraceRecorder, hash_ids
from lab.loads.trace import BLOCK_TOKENS as TRACE_BLOCK
from lab.loads.trace import read_trace


@given(shared=st.integers(0, 3 * BLOCK_TOKENS), one=st.integers(1, 900), other=st.integers(1, 900))
def test_ids_are_equal_as_far_as_prompts_are(shared, one, other):
    a = hash_ids([*range(shared), *(7 for _ in range(one))])
    b = hash_ids([*range(shared), *(9 for _ in range(other))])
    equal = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert equal == shared // BLOCK_TOKENS
    assert len(a) == -(-(shared + one) // BLOCK_TOKENS)
    assert all(0 <= x < 1 << 52 for x in a)


def test_what_is_recorded_can_be_read(tmp_path):
    assert BLOCK_TOKENS == TRACE_BLOCK
    path = tmp_path / "t.jsonl"
    for started in (100.0, 100.0):  # a second start goes on with the file
        recorder = TraceRecorder(path, started)
        recorder.ended(101.5, list(range(700)), 5, "batch")
        recorder.close()
    first, second = read_trace(path)
    assert first == second
    assert (first.timestamp_ms, first.input_length, first.output_length) == (1500.0, 700, 5)
    assert first.service_class == "batch" and len(first.hash_ids) == 2
