"""Every backend of the CPU against the float64 reference, over a paged pool whose unused slots hold NaN."""

import pytest
import torch

from attention import backends
from attention.choice import choose as choosing
from attention.choice.choose import choose, made
from attention.declared import takes_sinks
from attention.reference import ReferenceBackend, tokens_of
from attention.torch_backend import GROUP_TOKENS, TorchBackend, attend_chunk, attend_masked, group_decodes
from lab.bench.attention.grid import (
    BLOCK_SIZES,
    DTYPES,
    GEOMETRIES,
    MIXES,
    SLACK,
    Case,
    Point,
    find_fault,
    points,
    ragged_batch,
    sink_points,
)
from tests.heavy import one_in

ON_CPU = sorted(backends.keys() - {"triton"})
"""triton takes a GPU or the interpreter: tests/attention/interpreted holds it to the same yardstick."""

FAST = sorted(set(ON_CPU) - {"reference"})

MASKS = [(1, 0.0), (16, 0.0), (20, 0.0), (20, 2.0), (0, 2.0), (10_000, 0.0)]
"""(window, soft cap)"""

torch.set_num_threads(1)


@pytest.mark.parametrize(("geometry", "block_size", "dtype"), one_in(3, GEOMETRIES, BLOCK_SIZES, DTYPES), ids=str)
def test_no_further_from_the_truth_than_twice_plain_torch(geometry, block_size, dtype):
    """Written and attended as lab/bench/attention/grid.py wants it."""
    heads, kv_heads, size = geometry
    for mix in MIXES:
        point = Point(mix, heads, kv_heads, size, block_size, dtype)
        for name in FAST:
            fault = find_fault(made(name), point)
            assert fault is None, f"{name}, {point}: {fault}"


@pytest.mark.parametrize("name", ON_CPU)
def test_the_quick_grid_with_windows_and_soft_caps(name):
    for point in points(quick=True):
        assert find_fault(made(name), point) is None, point


@pytest.mark.parametrize(("mask", "dtype", "geometry"), one_in(2, MASKS, DTYPES, [(9, 3, 64), (8, 1, 80)]), ids=str)
@pytest.mark.parametrize("backend", FAST)
def test_windows_and_soft_caps(backend, mask, dtype, geometry):
    """The same rule, for every backend of the CPU."""
    (window, soft_cap), (heads, kv_heads, size) = mask, geometry
    for name in ("ragged decodes", "prefix and chunk", "everything"):
        case = Case([*MIXES[name], (300, 9)], heads, kv_heads, size, 16, dtype)
        truth = case.run(ReferenceBackend(), torch.float64, window, soft_cap)
        plain = (case.run(ReferenceBackend(), dtype, window, soft_cap).double() - truth).abs().max()
        ours = (case.run(made(backend), dtype, window, soft_cap).double() - truth).abs().max()
        assert truth.isfinite().all()
        assert ours <= 2 * plain + SLACK, f"{name}: {ours:.2e}, plain torch {plain:.2e}"


