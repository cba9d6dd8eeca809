"""The coder of exponents: the bytes of its definition, every value back, and damage that is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from xxhash import xxh3_64_intdigest

from lab.fuzz.coded import CodedTarget
from net.codec.definition import decoded, encoded
from net.codec.exponents import CHECK, HEAD_BYTES, KINDS, CodecError, Exponents

CODERS = {dtype: Exponents(dtype) for dtype in KINDS}
DTYPES = st.sampled_from(sorted(KINDS))
TILE = 8192
EDGES = [0, 1, 2, 3, 7, 16, 2 * TILE - 2, 2 * TILE, 2 * TILE + 1, 4 * TILE - 4, 4 * TILE, 4 * TILE + 4, 9 * TILE + 5]

target = CodedTarget()


def coded(raw: bytes, dtype: str) -> bytes:
    return bytes(CODERS[dtype].encode([memoryview(raw)]))


def back(frame: bytes, nbytes: int, dtype: str) -> bytes:
    out = bytearray(nbytes)
    CODERS[dtype].decode(memoryview(frame), [memoryview(out)])
    return bytes(out)


def normals(count: int, dtype: str, scale: float = 1.0, seed: int = 0) -> bytes:
    values = np.random.default_rng(seed).standard_normal(count, np.float32) * np.float32(scale)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(dtype).tobytes()


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("nbytes", EDGES)
@pytest.mark.parametrize("kind", ["normal", "random", "zeros", "one exponent but for few", "two scales"])
def test_the_bytes_are_those_of_the_definition(dtype, nbytes, kind):
    rng = np.random.default_rng(nbytes)
    raw = {
        "normal": lambda: normals(nbytes, dtype),
        "random": lambda: rng.bytes(nbytes),
        "zeros": lambda: bytes(nbytes),
        "one exponent but for few": lambda: (np.ones(nbytes, np.float32) - (rng.random(nbytes) < 0.01) * 0.9).tobytes(),
        "two scales": lambda: normals(nbytes // 3, dtype) + normals(nbytes, dtype, 1e-4),
    }[kind]()[:nbytes]
    assert len(raw) == nbytes
    frame = coded(raw, dtype)
    assert frame == encoded(raw, dtype)
    assert back(frame, nbytes, dtype) == raw == decoded(frame, nbytes)


@given(data=st.data(), dtype=DTYPES)
def test_every_value_comes_back(data, dtype):
    """Also from and to memory in pieces, with any bits: NaN, infinities, subnormals."""
    few = st.sampled_from([0, 0x3F80, 0x3FA5, 0xBF80, 0x7FC0, 0x0001, 0xFF80])
    elements = data.draw(arrays.arrays(np.uint16, st.integers(0, TILE + 900), elements=few, fill=few))
    noise = data.draw(st.binary(max_size=200))
    raw = noise[:77] + elements.tobytes() + noise
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=4)))
    ends = list(zip([0, *cuts], [*cuts, len(raw)], strict=True))
    frame = CODERS[dtype].encode([memoryview(raw)[first:last] for first, last in ends])
    assert bytes(frame) == encoded(raw, dtype)
    out = bytearray(len(raw))
    CODERS[dtype].decode(frame, [memoryview(out)[first:last] for first, last in ends])
    assert out == raw


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.72), ("float16", 0.92), ("float32", 0.87)])
def test_normal_values_become_shorter(dtype, most):
    """The exponent of a normal value has about 2.6 bits; three bits and few escapes code it."""
    raw = normals(100_000, dtype)
    assert len(coded(raw, dtype)) < most * len(raw)


@pytest.mark.parametrize("dtype", KINDS)
def test_values_without_a_pattern_grow_by_the_heads_alone(dtype):
    raw = np.random.default_rng(3).bytes(100_000)
    assert len(coded(raw, dtype)) <= len(raw) + HEAD_BYTES + 4 * 7


def test_any_coder_decodes_frames_of_any_type():
    for dtype in KINDS:
        raw = normals(500, dtype)
        assert {back(coded(raw, dtype), len(raw), other) for other in KINDS} == {raw}


@given(data=st.data(), dtype=DTYPES)
def test_a_flipped_bit_is_found(data, dtype):
    raw = normals(data.draw(st.integers(1, 300)), dtype)
    frame = bytearray(coded(raw, dtype))
    at = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[at // 8] ^= 1 << at % 8
    with pytest.raises(CodecError, match="its check does not match"):
        back(bytes(frame), len(raw), dtype)


@given(data=st.data(), dtype=DTYPES)
def test_a_frame_that_ends_early_is_found(data, dtype):
    raw = normals(data.draw(st.integers(1, 300)), dtype)
    frame = coded(raw, dtype)
    with pytest.raises(CodecError):
        back(frame[: data.draw(st.integers(0, len(frame) - 1))], len(raw), dtype)


@given(data=st.data())
def test_wrong_bytes_behind_a_right_check_are_refused_or_decoded_as_defined(data):
    """CodedTarget repairs the check, compares with the definition, and watches the memory around the output."""
    frame = bytearray(data.draw(st.sampled_from(CodedTarget.corpus())))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(CHECK.size, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([0, 0, 1, 7, 1000]))
    try:
        target.feed(bytes(frame[: len(frame) - cut]))
    except CodecError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (HEAD_BYTES, 7, "unknown width"),
        (HEAD_BYTES + 2, 1, "ends early"),
        (HEAD_BYTES + 3, 255, "listed number of escapes"),
        (HEAD_BYTES, 6, "ends early"),
        (HEAD_BYTES, 0, "bytes follow"),
        (CHECK.size + 4, 9, "unknown kind 9"),
        (CHECK.size, 1, "holds 257 bytes, not 256"),
    ],
)
def test_the_error_says_what_is_wrong(at, value, why):
    """In a frame whose check is right."""
    raw = np.array([0x3F80] * 64 + [0x3F00] * 64, np.uint16).tobytes()  # two exponents: codes of two bits
    frame = bytearray(coded(raw, "bfloat16"))
    assert frame[HEAD_BYTES] == 2
    frame[at] = value
    CHECK.pack_into(frame, 0, xxh3_64_intdigest(frame[CHECK.size :]))
    with pytest.raises(CodecError, match=why):
        back(bytes(frame), 256, "bfloat16")


def test_rates_are_bytes_per_second():
    assert all(rate > 0 for rate in CODERS["bfloat16"].rates())
