"""The kernels of aarch64 (level neon): compiled by the cross compiler, run in qemu-user, held to the same yardstick."""

from __future__ import annotations

import pytest
import torch

from lab.bench.attention.grid import DTYPES, Point, find_fault
from lab.bench.attention.quantized import find_quantized_fault
from tests.attention.emulated import MISSING, Emulated, build

pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"not on PATH: {', '.join(MISSING)} (Debian: apt install g++-aarch64-linux-gnu qemu-user)"
)


@pytest.fixture(scope="module")
def neon(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated(build(tmp_path_factory.mktemp("neon")))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_further_from_the_truth_than_twice_plain_torch(neon: Emulated, dtype: torch.dtype) -> None:
    """Decodes, whole prompts and chunks behind a prefix, groups of 3 and 8 heads, a window and a soft cap. Few points:
    qemu is slow, and what the levels have in common is tested on those of this CPU."""
    for point in (
        Point("everything", 9, 3, 64, 16, dtype),
        Point("everything", 3, 3, 32, 16, dtype, 40, 5.0),
        Point("prefix and chunk", 8, 1, 80, 24, dtype),
    ):
        assert find_fault(neon, point) is None, point


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_quantized_pools(neon: Emulated, kv_dtype: str) -> None:
    for point in (
        Point("everything", 8, 1, 64, 16, torch.bfloat16),
        Point("ragged decodes", 6, 2, 80, 24, torch.float32, 40, 5.0),
    ):
        assert find_quantized_fault(neon, point, kv_dtype) is None, point
