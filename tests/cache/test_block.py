"""Block geometry and keys: content decides identity."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.block import KEY_BYTES, BlockGeometry
from cache.keys import extend_keys, root_key, salted_root
from cache.layer_groups import layer_groups

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)
GEOMETRY = BlockGeometry(num_layers=30, num_kv_heads=3, head_size=64, block_size=16, dtype="float32")
GROUPS = layer_groups([0, 128] * 15)


def test_geometry_of_the_embedded_model():
    assert GEOMETRY.shape == (30, 2, 3, 16, 64)
    assert GEOMETRY.layer_bytes == 2 * 3 * 16 * 64 * 4
    assert GEOMETRY.block_bytes == 30 * GEOMETRY.layer_bytes
    assert GEOMETRY.pool_bytes == GEOMETRY.wire_bytes == GEOMETRY.block_bytes


def test_what_is_encoded_moves_fewer_bytes():
    """One byte per element, and a float32 scale for K and V of each head and layer."""
    encoded = 30 * 2 * 3 * (16 * 64 + 4)
    wire, pool = replace(GEOMETRY, wire_dtype="int8"), replace(GEOMETRY, pool_dtype="fp8")
    assert (wire.wire_bytes, wire.pool_bytes) == (encoded, GEOMETRY.block_bytes)
    assert (pool.wire_bytes, pool.pool_bytes) == (GEOMETRY.block_bytes, encoded)
    quarter = replace(GEOMETRY, pool_dtype="int4")
    assert quarter.wire_bytes == GEOMETRY.block_bytes and quarter.pool_bytes < encoded
    quantized = replace(GEOMETRY, dtype="int8", wire_dtype="int8", pool_dtype="int8")
    assert quantized.wire_bytes == quantized.pool_bytes == quantized.block_bytes, "blocks move as they are"


def test_a_latent_is_one_row_for_all_heads():
    """DeepSeek-V3: 61 layers of 512 + 64 elements for each token, instead of K and V of 128 heads."""
    latent = BlockGeometry(61, 1, 576, 16, "bfloat16", pool_dtype="int8", kind="latent")
    assert latent.shape == (61, 1, 1, 16, 576)
    assert latent.block_bytes == 16 * 70_272
    assert latent.layer_bytes * 61 == latent.block_bytes == latent.wire_bytes
    assert latent.pool_bytes == 61 * (16 * 576 + 4)
    assert replace(latent, dtype="int8").row_bytes == 580


def test_geometry_of_an_unknown_type():
    with pytest.raises(KeyError):
        _ = BlockGeometry(1, 1, 1, 1, "int3").block_bytes


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 31},
        {"num_kv_heads": 1},
        {"head_size": 32},
        {"block_size": 32},
        {"dtype": "float16"},
        {"pool_dtype": "fp8"},
        {"pool_dtype": "int8"},
        {"pool_dtype": "int4"},
        {"wire_dtype": "fp8"},
        {"wire_dtype": "int8"},
        {"pool_dtype": "int4-auto"},
        {"kind": "latent"},
        {"groups": GROUPS},
    ],
)
def test_every_part_of_the_geometry_changes_the_root(change):
    fields = {name: getattr(GEOMETRY, name) for name in GEOMETRY.__dataclass_fields__}
    assert root_key("m", BlockGeometry(**fields | change)) != root_key("m", GEOMETRY)
    assert root_key("n", GEOMETRY) != root_key("m", GEOMETRY)
    with_groups = [replace(GEOMETRY, groups=replace(GROUPS, pools_ends=ends)) for ends in (False, True)]
    assert len({root_key("m", one) for one in with_groups}) == 2


def test_salts_separate_tenants():
    root = root_key("m", GEOMETRY)
    assert salted_root(root, "") == root
    assert len({root, salted_root(root, "a"), salted_root(root, "b")}) == 3


def test_keys_are_the_same_in_every_process():
    """Nodes agree on keys without talking: these values may only change together with LAYOUT."""
    root = root_key("model", GEOMETRY)
    assert root.hex() == "cef80022181766120a434b9c0c035081"
    assert extend_keys(root, [], range(16), 16)[0].hex() == "9a132f377169756fc371b3c3e73d7af9"


@given(TOKENS, st.integers(1, 9))
def test_only_full_blocks_have_keys(tokens, block_size):
    keys = extend_keys(b"r" * KEY_BYTES, [], tokens, block_size)
    assert len(keys) == len(tokens) // block_size
    assert all(len(key) == KEY_BYTES for key in keys)


@given(TOKENS, st.integers(1, 9), st.data())
def test_extending_in_pieces_equals_extending_at_once(tokens, block_size, data):
    root, keys = b"r" * KEY_BYTES, []
    for end in sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4))):
        extend_keys(root, keys, tokens[:end], block_size)
    assert extend_keys(root, keys, tokens, block_size) == extend_keys(root, [], tokens, block_size)


@given(TOKENS, TOKENS, st.integers(1, 9))
def test_equal_keys_mean_equal_prefixes(left, right, block_size):
    root = b"r" * KEY_BYTES
    lefts, rights = (extend_keys(root, [], tokens, block_size) for tokens in (left, right))
    for i, (a, b) in enumerate(zip(lefts, rights, strict=False)):
        end = (i + 1) * block_size
        assert (a == b) == (left[:end] == right[:end])
