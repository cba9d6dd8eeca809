"""Quantized pools: numbers, layout, and every backend of the CPU that reads them."""

import pytest
import torch

from attention.choice.choose import choose, made
from attention.codes import DTYPES, LARGEST, codes_of, encode_rows, from_codes, planes, pool_in, rows_of, scales_of
from attention.torch_backend import TorchBackend
from lab.bench.attention.grid import BLOCK_SIZES, GEOMETRIES, MASKS, MIXES, Point
from lab.bench.attention.quantized import find_quantized_fault

KV_DTYPES = sorted(DTYPES)
READERS = ["cpu", "reference", "torch"]

torch.set_num_threads(1)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_comes_back_within_the_bound_of_its_own_scale(source, kv_dtype):
    dtype = DTYPES[kv_dtype]
    rows = torch.randn(40, 3, 64, generator=torch.Generator().manual_seed(2)) * torch.logspace(-4, 4, 40)[:, None, None]
    rows[7] = 0
    rows = rows.to(source)
    codes, scales = encode_rows(rows, dtype)
    back = from_codes(codes, dtype) * scales
    x, scale = rows.float(), rows.float().abs().amax(-1, keepdim=True) / LARGEST[dtype]
    bound = scale / 2 if dtype == torch.int8 else torch.maximum(x.abs() / 16, scale / 1024)
    assert scales.shape == (40, 3, 1) and ((back - x).abs() <= 1.001 * bound).all()
    assert not back[7].any()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_extremes(kv_dtype):
    """The smallest numbers become zeros, the largest stay finite, and what is not a number stays that."""
    dtype = DTYPES[kv_dtype]
    rows = torch.tensor([[1e-44, 0.0, -1e-41, 0.0], [3e38, -3e38, 1.0, 0.0], [torch.nan, 1.0, 2.0, 3.0]])
    codes, scales = encode_rows(rows, dtype)
    back = from_codes(codes, dtype) * scales
    assert back[0].abs().max() < 1e-37 and torch.isfinite(back[:2]).all()
    torch.testing.assert_close(back[1, :2], rows[1, :2], rtol=1e-5, atol=0)
    assert back[2].isnan().all()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_blocks_fill_token_by_token(kv_dtype):
    """What is written for one token leaves every byte of all others as it is, however much larger it is."""
    backend, shape = TorchBackend(), (2, 2, 3, 16, 8)
    memory = torch.full((4 * 2 * 2 * 3 * 16 * 12,), 0xA5, dtype=torch.uint8)
    pool = pool_in(memory, shape, kv_dtype)
    assert pool.shape == (4, *shape) and len({pool.data_ptr(), memory.data_ptr()}) == 1
    rows = torch.randn(16, 3, 8, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 16)[:, None, None]
    own = memory.view(4, 2, 2, 3, -1)
    for token, row in enumerate(rows):
        before = memory.clone()
        for plane, written in planes(pool[:, 1], row):
            plane[2, :, :, token] = written
        changed = (memory != before).view(own.shape)
        here = torch.zeros_like(changed)
        here[2, 1, :, :, token * 8 : token * 8 + 8] = True
        here[2, 1, :, :, 128 + token * 4 : 128 + token * 4 + 4] = True
        assert changed.any() and not changed[~here].any()
    back = rows_of(pool, lambda part: part[2, 1, 0].transpose(0, 1), torch.float32)
    assert ((back - rows).abs() <= rows.abs().amax(-1, keepdim=True) / 15).all()
    assert backend.reads_codes


def test_views_find_their_scales():
    """Of a layer, of some heads, of one block: as tensor parallelism and layers slice the pool."""
    pool = pool_in(torch.zeros(5 * 2 * 2 * 4 * (16 * 8 + 64), dtype=torch.uint8), (2, 2, 4, 16, 8), "int8")
    scales_of(pool).copy_(torch.arange(5 * 2 * 2 * 4 * 16.0).view(5, 2, 2, 4, 16, 1))
    whole = scales_of(pool).clone()
    assert torch.equal(scales_of(pool[:, 1]), whole[:, 1])
    assert torch.equal(scales_of(pool[:, :, :, 2:]), whole[:, :, :, 2:])
    assert torch.equal(scales_of(pool[3:4, 0, 1]), whole[3:4, 0, 1])
    assert not codes_of(pool).any()
    for wrong in (torch.zeros(2, 2, 16, 8, dtype=torch.int8), pool.transpose(-1, -2)):
        with pytest.raises(ValueError, match="pool_in"):
            scales_of(wrong)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", READERS)
def test_the_grid_over_quantized_pools(name, kv_dtype):
    """Against float64 of the values that codes and scales stand for, slots without a token poisoned."""
    backend = made(name)
    for number, (heads, kv_heads, size) in enumerate(GEOMETRIES):
        dtype = (torch.bfloat16, torch.float32, torch.float16)[number // 4]
        point = Point(list(MIXES)[number % len(MIXES)], heads, kv_heads, size, BLOCK_SIZES[number % 3], dtype)
        assert find_quantized_fault(backend, point, kv_dtype) is None, point
    for window, soft_cap in MASKS:
        point = Point("everything", 9, 3, 64, 16, torch.bfloat16 if window else torch.float32, window, soft_cap)
        assert find_quantized_fault(backend, point, kv_dtype) is None, point


def test_a_backend_that_reads_no_codes_is_refused_and_auto_goes_on(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from attention.torch_backend import TorchBackend\nclass Mine(TorchBackend):\n    reads_codes = False\n"
    )
    with pytest.raises(ValueError, match=r"'torch' cannot read quantized KV.*--kv-cache-dtype int8"):
        choose(f"{mine}:Mine", "cpu", kv_dtype="int8")
    assert choose(f"{mine}:Mine", "cpu", kv_dtype="bfloat16").name == "torch"
    assert getattr(choose("auto", "cpu", kv_dtype="fp8"), "reads_codes", False)


@pytest.mark.parametrize(("says", "reads"), [("", False), ("    reads_codes = True\n", True)], ids=["inherits", "says"])
def test_kernels_of_ones_own_read_codes_only_if_they_say_so_themselves(tmp_path, says, reads):
    mine = tmp_path / "mine.py"
    attend = "    def attend(self, *a, **k):\n        return super().attend(*a, **k)\n"
    mine.write_text(f"from attention.torch_backend import TorchBackend\nclass Mine(TorchBackend):\n{says}{attend}")
    if reads:
        assert choose(f"{mine}:Mine", "cpu", kv_dtype="int8").name == "torch"
        return
    with pytest.raises(ValueError, match="cannot read quantized KV"):
        choose(f"{mine}:Mine", "cpu", kv_dtype="int8")
