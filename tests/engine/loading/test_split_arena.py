"""An arena in parts is the arena: the same bytes go out, the same come in, whatever the ranks' share of the heads."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from attention.codes import is_quantized, pool_in, scales_of
from cache.block import BlockGeometry
from engine.loading import rank_arenas
from engine.loading.split_arena import SplitArena
from engine.model.model_config import ModelConfig
from engine.model.parallel import Shard

BLOCKS, LAYERS, HEAD_SIZE, BLOCK_SIZE = 6, 3, 16, 8
SHARES = [(4, 2), (4, 4), (2, 4), (1, 2), (6, 3)]
"""(KV heads, ranks); with fewer heads than ranks neighbours hold the same. One head is a latent row, on every rank."""


def shards_of(num_kv_heads: int, ranks: int) -> list[Shard]:
    model = ModelConfig(
        num_layers=LAYERS,
        hidden_size=64,
        num_heads=num_kv_heads * ranks,
        num_kv_heads=num_kv_heads,
        head_size=HEAD_SIZE,
        intermediate_size=12 * ranks,
        vocab_size=32,
        tie_word_embeddings=True,
    )
    assert model.indivisible(ranks) is None
    return [Shard(model, rank, ranks) for rank in range(ranks)]


def geometry_of(num_kv_heads: int, dtype: str) -> BlockGeometry:
    kind = "latent" if num_kv_heads == 1 else "full"
    return BlockGeometry(LAYERS, num_kv_heads, HEAD_SIZE, BLOCK_SIZE, dtype, kind=kind)


def random_bytes(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def cut(whole: torch.Tensor, geometry: BlockGeometry, shards: list[Shard]) -> list[torch.Tensor]:
    """Every rank's part of the arena `whole`."""
    heads = whole.view(-1, geometry.num_kv_heads, geometry.block_size * geometry.row_bytes)
    return [heads[:, shard.kv_heads].flatten() for shard in shards]


def split(parts: list[torch.Tensor], geometry: BlockGeometry, shards: list[Shard]) -> SplitArena:
    head_bytes = geometry.block_size * geometry.row_bytes
    return SplitArena(parts, [shard.kv_heads for shard in shards], geometry.num_kv_heads, head_bytes)


def moves_of(geometry: BlockGeometry, seed: int) -> list[tuple[int, int, int]]:
    """Whole blocks, layers of blocks, or any bytes, to places in host memory that are now side by side, now apart."""
    rng = random.Random(seed)
    print("seed", seed)
    nbytes = BLOCKS * geometry.block_bytes
    if seed % 3 < 2:
        size = (geometry.block_bytes, geometry.layer_bytes)[seed % 3]
        wanted = rng.sample(range(nbytes // size), rng.randint(1, nbytes // size))
        pieces = [(number * size, size) for number in wanted]
    else:
        cuts = sorted(rng.sample(range(nbytes), 14))
        pieces = [(start, end - start) for start, end in pairwise(cuts)]
        rng.shuffle(pieces)
    there, moves = 5, []
    for here, length in pieces:
        moves.append((here, there, length))
        there += length + rng.choice([0, 0, 0, 7])
    return moves


@pytest.mark.parametrize("share", SHARES, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_bytes_go_out_and_come_in_as_in_one_arena(share: tuple[int, int], seed: int) -> None:
    geometry, shards = geometry_of(share[0], ("float32", "int8")[seed % 2]), shards_of(*share)
    whole = random_bytes(BLOCKS * geometry.block_bytes, seed)
    arena = split(cut(whole, geometry, shards), geometry, shards)
    assert arena.nbytes == len(whole)
    moves = moves_of(geometry, seed)
    host = torch.zeros(2 * len(whole), dtype=torch.uint8)
    expected = host.clone()
    arena.copy_out(host, moves)
    for here, there, length in moves:
        expected[there : there + length] = whole[here : here + length]
    assert torch.equal(host, expected)

    news = random_bytes(len(host), seed + 100)
    arena.copy_in(news, moves)
    for here, there, length in moves:
        whole[here : here + length] = news[there : there + length]
    for part, wanted in zip(arena.parts, cut(whole, geometry, shards), strict=True):
        assert torch.equal(part, wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("share", [(4, 2), (2, 4)], ids=str)
def test_a_rank_reads_its_heads_of_the_whole_pool(share: tuple[int, int], dtype: str) -> None:
    """Of what another node computed, element by element, and scale by scale where KV is quantized."""
    geometry, shards = geometry_of(share[0], dtype), shards_of(*share)
    memory = random_bytes(BLOCKS * geometry.block_bytes, 7)
    pool = pool_in(memory, geometry.shape, dtype)
    for shard, part in zip(shards, cut(memory, geometry, shards), strict=True):
        assert len(part) == BLOCKS * rank_arenas.part_of(geometry, shard).block_bytes
        mine, theirs = rank_arenas.pool_of(part, geometry, shard), pool[:, :, :, shard.kv_heads]
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
        if is_quantized(mine):
            assert torch.equal(scales_of(mine).view(torch.int32), scales_of(theirs).view(torch.int32))


def test_parts_of_different_arenas_are_refused() -> None:
    geometry, shards = geometry_of(4, "float32"), shards_of(4, 2)
    parts = cut(random_bytes(BLOCKS * geometry.block_bytes, 0), geometry, shards)
    with pytest.raises(ValueError, match="same number of planes"):
        split([parts[0], parts[1][: -replace(geometry, num_kv_heads=2).block_bytes]], geometry, shards)
