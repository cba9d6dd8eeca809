"""The C++ kernels beyond the grid of test_backends.py: every level of this CPU, long contexts, window, soft cap,
threads, pools of more than 4 GiB, the fused rotary write, and what `choose` does where they cannot be had."""

from __future__ import annotations

import logging
import mmap
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from attention.choice import measured as cpu_choice
from attention.choice.choose import choose
from attention.choice.measured import Heads, batch_of, fastest_of, seconds_of
from attention.codes import DTYPES as CODES
from attention.codes import rows_of
from attention.cpu import build as cpu_build
from attention.cpu import level as cpu_level
from attention.cpu.backend import CpuBackend
from attention.cpu.level import LEVELS, levels_here, lower
from attention.cpu.library import is_compiled, library
from attention.reference import ReferenceBackend
from attention.rotary import rotate
from lab.bench.attention.grid import Point, without_unseen
from lab.bench.attention.quantized import find_quantized_fault, quantized
from net.compiled import NotCompiled
from tests.attention.test_backends import MIXES, SLACK, Case, ragged_batch
from tests.heavy import one_in

MAP_NORESERVE = 0x4000  # Linux; in the mmap module from Python 3.13
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONG = [(1, 560), (1, 255), (1, 0), (1, 16), (100, 200), (40, 0), (3, 140)]
"""Several tiles of columns and several passes over keys; runs of decode that two threads split."""

HERE = levels_here()
pytestmark = pytest.mark.skipif(not HERE, reason="the cpu backend needs x86 with AVX2, or aarch64")


@pytest.fixture
def threads():
    """Sets torch's number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def attend(backend, case: Case, dtype: torch.dtype, **options: float) -> Tensor:
    """The case's rows after a write, with inputs and pool in `dtype`."""
    kv, plan = case.kv.to(dtype), backend.plan(case.batch)
    backend.write_kv(case.k.to(dtype), case.v.to(dtype), kv, case.batch, plan)
    return backend.attend(case.q.to(dtype), kv, case.batch, plan, case.scale, **options)


def assert_as_good_as_torch(case: Case, dtype: torch.dtype, levels: list[str] = HERE, **options: float) -> None:
    """Every level, on one thread and on two."""
    truth = attend(ReferenceBackend(), case, torch.float64, **options)
    plain = (attend(ReferenceBackend(), case, dtype, **options).double() - truth).abs().max()
    for level, threads in product(levels, (1, 2)):
        torch.set_num_threads(threads)
        ours = attend(CpuBackend(level), case, dtype, **options)
        torch.set_num_threads(1)
        assert ours.dtype == dtype and ours.is_contiguous()
        error = (ours.double() - truth).abs().max()
        assert error <= 2 * plain + SLACK, f"{level}, {threads} threads: {error:.2e}, plain torch {plain:.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 64, 80, 96, 128, 256])
def test_every_head_size(dtype, size):
    assert_as_good_as_torch(Case(LONG, 6, 2, size, 16, dtype), dtype)


@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 48, 128, 256])
def test_every_block_size(block_size):
    """Also those that no 16 keys fit into: the kernels then copy what the tiles read directly otherwise."""
    for dtype in (torch.float32, torch.bfloat16):
        assert_as_good_as_torch(Case(LONG, 3, 1, 32, block_size, dtype), dtype)


@pytest.mark.parametrize("level", HERE)
@pytest.mark.parametrize("block_size", [8, 24])
def test_blocks_behind_the_window_are_not_read_whatever_their_size(level, block_size):
    """They are other requests' by now, and hold NaN; prompts take keys from a multiple of 16 on."""
    for dtype in (torch.float32, torch.bfloat16):
        case = Case([(1, 200), (33, 200), (5, 70), (70, 300)], 3, 1, 32, block_size, dtype)
        truth = attend(ReferenceBackend(), case, torch.float64, window=40)
        case.batch = without_unseen(case.batch, 40)
        assert not case.batch.block_tables[:, 0].any()
        assert (attend(CpuBackend(level), case, dtype, window=40).double() - truth).abs().max() < 0.05


