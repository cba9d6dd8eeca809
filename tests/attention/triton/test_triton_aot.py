"""Every row of the tile table, compiled for the GPUs it is meant for, without a GPU.

Held to: it compiles, no register spills, shared memory within the row's limit, tensor cores of the right generation,
16-byte loads, and copies in flight while the main loop computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, product

import pytest
import torch

from attention.interface import RaggedBatch

pytest.importorskip("triton", reason="the triton extra is not installed: pip install -e .[triton]")

from attention.codes import DTYPES
from attention.triton import aot
from attention.triton.backend import TritonBackend
from attention.triton.tiles import HEAD_SIZES, SM80, SM86, SM90, TABLE, find_tiles
from engine.checkpoint.weights import shapes
from engine.model.decoder import Model
from engine.model.graphs import Bucket, StaticStep
from engine.model.model_config import ModelConfig
from engine.model.ops.triton import TritonOps
from engine.step.inputs import InputBuilder, Row
from lab.bench.attention.every_tile import (
    BLOCKS,
    LLAMA,
    Variant,
    attention_launches,
    backend_launches,
    meta,
    quantized,
    shortfall,
)

CAPABILITY = {SM80: 80, SM86: 86, SM90: 90}

MULTI_QUERY = Variant(64, 1, 256)  # the most rows a decode program has; a tile of keys inside one block
GEMMA = Variant(16, 8, 64, window=1024, soft_cap=50.0)
GPT_OSS = Variant(64, 8, 16, window=128, sinks=True)
UNEVEN = Variant(9, 3, 48)  # SmolLM2's heads; blocks that are no power of two


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.delenv("TRITON_INTERPRET", raising=False)
        yield


VARIANTS = (LLAMA, MULTI_QUERY, GEMMA)


def rows() -> Iterator[tuple[int, torch.dtype, int, Variant]]:
    """(head size, dtype, shared memory, variant): every row of the table, a padded head, and what stresses it."""
    for number, head_size in enumerate((64, 128, 256)):
        for turn, shared in enumerate((SM80, SM90, SM86)):
            yield head_size, torch.bfloat16, shared, VARIANTS[(number + turn) % 3]
        yield head_size, torch.float32, (SM80, SM90)[number % 2], VARIANTS[(number + 1) % 3]
    yield 80, torch.bfloat16, SM90, GEMMA
    yield 64, torch.bfloat16, SM90, UNEVEN
    yield 64, torch.bfloat16, SM90, GPT_OSS
    yield 128, torch.float16, SM90, LLAMA


def more_rows() -> Iterator[tuple[int, torch.dtype, int, Variant]]:
    """The other ones: every head size and shared memory with every variant."""
    every = [*product(HEAD_SIZES, [torch.bfloat16], (SM80, SM90, SM86), VARIANTS)]
    every += product((64, 128, 256), [torch.float32], (SM80, SM90), VARIANTS)
    every.append((64, torch.bfloat16, SM80, GPT_OSS))
    seen = set(rows())
    yield from (row for row in every if row not in seen)


def test_the_rows_below_cover_the_table() -> None:
    compiled = {(head_size, dtype.itemsize, shared) for head_size, dtype, shared, _ in rows()}
    reached = {id(find_tiles(*key)) for key in compiled}
    assert reached == {id(tiles) for tiles in TABLE.values()}


@pytest.mark.parametrize(
    ("head_size", "dtype", "shared", "variant"),
    [*rows(), *(pytest.param(*row, marks=pytest.mark.heavy) for row in more_rows())],
    ids=str,
)
def test_attention_compiles_within_its_means(head_size: int, dtype: torch.dtype, shared: int, variant: Variant) -> None:
    tiles = find_tiles(head_size, dtype.itemsize, shared)
    launches = attention_launches(head_size, dtype, tiles, variant)
    for name in ("decode_kernel", "prefill_kernel"):
        used = aot.resources(launches[name], CAPABILITY[shared])
        assert not shortfall(name, tiles, dtype, "", CAPABILITY[shared], used), (name, used)


@pytest.mark.parametrize(
    ("head_size", "shared", "variant", "kv_dtype"),
    [
        pytest.param(*row, marks=pytest.mark.heavy if number % 14 else [])
        for number, row in enumerate(product(HEAD_SIZES, (SM90, SM80, SM86), VARIANTS, ("", *DTYPES)))
    ],
    ids=str,
)
def test_short_queries_compile_within_their_means(head_size: int, shared: int, variant: Variant, kv_dtype: str) -> None:
    bf16, tiles = torch.bfloat16, find_tiles(head_size, 2, shared, quantized=bool(kv_dtype))
    (launch,) = (
        launch
        for launch in backend_launches([5, 5], head_size, bf16, tiles, variant, kv_dtype)
        if launch.kernel.fn.__name__ == "short_kernel"
    )
    used = aot.resources(launch, CAPABILITY[shared])
    assert not shortfall("short_kernel", tiles, bf16, kv_dtype, CAPABILITY[shared], used), used


@pytest.mark.parametrize(
    ("head_size", "block_size", "sinks"),
    [
        (64, 128, True),
        *((head_size, 128, False) for head_size in (128, 256)),
        pytest.param(64, 128, False, marks=pytest.mark.heavy),
        *(pytest.param(head_size, 64, False, marks=pytest.mark.heavy) for head_size in (64, 128, 256)),
    ],
)
def test_long_chunks_have_warp_groups_and_boxes(head_size: int, block_size: int, sinks: bool) -> None:
    """One warp group copies boxes, two multiply, and their products are not put in a row: on capability 9 only."""
    tiles = find_tiles(head_size, 2, SM90)
    variant = replace(BLOCKS, block_size=block_size, sinks=sinks)
    launches = attention_launches(head_size, torch.bfloat16, tiles, variant)
    used = aot.resources(launches["long_kernel"], 90)
    assert not shortfall("long_kernel", tiles, torch.bfloat16, "", 90, used), used
    assert used.threads == 384 and used.boxes >= 4 and not used.serialized and used.spill_bytes == 0


@pytest.mark.parametrize(
    ("row", "kv_dtype"),
    [
        pytest.param(row, kv_dtype, marks=[] if number % 4 in (0, 3) else [pytest.mark.heavy])
        for number, (row, kv_dtype) in enumerate(zip(TABLE, cycle(DTYPES), strict=False))
    ],
    ids=str,
)
def test_attention_over_codes_compiles_within_its_means(row: tuple[int, int, int], kv_dtype: str) -> None:
    """Every row of the table over one of the quantized types, which need about the same: a row's fp8 and the next one's
    int8. `scripts/bench.py attention --aot --every-tile` compiles all pairs."""
    head_size, itemsize, shared = row
    dtype = torch.bfloat16 if itemsize == 2 else torch.float32
    tiles = find_tiles(head_size, itemsize, shared, quantized=True)
    launches = attention_launches(head_size, dtype, tiles, LLAMA, kv_dtype)
    for name in ("decode_kernel", "prefill_kernel"):
        used = aot.resources(launches[name], CAPABILITY[shared])
        assert not shortfall(name, tiles, dtype, kv_dtype, CAPABILITY[shared], used), (name, used)


@pytest.mark.parametrize("capability", [80, 90])
def test_the_small_kernels_compile(capability: int) -> None:
    launches = attention_launches(128, torch.bfloat16, TABLE[128, 2, SM80], LLAMA)
    for name in ("cut_kernel", "merge_kernel", "span_kernel", "short_merge_kernel"):
        used = aot.resources(launches[name], capability)
        assert used.spill_bytes == 0, (name, used)


@pytest.mark.parametrize(
    ("capability", "head_size", "kv_dtype"),
    [(80, 80, ""), (80, 128, ""), (90, 80, ""), (90, 128, ""), (80, 128, "fp8"), (90, 80, "int8")],
)
def test_writing_compiles_to_wide_accesses(capability: int, head_size: int, kv_dtype: str) -> None:
    """A program's codes of a head are few bytes: only they are written by less than 16."""
    rows, bf16 = 64, torch.bfloat16
    qkv = meta(rows, 48, head_size, dtype=bf16)  # one projection, seen as q, k and v
    _, k, v = qkv.split([32, 8, 8], 1)
    kv = (
        quantized(4, 2, 8, 16, head_size, kv_dtype=kv_dtype)
        if kv_dtype
        else meta(8, 4, 2, 8, 16, head_size, dtype=bf16)
    )
    kv = kv[:, 1]
    angles = meta(rows, head_size // 2, dtype=torch.float32)
    numbers = meta(rows, dtype=torch.int64)
    batch = RaggedBatch(numbers, numbers, numbers, numbers, numbers, 0, 16, [rows], [rows])
    backend = TritonBackend()

    def launch() -> None:
        plan = backend.plan(batch)
        backend.write_kv(k, v, kv, batch, plan)
        backend.rotate_and_write_kv(qkv, 32, angles, angles, kv, batch, plan)

    for recorded in aot.record(launch):
        used = aot.resources(recorded, capability)
        assert used.spill_bytes == 0
        assert used.wide_loads > 0, (recorded.kernel.fn.__name__, used)
        assert used.wide_stores > 0 or kv_dtype, (recorded.kernel.fn.__name__, used)


def assert_small(launch: aot.Launch, capability: int, *, wide_stores: bool = True) -> None:
    """No spills, and memory is read (and written) 16 bytes at a time."""
    used = aot.resources(launch, capability)
    assert used.spill_bytes == 0, (launch.kernel.fn.__name__, used)
    assert used.wide_loads > 0, (launch.kernel.fn.__name__, used)
    assert not wide_stores or used.wide_stores > 0, (launch.kernel.fn.__name__, used)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("hidden", "dtype"), [(4096, torch.bfloat16), (576, torch.bfloat16), (8192, torch.float32)])
