"""Names of any length, and the heads that keep them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.named.names import HEAD, WHOLE, Head, NotAHead, Space


@given(st.text(max_size=400), st.integers(1, 1 << 40), st.binary(min_size=16, max_size=16))
def test_a_head_comes_back_with_its_length(name, nbytes, identity):
    head = Head(name, nbytes, identity)
    packed = head.pack()
    assert Head.unpack(packed + b"value") == (head, len(packed))
    for end in (0, HEAD.size - 1, len(packed) - 1):
        with pytest.raises(NotAHead):
            Head.unpack(packed[:end])


def test_other_blocks_are_no_heads():
    with pytest.raises(NotAHead):
        Head.unpack(bytes(100))


@given(st.text(), st.text(), st.text(), st.text())
def test_keys_are_those_of_one_tenant_and_name(tenant, other_tenant, name, other):
    space = Space.of(tenant)
    key = space.key(name)
    assert len(key) == 16 and key.startswith(space.names)
    assert (space.key(other) == key) == (other == name)
    assert (Space.of(other_tenant).key(name) == key) == (other_tenant == tenant)


def test_parts_have_keys_of_their_own():
    space = Space.of("default")
    large = Head("name", 1000, b"i" * 16)
    keys = space.part_keys(large, 300)
    assert len(set(keys)) == 4
    assert all(key.startswith(space.parts) for key in keys) and space.parts != space.names
    assert not set(keys) & set(space.part_keys(Head("name", 1000, b"j" * 16), 300))
    assert space.part_keys(Head("name", 1000, WHOLE), 300) == []
