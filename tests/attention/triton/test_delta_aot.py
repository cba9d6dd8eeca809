"""The kernels of the gated delta rule, compiled without a GPU: Qwen3-Next (a decay of each head) and Kimi Linear (of
each channel)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="the triton extra is not installed: pip install -e .[triton]")

from attention.delta_states import Tokens
from attention.states import Place, StateSlots
from attention.triton import aot
from attention.triton.delta.rule import TritonRule
from attention.triton.tiles import SM80, SM90
from lab.bench.attention.every_tile import meta

SHARED = {80: SM80, 90: SM90}
HEADS = {False: (16, 32, 128, 128), True: (32, 32, 128, 128)}
"""Decays of each channel -> (key heads, value heads, key size, value size)."""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.delenv("TRITON_INTERPRET", raising=False)
        yield


def launches(by_channel: bool, dtype: torch.dtype) -> list[aot.Launch]:
    """Four decodes, and a chunk of 64 tokens that may begin; states in two pieces."""
    key_heads, value_heads, key_size, value_size = HEADS[by_channel]
    size = value_heads * key_size * value_size
    place = Place(meta(8, size, dtype=torch.float32), StateSlots(((0, 64, size), (1, 0, 64))))

    def tokens(count: int) -> Tokens:
        keys, gates = (count, key_heads, key_size), (count, value_heads)
        return Tokens(
            meta(*keys, dtype=dtype),
            meta(*keys, dtype=dtype),
            meta(count, value_heads, value_size, dtype=dtype),
            meta(*((*gates, key_size) if by_channel else gates), dtype=torch.float32),
            meta(*gates, dtype=dtype),
        )

    def launch() -> None:
        rule, blocks = TritonRule(), meta(4, 2, dtype=torch.int64)
        fresh = meta(4, dtype=torch.bool)
        rule.step(tokens(4), place, blocks, fresh, blocks, meta(4, value_heads, value_size, dtype=dtype))
        out = meta(64, value_heads, value_size, dtype=dtype)
        rule.chunk(tokens(64), place, blocks[:1], fresh[:1], blocks[:1], out)

    return aot.record(launch)


@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.heavy)], ids=str)
@pytest.mark.parametrize("by_channel", [False, True], ids=["head", "channel"])
def test_delta_kernels_compile_within_their_means(by_channel: bool, dtype: torch.dtype, capability: int) -> None:
    """No spills, but a few with tokens in float32; shared memory within the GPU's limit; products of chunks on tensor
    cores."""
    found = {one.kernel.fn.__name__: one for one in launches(by_channel, dtype)}
    assert set(found) == {"delta_step_kernel", "delta_chunk_kernel"}
    for name, launch in found.items():
        used = aot.resources(launch, capability)
        spills = 0 if dtype == torch.bfloat16 else 512
        assert used.spill_bytes <= spills and used.shared_bytes <= SHARED[capability], (name, used)
        assert (used.mma + used.wgmma > 0) == (name == "delta_chunk_kernel"), (name, used)