@pytest.mark.parametrize(("heads", "kv_heads"), [(5, 1), (7, 1), (12, 1), (40, 2), (2, 2)])
def test_every_group(heads, kv_heads):
    """Groups that the decode kernel takes apart into fours and a rest, and one wider than a tile of columns."""
    for dtype in (torch.float32, torch.bfloat16):
        assert_as_good_as_torch(Case(MIXES["everything"], heads, kv_heads, 32, 16, dtype), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_window_and_soft_cap(dtype):
    case = Case(LONG, 3, 1, 64, 16, dtype)
    for window, soft_cap in product((0, 1, 17, 128, 300, 5000), (0.0, 3.0)):
        assert_as_good_as_torch(case, dtype, window=window, soft_cap=soft_cap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_that_grow_and_fall_by_hundreds(dtype):
    """The running maximum is raised late, many times, and by more than float32's exponents hold."""
    case = Case(LONG, 3, 1, 64, 16, dtype)
    case.q *= 8
    case.kv[:, 0] *= torch.linspace(-30, 30, 16)[:, None].to(dtype)
    assert_as_good_as_torch(case, dtype)


@pytest.mark.parametrize("level", HERE)
def test_quantized_pools_on_every_level(level, threads):
    """Tiles that begin and end inside a block, several passes, heads that no tile takes, and two threads."""
    backend = CpuBackend(level)
    for point, kv_dtype in (
        (Point("everything", 8, 1, 64, 16, torch.bfloat16), "int8"),
        (Point("everything", 6, 2, 80, 24, torch.bfloat16), "fp8"),
        (Point("ragged decodes", 5, 1, 128, 64, torch.bfloat16, 40, 5.0), "int8"),
        (Point("prefix and chunk", 4, 4, 16, 16, torch.float16), "fp8"),
    ):
        threads(1 if kv_dtype == "int8" else 2)
        assert find_quantized_fault(backend, point, kv_dtype) is None, point


@pytest.mark.parametrize(("level", "dtype"), one_in(3, HERE, DTYPES), ids=str)
def test_decodes_over_codes(level, dtype, threads):
    """Several spans, an incomplete one, all groups, heads of more elements than a kernel has sums for, and so many that
    products of 16-bit integers would overflow 32 bits if q used all 16."""
    backend = CpuBackend(level)
    for turn, (heads, kv_heads, size, block_size) in enumerate(
        ((9, 3, 64, 16), (7, 1, 128, 32), (2, 2, 80, 1), (8, 4, 256, 16), (1, 1, 1024, 16))
    ):
        threads(1 + turn % 2)
        for kv_dtype in ("int8", "fp8"):
            point = Point("ragged decodes", heads, kv_heads, size, block_size, dtype)
            assert find_quantized_fault(backend, point, kv_dtype) is None, (point, kv_dtype)


@pytest.mark.parametrize("level", HERE)
@pytest.mark.parametrize("kind", ["K", "V"])
@pytest.mark.parametrize("kv_dtype", ["", "int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_nan_in_the_pool_shows_in_the_rows_of_its_heads(level, kind, kv_dtype, dtype):
    """A weight of zero would hide it."""
    case, backend = Case([(1, 200), (20, 100)], 6, 2, 64, 16, dtype), CpuBackend(level)
    case.kv[case.batch.block_tables[:, 4].long(), "KV".index(kind), 0, 3, 7] = torch.nan
    kv = quantized(case.pool, kv_dtype)[:, 1] if kv_dtype else case.kv
    plan = backend.plan(case.batch)
    backend.write_kv(case.k, case.v, kv, case.batch, plan)
    out = backend.attend(case.q, kv, case.batch, plan, case.scale)
    assert out[:, :3, 7].isnan().all() and out[:, 3:].isfinite().all()


def test_the_number_of_threads_changes_no_prefill_row(threads):
    for dtype in DTYPES:
        case = Case([(150, 333), (300, 0)], 6, 2, 64, 16, dtype)
        threads(1)
        alone = attend(CpuBackend(), case, dtype)
        threads(2)
        torch.testing.assert_close(attend(CpuBackend(), case, dtype), alone)


def test_an_empty_step_and_strided_queries():
    backend, case = CpuBackend(), Case(MIXES["everything"], 4, 2, 64, 16, torch.bfloat16)
    empty = Case(MIXES["one decode"], 4, 2, 64, 16, torch.bfloat16)
    empty.batch = ragged_batch([(1, 3)], 16, torch.Generator())
    empty.batch.num_decodes, empty.batch.q_lens, empty.batch.kv_lens = 0, [], []
    assert backend.attend(empty.q[:0], empty.kv, empty.batch, backend.plan(empty.batch), 1.0).shape == (0, 4, 64)
    expected = attend(backend, case, torch.bfloat16)
    wide = torch.full((len(case.q), 9, 64), torch.nan, dtype=torch.bfloat16)
    wide[:, 3:7] = case.q
    case.q = wide[:, 3:7]
    assert torch.equal(attend(backend, case, torch.bfloat16), expected)


@pytest.mark.parametrize("level", HERE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [32, 80])
def test_rotates_and_writes(level, dtype, size, threads):
    """Rounded once from float32: equal to float64's result rounded, to one unit in the last place."""
    threads(2)
    case = Case([(1, 20), (1, 7), (300, 5)], 6, 2, size, 48, dtype)
    case.batch.slot_mapping[-3:] = -1
    qkv = torch.cat((case.q, case.k, case.v), dim=1)
    angle = torch.rand(len(qkv), size // 2) * 7
    cos, sin = angle.cos(), angle.sin()
    q, k = (rotate(x.double(), cos[:, None].double(), sin[:, None].double()) for x in (case.q, case.k))
    before, backend = case.pool.clone(), CpuBackend(level)
    ours = backend.rotate_and_write_kv(qkv, 6, cos, sin, case.kv, case.batch, backend.plan(case.batch))
    torch.testing.assert_close(ours.double(), q, rtol=torch.finfo(dtype).eps, atol=1e-6)
    for row, slot in enumerate(case.batch.slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, 48)
            written = case.kv[block, :, :, offset]
            torch.testing.assert_close(written[0].double(), k[row], rtol=torch.finfo(dtype).eps, atol=1e-6)
            assert torch.equal(written[1], case.v[row])
            before[block, 1, :, :, offset] = written
    assert torch.equal(before.nan_to_num(7.0), case.pool.nan_to_num(7.0))


@pytest.fixture
def sparse() -> Tensor:
    """16 GiB of address space, of which only the touched pages are memory: a pool whose blocks lie 4 GiB apart."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    flat = torch.frombuffer(mmap.mmap(-1, 16 << 30, flags=flags), dtype=torch.bfloat16)
    return flat.as_strided((4, 2, 2, 2, 16, 64), (1 << 31, 4096, 2048, 1024, 64, 1))


@pytest.mark.parametrize("level", HERE)
def test_blocks_beyond_four_gibibytes(sparse, level):
    case = Case([(1, 25), (20, 9)], 4, 2, 64, 16, torch.bfloat16)
    used = case.batch.block_tables[:, :2].flatten().tolist()
    moved = dict(zip(used, (3, 1, 2, 0), strict=True))
    for old, new in moved.items():
        sparse[new, 1] = case.kv[old].nan_to_num(0)
    far = Case([(1, 25), (20, 9)], 4, 2, 64, 16, torch.bfloat16)
    far.batch.block_tables[:, :2] = torch.tensor([3, 1, 2, 0]).view(2, 2)
    slots = far.batch.slot_mapping.tolist()
    far.batch.slot_mapping = torch.tensor([moved[slot // 16] * 16 + slot % 16 for slot in slots])
    backend = CpuBackend(level)
    plan = backend.plan(far.batch)
    backend.write_kv(far.k, far.v, sparse[:, 1], far.batch, plan)
    out = backend.attend(far.q, sparse[:, 1], far.batch, plan, far.scale)
    assert torch.equal(out, attend(backend, case, torch.bfloat16))


def test_refuses_what_it_cannot_compute():
    backend, case = CpuBackend(), Case(MIXES["one decode"], 4, 2, 64, 16, torch.float32)
    plan = backend.plan(case.batch)
    for changed, message in (
        ({"q": case.q.double()}, "float64"),
        ({"kv": case.kv.transpose(3, 4).contiguous().transpose(3, 4)}, "contiguous heads"),
        ({"kv": case.kv.int()}, "quantized KV pool"),
        ({"q": case.q[:, :3]}, "do not fit"),
        ({"scale": 0.0}, "scale > 0"),
        ({"window": -1}, "window"),
    ):
        with pytest.raises(ValueError, match=message):
            backend.attend(**({"q": case.q, "kv": case.kv, "batch": case.batch, "plan": plan, "scale": 1.0} | changed))
    odd = torch.zeros(1, 1, 72)
    with pytest.raises(ValueError, match="head size 72"):
        backend.attend(odd, torch.zeros(3, 2, 1, 16, 72), case.batch, plan, 1.0)


@pytest.fixture
def measured(monkeypatch):
    """Seconds that candidates are measured to take, for prompts and for decodes. No lower level is compiled."""
    times = {"prompts": [1.0, 2.0], "decodes": [1.0, 2.0]}
    kind = {True: "decodes", False: "prompts"}
    monkeypatch.setattr("attention.choice.choose.lower", lambda *_: [])
    monkeypatch.setattr(
        cpu_choice, "seconds_of", lambda backends, batch, heads, check: times[kind[batch.num_decodes > 0]]
    )
    return times


def test_auto_takes_what_was_measured_to_be_faster(measured, caplog):
    with caplog.at_level(logging.INFO):
        assert choose("auto", "cpu").name == "cpu"
        measured["decodes"] = [1.0, 0.4]
        assert choose("auto", "cpu", num_heads=32, num_kv_heads=8, head_size=128).name == "torch"
    ours, theirs = [message for message in caplog.messages if "measured with" in message]
    assert ours.startswith(f"attention by our kernels of level {HERE[0]}") and "9/3 heads of 64 in bfloat16" in ours
    assert theirs.startswith("attention by torch") and "32/8 heads of 128" in theirs
    assert "2000.00 ms for 256 new tokens, 400.00 ms for 4 decodes over 512" in theirs


def test_the_best_level_loses_by_more_than_the_noise_only(measured):
    measured["prompts"] = [1.0, 0.95]
    assert choose("auto", "cpu").name == "cpu"


@pytest.mark.skipif(len(HERE) == 1, reason="this CPU has one level")
def test_auto_takes_a_lower_level_if_it_is_faster_and_no_level_is_named(measured, monkeypatch, caplog):
    asked = []
    monkeypatch.setattr("attention.choice.choose.lower", lambda *given: asked.append(given[:2]) or [HERE[-1]])
    measured.update(prompts=[2.0, 1.0, 3.0], decodes=[2.0, 1.0, 3.0])
    with caplog.at_level(logging.INFO):
        assert choose("auto", "cpu", dtype=torch.float16).level == HERE[-1]
    assert f"attention by our kernels of level {HERE[-1]}, measured with" in caplog.text
    assert f"; our kernels of level {HERE[0]} 2000.00 ms" in caplog.text and "; torch 3000.00 ms" in caplog.text
    measured.update(prompts=[2.0, 1.0], decodes=[2.0, 1.0])
    assert choose("auto", "cpu", cpu_level=HERE[0]).name == "torch" and asked == [(HERE[0], False)]


def test_lower_levels_are_those_that_are_compiled_and_compute_otherwise(monkeypatch):
    def here(*levels):
        monkeypatch.setattr("attention.cpu.level.levels_here", lambda: list(levels))

    here("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2")
    asked = []
    assert lower("amx", True, lambda each: asked.append(each) or True) == ["avx512_bf16", "avx512_vnni", "avx2"]
    assert asked == ["avx512_bf16", "avx512_vnni", "avx2"]  # avx512 multiplies elements as avx512_vnni
    assert lower("amx", True, lambda each: each != "avx512_vnni") == ["avx512_bf16", "avx512", "avx2"]
    assert lower("amx", False, lambda each: True) == ["avx2"]  # float32: no level has tiles or pairs
    assert lower("amx", False, lambda each: False) == [] == lower("avx2", True, lambda each: True)
    here("neon_dotprod", "neon")
    assert lower("neon_dotprod", True, lambda each: True) == []


def test_whether_kernels_are_compiled_is_known_without_compiling(monkeypatch, tmp_path):
    library(HERE[-1])
    assert is_compiled(HERE[-1])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not is_compiled(HERE[-1]) and not list(tmp_path.iterdir())


def test_the_measurement_computes_with_every_candidate():
    """Over KV as the arena has it: kernels of codes are others."""
    seen = []

    class Noting(ReferenceBackend):
        def attend(self, q, kv, batch, plan, scale, **options):
            seen.append((q.dtype, list(q.shape), batch.num_decodes, batch.kv_lens[0], kv.dtype))
            assert rows_of(kv, lambda pool: pool, torch.float32).sub(1).abs().max() < 0.01
            return super().attend(q, kv, batch, plan, scale, **options)

    heads = Heads(4, 2, 32, torch.float16)
    assert all(0 < took < 60 for took in seconds_of([Noting(), CpuBackend()], batch_of([3], 20), heads))
    assert seen == [(torch.float16, [3, 4, 32], 0, 20, torch.float16)] * 6
    for name, dtype in (*CODES.items(), ("float32", torch.float32)):
        coded = replace(heads, kv_dtype=name)
        assert all(0 < took < 60 for took in seconds_of([Noting(), CpuBackend()], batch_of([1], 20), coded))
        assert seen[-1] == (torch.float16, [1, 4, 32], 1, 20, dtype)
    row = replace(heads, num_kv_heads=1, rank=16, kv_dtype="int8")  # a latent
    assert all(0 < took < 60 for took in seconds_of([Noting(), CpuBackend()], batch_of([1], 20), row))
    assert fastest_of([("a", CpuBackend())], heads).name == "cpu"


@pytest.mark.parametrize("kv_dtype", ["int8", "float32"])
def test_auto_measures_over_the_type_of_the_pool(monkeypatch, caplog, kv_dtype):
    given = []
    monkeypatch.setattr(cpu_choice, "seconds_of", lambda backends, batch, heads, check: given.append(heads) or [1, 2])
    monkeypatch.setattr("attention.choice.choose.lower", lambda *_: [])
    with caplog.at_level(logging.INFO):
        assert choose("auto", "cpu", kv_dtype=kv_dtype).name == "cpu"
    assert [heads.pool for heads in given] == [kv_dtype] * 2 and f"in bfloat16 over KV in {kv_dtype}" in caplog.text


def test_a_backend_by_name_is_refused_at_the_start_for_heads_that_it_cannot_compute(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name, options in (
        ("cpu", {"head_size": 72}),
        ("cpu", {"head_size": 1040}),
        ("triton", {"head_size": 72}),
        ("triton", {"head_size": 288}),
        ("triton", {"head_size": 1088, "rank": 1024}),
        ("triton", {"head_size": 520, "rank": 512}),
    ):
        with pytest.raises(ValueError, match=rf"{name}' has no kernel for head.*; choose --attention-backend torch"):
            choose(name, "cpu", **options)
    assert choose("cpu", "cpu", head_size=1024).name == "cpu"


def test_auto_takes_torch_for_heads_without_a_kernel(caplog):
    with caplog.at_level(logging.WARNING):
        assert choose("auto", "cpu", head_size=72).name == "torch"
    assert len(caplog.messages) == 1 and "head size 72" in caplog.messages[0]
    with pytest.raises(ValueError, match="does not run on cuda"):
        choose("cpu", "cuda")


@pytest.mark.parametrize("level", HERE)
def test_a_level_can_be_forced(level):
    assert choose("cpu", "cpu", cpu_level=level).level == level


@pytest.mark.parametrize("name", ["auto", "cpu"])
@pytest.mark.parametrize("level", sorted(LEVELS.keys() - set(HERE)))
def test_a_level_that_this_cpu_lacks_is_refused(name, level):
    lacks = rf"--cpu-level {level}: this CPU lacks .*; this CPU has: {', '.join(HERE)}"
    with pytest.raises(ValueError, match=lacks):
        choose(name, "cpu", cpu_level=level)
    with pytest.raises(NotCompiled, match=lacks):
        CpuBackend(level)


def test_without_the_features_auto_is_torch_and_cpu_is_an_error(monkeypatch, caplog):
    for module in (cpu_build, cpu_level):
        monkeypatch.setattr(module, "cpu_features", lambda: frozenset({"avx2", "fma"}))
    with caplog.at_level(logging.WARNING):
        assert choose("auto", "cpu").name == "torch"
    assert len(caplog.messages) == 1 and "lacks AVX2 with FMA and F16C" in caplog.messages[0]
    with pytest.raises(ValueError, match="and F16C; choose --attention-backend torch"):
        choose("cpu", "cpu")