@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (20, 0.0), (20, 2.0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinks(dtype, window, soft_cap):
    """Every backend of the CPU as close to the reference in float64 as plain torch is."""
    sinks = torch.randn(9, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 3
    for name in ("ragged decodes", "prefix and chunk", "everything"):
        case = Case([*MIXES[name], (300, 9)], 9, 3, 64, 16, dtype)
        truth = case.run(ReferenceBackend(), torch.float64, window, soft_cap, sinks.to(dtype))
        without = case.run(ReferenceBackend(), torch.float64, window, soft_cap)
        assert (truth.abs() <= without.abs() + 1e-9).all() and (truth - without).abs().max() > 0.01
        plain = (case.run(ReferenceBackend(), dtype, window, soft_cap, sinks).double() - truth).abs().max()
        for backend in FAST:
            ours = case.run(made(backend), dtype, window, soft_cap, sinks).double()
            assert (ours - truth).abs().max() <= 2 * plain + SLACK, backend


@pytest.mark.parametrize("name", ON_CPU)
def test_the_grid_with_sinks(name):
    for point in sink_points():
        assert find_fault(made(name), point) is None, point


@pytest.mark.parametrize("name", ON_CPU)
def test_a_sink_far_above_all_scores_takes_all_weight(name):
    """2^(sink - maximum) overflows float32."""
    case = Case(MIXES["everything"], 4, 2, 64, 16, torch.float32)
    sinks = torch.tensor([1e4, -1e4, 300.0, 0.0])
    out = case.run(made(name), torch.float32, sinks=sinks)
    without = case.run(ReferenceBackend(), torch.float32)
    assert not out[:, [0, 2]].any() and (out[:, 3] != without[:, 3]).any()
    torch.testing.assert_close(out[:, 1], without[:, 1])


def test_a_sink_is_one_more_score_without_a_value():
    """Two tokens, one head: o = plain * sigmoid(log-sum-exp - sink)."""
    case, sink = Case([(2, 0)], 1, 1, 32, 16, torch.float64), 0.7
    plain = case.run(ReferenceBackend(), torch.float64)
    options = {"sinks": torch.tensor([sink], dtype=torch.float64)}
    ReferenceBackend().write_kv(case.k, case.v, case.kv, case.batch, None)
    out = ReferenceBackend().attend(case.q, case.kv, case.batch, None, case.scale, **options)
    scores = torch.stack([case.scale * (case.q[1, 0] @ case.k[j, 0]) for j in (0, 1)])
    torch.testing.assert_close(out[1], plain[1] * torch.sigmoid(scores.logsumexp(0) - sink))


def test_a_backend_without_sinks_is_refused_by_name(tmp_path):
    """A user's backend whose `attend` is its own; those of the register take sinks."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from attention.reference import ReferenceBackend\n\n\n"
        "class Mine(ReferenceBackend):\n"
        "    name = 'mine'\n\n"
        "    def attend(self, q, kv, batch, plan, scale, *, window=0, soft_cap=0.0):\n"
        "        return super().attend(q, kv, batch, plan, scale, window=window, soft_cap=soft_cap)\n"
    )
    with pytest.raises(ValueError, match=r"'mine' has no attention sinks.*--attention-backend auto"):
        choose(f"{file}:Mine", "cpu", sinks=True)
    assert choose("auto", "cpu", sinks=True).name in ("cpu", "torch")
    assert all(takes_sinks(made(name)) for name in ON_CPU)


def test_sinks_that_do_not_fit_the_heads_are_refused():
    case = Case(MIXES["one decode"], 4, 2, 64, 16, torch.float32)
    with pytest.raises(ValueError, match=r"\[3\] sinks do not fit 4 heads"):
        case.run(made("cpu"), torch.float32, sinks=torch.zeros(3))


def test_a_window_gathers_its_blocks_only():
    """Decodes: a window and the rest of its first block. Chunks: pieces of a window over a window."""
    batch = ragged_batch([(1, 999), (1, 500), (1, 3), (400, 600)], 16, torch.Generator().manual_seed(1))
    cut = TorchBackend().plan(batch).cut(150)
    assert sum(len(group.blocks) for group in cut.groups) <= 2 * 11 + 1
    assert [(chunk.first_row, chunk.q_len) for chunk in cut.chunks] == [(3, 150), (153, 150), (303, 100)]
    assert all(len(chunk.blocks) * 16 <= chunk.q_len + 150 + 32 for chunk in cut.chunks)
    whole = TorchBackend().plan(batch)
    assert whole.cut(1000) is whole.cut(0)  # hides nothing


def test_reference_is_softmax_attention_by_hand():
    """Two tokens, one head of two elements: small enough to write out."""
    case = Case([(2, 0)], 1, 1, 32, 16, torch.float64)
    q, k, v = case.q[:, 0], case.k[:, 0], case.v[:, 0]
    out = case.run(ReferenceBackend(), torch.float64)[:, 0]
    a, b = (case.scale * (q[1] @ k[j]) for j in (0, 1))
    share = 1 / (1 + (b - a).exp())
    torch.testing.assert_close(out, torch.stack((v[0], share * v[0] + (1 - share) * v[1])))


@pytest.mark.parametrize("name", ON_CPU)
def test_writes_its_slots_and_no_other(name):
    case = Case(MIXES["everything"], 3, 3, 32, 16, torch.float32)
    case.batch.slot_mapping[-3:] = -1  # padding rows
    before = case.pool.clone()
    backend = made(name)
    backend.write_kv(case.k, case.v, case.kv, case.batch, backend.plan(case.batch))
    for row, slot in enumerate(case.batch.slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, 16)
            assert torch.equal(case.kv[block, 0, :, offset], case.k[row])
            assert torch.equal(case.kv[block, 1, :, offset], case.v[row])
            before[block, 1, :, :, offset] = case.pool[block, 1, :, :, offset]
    assert torch.equal(before.nan_to_num(7.0), case.pool.nan_to_num(7.0))


@pytest.mark.parametrize("name", ON_CPU)
def test_pool_may_be_narrower_than_the_model(name):
    """kv_cache_dtype: rounded when written, widened when read."""
    case = Case(MIXES["everything"], 6, 2, 32, 16, torch.float32)
    case.kv = case.kv.to(torch.bfloat16)
    backend = made(name)
    plan = backend.plan(case.batch)
    backend.write_kv(case.k, case.v, case.kv, case.batch, plan)
    out = backend.attend(case.q, case.kv, case.batch, plan, case.scale)
    wide = ReferenceBackend().attend(case.q.double(), case.kv.double(), case.batch, None, case.scale)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), wide, atol=2e-6, rtol=0)


def test_chunk_by_mask_equals_chunk_by_merge():
    """The path of other devices, here on the CPU."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, n, length, 64, generator=generator) for n, length in ((9, 20), (3, 150), (3, 150)))
    torch.testing.assert_close(attend_masked(q, k, v, 0.2), attend_chunk(q, k, v, 0.2), atol=1e-5, rtol=0)


def test_tokens_of_follows_the_block_table():
    kv = torch.arange(3 * 2 * 1 * 4 * 1.0).view(3, 2, 1, 4, 1)
    keys, values = tokens_of(kv, torch.tensor([2, 0], dtype=torch.int32), 6, torch.float32)
    assert keys.flatten().tolist() == [16, 17, 18, 19, 0, 1]
    assert values.flatten().tolist() == [20, 21, 22, 23, 4, 5]


def test_groups_hold_every_decode_once_and_bound_waste():
    generator = torch.Generator().manual_seed(11)
    for _ in range(50):
        lens = torch.randint(1, 5000, (40,), generator=generator).tolist()
        groups = group_decodes(lens)
        assert sorted(row for group in groups for row in group) == list(range(40))
        for group in groups:
            longest = max(lens[row] for row in group)
            assert all(lens[row] >= 0.75 * longest for row in group)
            assert len(group) == 1 or len(group) * longest <= GROUP_TOKENS
    assert group_decodes([]) == []


def test_large_batches_split_into_several_groups():
    mix = [(1, 60 + i % 5) for i in range(20)] + [(1, 2)] * 3
    batch = ragged_batch(mix, 16, torch.Generator().manual_seed(1))
    plan = TorchBackend().plan(batch)
    groups = plan.cut(0).groups
    assert [len(group.rows) for group in groups] == [20, 3]
    assert groups[1].visible is None and groups[1].unused is None


def test_choose_names_the_choices():
    assert choose("reference", "cpu").name == "reference"
    with pytest.raises(ValueError, match=r"'flash'.*auto, cpu, reference, torch"):
        choose("flash", "cpu")


@pytest.mark.parametrize(
    ("capability", "installed", "expected"), [((9, 0), True, True), ((7, 5), True, False), ((8, 6), False, False)]
)
def test_auto_takes_triton_on_a_gpu_that_runs_it(monkeypatch, capability, installed, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(choosing, "find_spec", lambda name: name if installed else None)
    monkeypatch.setattr(choosing, "made", lambda name: {"triton": "the kernels"}[name])
    assert (choose("auto", "cuda") == "the kernels") is expected
    assert choose("auto", "cuda", head_size=72).name == "torch", "no tile for it"
    latent = {"num_heads": 128, "num_kv_heads": 1, "rank": 512}
    assert (choose("auto", "cuda", 576, **latent) == "the kernels") is expected
    assert choose("auto", "cuda", 536, **latent).name == "torch", "nor for a rotary part of 24"
