"""Products with quantized weights, compiled for sm_80 and sm_90 without a GPU: every type, few rows and many."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="the triton extra is not installed: pip install -e .[triton]")

from attention.triton import aot
from engine.model.ops.quantized import BLOCKS
from engine.model.ops.triton import TritonOps
from lab.bench.attention.every_tile import SHARED_BYTES, meta
from lab.bench.attention.quantized_products import KINDS, ROWS, product_launches, weight_of
from tests.heavy import one_in


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.delenv("TRITON_INTERPRET", raising=False)
        yield


@pytest.mark.parametrize(("kind", "rows", "capability"), one_in(2, KINDS, ROWS, [80, 90]))
def test_products_compile_within_their_means(kind: str, rows: int, capability: int) -> None:
    """No spills, shared memory within the limit, tensor cores, 16-byte loads. On sm_80 rows of fp8 stay as they are."""
    launches = product_launches(kind, rows, torch.bfloat16, capability)
    names = [launch.kernel.fn.__name__ for launch in launches]
    rounds = kind == "int8" or (kind == "fp8" and capability == 90)
    assert names == ["round_kernel"] * rounds + [
        "byte_product_kernel" if kind not in BLOCKS else "group_product_kernel"
    ]
    for name, launch in zip(names, launches, strict=True):
        used = aot.resources(launch, capability)
        assert used.spill_bytes == 0 and used.shared_bytes <= SHARED_BYTES[capability], (name, used)
        if name != "round_kernel":
            assert used.mma + used.wgmma > 0 and used.wide_loads > 0, (name, used)


@pytest.mark.parametrize(
    ("kind", "dtype"), one_in(2, ["q4_1", "q6_k", "mxfp4", "fp8"], [torch.float32, torch.float16]), ids=str
)
def test_products_in_other_types_compile(kind: str, dtype: torch.dtype) -> None:
    for rows in ROWS:
        for launch in product_launches(kind, rows, dtype, 80):
            assert aot.resources(launch, 80).spill_bytes == 0


@pytest.mark.parametrize("kind", BLOCKS)
def test_rows_of_an_embedding_compile(kind: str) -> None:
    vocabulary = TritonOps(fp8_rows=False).vocabulary(weight_of(kind, torch.bfloat16))
    (launch,) = aot.record(lambda: vocabulary.embed(meta(64, dtype=torch.int64)))
    assert aot.resources(launch, 90).spill_bytes == 0
