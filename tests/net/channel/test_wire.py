"""Frames survive every way of cutting the stream; damage and greed are refused."""

import os

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.faults.checks import own_bytes
from net.channel.wire import (
    DIRECT_MIN,
    HEADER_MAX,
    MAGIC,
    PREFIX,
    STAGING_BYTES,
    VERSION,
    Decoder,
    FrameError,
    allocate,
    encode,
    head,
)

small = st.binary(max_size=3000)
large = st.integers(0, 3 * DIRECT_MIN + 17).map(lambda n: bytes(i * 31 & 255 for i in range(256)) * (n // 256 + 1))
headers = st.dictionaries(st.text(max_size=8), st.integers(0, 9) | st.text(max_size=30), max_size=4)


def feed(decoder: Decoder, stream: bytes, cuts: list[int]) -> list[tuple[dict, bytes]]:
    """Feed `stream` in pieces of at most the cycled sizes `cuts`, never more than the decoder offers."""
    frames, start, turn = [], 0, 0
    while start < len(stream):
        room = decoder.buffer()
        count = min(len(room), cuts[turn % len(cuts)], len(stream) - start)
        room[:count] = stream[start : start + count]
        frames += [(frame.header, b"".join(frame.payload)) for frame in decoder.received(count)]
        start, turn = start + count, turn + 1
    return frames


@settings(deadline=None)
@given(
    st.lists(st.tuples(headers, small | large), max_size=6),
    st.lists(st.integers(1, 2000) | st.integers(1, 1 << 20), min_size=1, max_size=8),
)
def test_any_chunking_gives_the_same_frames(messages, cuts):
    stream = b"".join(encode(header, [payload]) for header, payload in messages)
    assert feed(Decoder(allocate()), stream, cuts) == messages


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 20000) | st.just(DIRECT_MIN * 2 + 5), min_size=1, max_size=20),
    st.lists(st.integers(100, 300000), min_size=1, max_size=5),
)
def test_payload_is_scattered_in_order(lengths, cuts):
    total = sum(lengths)
    memory = memoryview(bytearray(total))
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    views = [memory[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    payload = bytes(i * 7 & 255 for i in range(total))
    frames = feed(Decoder(lambda header, nbytes: views), encode({"n": 1}, [payload]) + encode({"n": 2}), cuts)
    assert [header["n"] for header, _ in frames] == [1, 2]
    assert bytes(memory) == payload


@given(st.binary(min_size=PREFIX.size, max_size=400))
def test_garbage_is_refused(garbage):
    if garbage[:4] == MAGIC:
        return
    with pytest.raises(FrameError, match="not a mooncake stream"):
        feed(Decoder(allocate()), garbage, [64])


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(0, 200), st.lists(st.integers(1, 99), min_size=1))
def test_a_damaged_stream_never_does_worse_than_a_frame_error(garbage, at, cuts):
    stream = bytearray(encode({"kind": "x", "body": {"y": [1, 2]}}, [b"payload" * 9]) * 2)
    stream[at : at + len(garbage)] = garbage
    try:
        feed(Decoder(allocate(limit=1 << 20), header_max=1 << 16), bytes(stream), cuts)
    except FrameError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (PREFIX.pack(MAGIC, VERSION + 1, 2, 0) + b"{}", "wire version"),
        (PREFIX.pack(MAGIC, VERSION, HEADER_MAX + 1, 0), "header of .* exceeds the limit"),
        (PREFIX.pack(MAGIC, VERSION, 2, 1 << 60) + b"{}", "payload of .* exceeds the limit"),
        (PREFIX.pack(MAGIC, VERSION, 2, 0) + b"{,", "not JSON"),
        (PREFIX.pack(MAGIC, VERSION, 2, 0) + b"[]", "not a JSON object"),
    ],
)
def test_refusals_say_why(stream, reason):
    with pytest.raises(FrameError, match=reason):
        feed(Decoder(allocate()), stream, [1000])


def test_a_header_longer_than_the_staging_buffer():
    header = {"text": "a" * (3 * STAGING_BYTES)}
    assert feed(Decoder(allocate()), encode({"first": 1}) + encode(header, [b"x"]), [70000])[1] == (header, b"x")


def test_large_pieces_are_read_in_place():
    memory = memoryview(bytearray(1 << 20))
    decoder = Decoder(lambda header, nbytes: [memory])
    feed(decoder, head({}, 1 << 20), [1000])
    room = decoder.buffer()
    room[:3] = b"abc"
    assert bytes(memory[:3]) == b"abc"
    assert not list(decoder.received(3))


def test_a_discarded_payload_leaves_its_destination_alone():
    memory = memoryview(bytearray(1 << 20))
    decoder = Decoder(lambda header, nbytes: [memory])
    stream = encode({"n": 1}, [b"x" * (1 << 20)])
    feed(decoder, stream[: 1 << 19], [1 << 16])
    decoder.discard()
    before = bytes(memory)
    assert before.count(b"x") < 1 << 20
    frames = feed(decoder, stream[1 << 19 :] + encode({"n": 2}), [1 << 16])
    assert [header["n"] for header, _ in frames] == [1, 2]
    assert bytes(memory) == before


def test_headers_must_have_a_json_form():
    with pytest.raises(orjson.JSONEncodeError):
        head({"x": object()})
    with pytest.raises(FrameError, match="send it as payload"):
        head({"x": "a" * (HEADER_MAX + 1)})


def test_a_connection_with_small_frames_takes_little_memory_wherever_it_lies():
    """After a life with large payloads, whose memory the allocator has: fresh memory is zero, and recycled is not."""
    before = [bytearray(b"x" * STAGING_BYTES) for _ in range(120)]
    kept = [bytearray(64) for _ in range(1000)]  # between them and the end of the heap
    before.clear()
    begin, frame = own_bytes(os.getpid()), encode({"k": 1}, [b"y" * 3000])
    decoders = [Decoder(allocate()) for _ in range(100)]
    for decoder in decoders:
        assert feed(decoder, frame, [1 << 20]) == [({"k": 1}, b"y" * 3000)]
    assert own_bytes(os.getpid()) - begin < 100 * STAGING_BYTES / 8, "0.25 MiB each if all of it counts"
    assert kept