def test_norms_and_gates_compile_to_wide_accesses(hidden: int, dtype: torch.dtype, capability: int) -> None:
    x, delta, weight = meta(64, hidden, dtype=dtype), meta(64, hidden, dtype=dtype), meta(hidden, dtype=dtype)
    qkv, head = meta(64, 12, 128, dtype=dtype), meta(128, dtype=dtype)
    ops = TritonOps()

    def launch() -> None:
        ops.rms_norm(x, weight, 1e-5)
        ops.rms_norm(qkv[:, :8], head, 1e-5)
        ops.add_rms_norm(x, delta, weight, 1e-5)
        ops.silu_mul(meta(64, 2 * hidden, dtype=dtype))
        ops.gelu_tanh_mul(meta(64, 2 * hidden, dtype=dtype))

    recorded = aot.record(launch)
    assert len(recorded) == 5
    for one in recorded:
        assert_small(one, capability)


def test_a_step_never_waits_for_the_device() -> None:
    """On tensors without memory .item(), .tolist() and nonzero() raise: a whole step over Triton and TritonOps, as a
    CUDA graph records it, and the copying of a step into the graph's tensors ask for no number."""
    config = ModelConfig(
        num_layers=2,
        hidden_size=48,
        num_heads=6,
        num_kv_heads=2,
        head_size=32,
        intermediate_size=64,
        vocab_size=50,
        tie_word_embeddings=True,
    )
    named = {name: meta(*shape, dtype=torch.bfloat16) for name, shape in shapes(config).items()}
    model = Model(config, named, TritonBackend(), "meta", TritonOps())
    pool = meta(8, 2, 2, 2, 16, 32, dtype=torch.bfloat16)
    rows = [Row([1], 5, [1]), Row([2], 6, [2]), Row([3, 4, 5], 0, [3])]
    inputs = InputBuilder(16, torch.device("meta")).build(rows)
    static = StaticStep(Bucket(4, 2, 16), 16, 16, torch.device("meta"))

    def launch() -> None:
        static.load(inputs.token_ids, inputs.batch, inputs.batch.cu_q[1:].long() - 1)
        model.forward(static.token_ids, static.batch, pool, static.rows)

    counts = Counter(one.kernel.fn.__name__ for one in aot.record(launch))
    assert counts == {
        "cut_kernel": 3,
        "rotary_kernel": 2,
        "decode_kernel": 2,
        "merge_kernel": 2,
        "span_kernel": 1,
        "short_kernel": 2,
        "short_merge_kernel": 2,
        "norm_kernel": 5,
        "gate_kernel": 2,
    }
