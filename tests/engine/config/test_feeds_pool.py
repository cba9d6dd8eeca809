"""Which nodes of a cluster of unlike nodes put their blocks into the pool."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config.config import Config
from engine.config.forms import feeds_pool


@pytest.mark.parametrize(
    ("own", "cluster", "pool", "feeds"),
    [
        ("bfloat16", "bfloat16", "bfloat16", True),
        ("float32", "bfloat16", "bfloat16", True),
        ("int8", "bfloat16", "bfloat16", False),
        ("bfloat16", "float32", "float32", False),
        ("int8", "bfloat16", "fp8", True),
        ("int8", "bfloat16", "int4", True),
        ("bfloat16", "float32", "int4", True),
        ("bfloat16", "int8", "int8", True),
    ],
)
def test_no_block_of_the_pool_is_less_precise_than_its_type_says(own, cluster, pool, feeds):
    config = replace(Config(), kv_cache_dtype=own, cluster_kv_dtype=cluster, pool_dtype=pool)
    assert feeds_pool(config) == feeds
