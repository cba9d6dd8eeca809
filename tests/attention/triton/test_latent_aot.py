"""The latent kernels, compiled for the GPUs of their tiles without a GPU: DeepSeek-V3 and Kimi-K2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from attention.interface import RaggedBatch

pytest.importorskip("triton", reason="the triton extra is not installed: pip install -e .[triton]")

from attention.triton import aot
from attention.triton.backend import TritonBackend
from attention.triton.latent_tiles import TABLE, find_latent_tiles
from attention.triton.tiles import SM80, SM86, SM90, Tiles, find_tiles
from engine.model.latent_prompts import BLOCK_SIZE
from lab.bench.attention.every_tile import meta, quantized
from tests.attention.triton.test_triton_aot import BLOCKS, attention_launches, shortfall

CAPABILITY = {SM80: 80, SM86: 86, SM90: 90}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.delenv("TRITON_INTERPRET", raising=False)
        yield


def launches(heads: int, dtype: torch.dtype, tiles: Tiles, kv_dtype: str = "") -> dict[str, aot.Launch]:
    """Two decodes and two chunks of 16 over rows of 512 + 64, written first."""
    i32, rows, shape = torch.int32, 2 + 2 * 16, (4, 1, 1, 16, 576)
    batch = RaggedBatch(
        cu_q=meta(5, dtype=i32),
        ctx_lens=meta(4, dtype=i32),
        block_tables=meta(4, 32, dtype=i32),
        slot_mapping=meta(rows, dtype=torch.int64),
        positions=meta(rows, dtype=torch.int64),
        num_decodes=2,
        block_size=16,
        q_lens=[1, 1, 16, 16],
        kv_lens=[500, 500, 500, 500],
    )
    kv = quantized(*shape, kv_dtype=kv_dtype)[:, 1] if kv_dtype else meta(8, *shape, dtype=dtype)[:, 1]
    backend = TritonBackend(tiles=tiles)

    def launch() -> None:
        plan = backend.plan(batch)
        backend.write_latent(meta(rows, 576, dtype=dtype), kv, batch, plan)
        backend.attend_latent(meta(rows, heads, 576, dtype=dtype), kv, batch, plan, 0.1, 512)

    return {one.kernel.fn.__name__: one for one in aot.record(launch)}


CASES = [(128, key, "") for key in TABLE] + [(64, (2, SM80), "fp8"), (128, (2, SM90), "int8")]
MORE = [(64, (2, SM90), ""), (128, (2, SM80), "int8"), (128, (2, SM90), "fp8"), (64, (2, SM86), "int8")]


@pytest.mark.parametrize(
    ("heads", "row", "kv_dtype"), [*CASES, *(pytest.param(*one, marks=pytest.mark.heavy) for one in MORE)], ids=str
)
def test_latent_kernels_compile_within_their_means(heads: int, row: tuple[int, int], kv_dtype: str) -> None:
    """No spills, shared memory within the GPU's limit, tensor cores, 16-byte loads."""
    itemsize, shared = row
    dtype = torch.bfloat16 if itemsize == 2 else torch.float32
    found = launches(heads, dtype, find_latent_tiles(itemsize, shared, bool(kv_dtype)), kv_dtype)
    assert set(found) == {
        *("latent_write_kernel", "cut_kernel", "latent_decode_kernel", "merge_kernel", "latent_prefill_kernel")
    }
    for name in ("latent_decode_kernel", "latent_prefill_kernel", "latent_write_kernel"):
        used = aot.resources(found[name], CAPABILITY[shared])
        assert used.spill_bytes == 0 and used.shared_bytes <= shared, (name, used)
        if name != "latent_write_kernel":
            assert used.wide_loads > 0, (name, used)
            assert itemsize > 2 or used.mma + used.wgmma > 0, (name, used)


@pytest.mark.parametrize("shared", [SM80, SM90])
def test_keys_and_values_of_heads_compile_within_their_means(shared: int) -> None:
    """Of engine/model/latent_prompts.py: DeepSeek-V3's heads have 128 + 64 elements there."""
    tiles = find_tiles(192, 2, shared)
    found = attention_launches(192, torch.bfloat16, tiles, replace(BLOCKS, block_size=BLOCK_SIZE))
    used = aot.resources(found["prefill_kernel"], CAPABILITY[shared])
    assert not shortfall("prefill_kernel", tiles, torch.bfloat16, "", CAPABILITY[shared], used), used
