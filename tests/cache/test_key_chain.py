"""The C code makes the keys that hashlib makes, and machines without a compiler make them too."""

from __future__ import annotations

import ctypes
from array import array
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import keys as key_chain
from cache.block import KEY_BYTES
from cache.keys import extend_keys, keys_in_parts

ROOT = bytes(range(16))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(key_chain, "_library", None)
        key_chain.prepare()
        yield key_chain


def has_avx512_code(compiled) -> bool:
    """Whether the compiler made it: GCC 12 for x86-64."""
    try:
        ctypes.c_int.in_dll(compiled._library[0], "key_chain_wide")
    except ValueError:
        return False
    return True


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.just(16), st.integers(1, 130)), st.lists(st.integers(0, 2**32 - 1), max_size=600), st.booleans())
def test_all_ways_make_the_same_keys(compiled, block_size, tokens, wide):
    """Blocks below, at and above one and several chunks of the hash, whatever is left over; with and without
    AVX-512."""
    if has_avx512_code(compiled):
        ctypes.c_int.in_dll(compiled._library[0], "key_chain_wide").value = wide
    packed = array("I", tokens)
    expected, parent = [], ROOT
    for i in range(len(tokens) // block_size):
        content = array("I", tokens[i * block_size : (i + 1) * block_size]).tobytes()
        parent = blake2b(parent + content, digest_size=KEY_BYTES).digest()
        expected.append(parent)
    assert list(compiled.chain(ROOT, packed, block_size)) == expected
    library, compiled._library = compiled._library, None
    try:
        assert list(compiled.chain(ROOT, packed, block_size)) == expected
    finally:
        compiled._library = library


@pytest.mark.parametrize("size", [key_chain.LONG_PROMPT, key_chain.LONG_PROMPT + 1])
def test_long_prompts_have_the_same_keys(compiled, size):
    tokens = array("I", range(size))
    assert list(compiled.chain(ROOT, tokens, 16)) == key_chain._by_hashlib(ROOT, tokens.tobytes(), 64, size // 16)


@given(st.integers(1, 20), st.integers(0, 100), st.integers(0, 100))
def test_keys_grow_with_the_tokens(block_size, first, more):
    tokens = list(range(first + more))
    grown = extend_keys(ROOT, extend_keys(ROOT, [], tokens[:first], block_size), tokens, block_size)
    assert grown == extend_keys(ROOT, [], tokens, block_size)


@given(st.integers(1, 20), st.integers(0, 200), st.integers(1, 9))
def test_keys_in_parts_are_the_same_keys(block_size, count, most):
    tokens = list(range(count))
    parts = list(keys_in_parts(ROOT, tokens, block_size, most))
    assert [key for part in parts for key in part] == extend_keys(ROOT, [], tokens, block_size)
    assert all(1 <= len(part) <= most for part in parts)


def test_without_a_compiler_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(key_chain.NotCompiled, match="apt install gcc"):
        key_chain.prepare()
