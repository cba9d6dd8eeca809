"""The torch backend against the float64 reference, over a paged pool whose unused slots hold NaN."""

import pytest
import torch
from torch import Tensor

from attention import RaggedBatch, backends, choose
from attention.reference import ReferenceBackend, tokens_of
from attention.torch_backend import GROUP_TOKENS, TorchBackend, attend_chunk, attend_masked, group_decodes

ON_CPU = sorted(backends.keys() - {"triton"})
"""triton takes a GPU or the interpreter: tests/attention/interpreted holds it to the same yardstick."""

torch.set_num_threads(1)

# (tokens of this step, tokens before them), decodes first: what one step can hold.
MIXES = {
    "one fresh token": [(1, 0)],
    "one decode": [(1, 40)],
    "decodes of one length": [(1, 63), (1, 63), (1, 63)],
    "ragged decodes": [(1, 0), (1, 15), (1, 16), (1, 17), (1, 200), (1, 190), (1, 3)],
    "whole prompts": [(37, 0), (2, 0), (64, 0)],
    "prefix and chunk": [(33, 1), (16, 64), (5, 130)],
    "everything": [(1, 31), (1, 90), (1, 0), (48, 0), (7, 70), (2, 15)],
}
# (query heads, KV heads, head size): groups of 1, 3 and 8
GEOMETRIES = [(heads, kv_heads, size) for heads, kv_heads in ((3, 3), (9, 3), (8, 1)) for size in (32, 64, 80, 128)]
SLACK = 1e-6
"""Outputs are of the order of 1: in float32 the fused kernel's exp is good to a few units in the last place."""


class Case:
    """A random step: its batch, the pool with all earlier tokens in place and NaN elsewhere, and the step's q, k, v."""

    def __init__(
        self, mix: list[tuple[int, int]], heads: int, kv_heads: int, size: int, block_size: int, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(len(mix) * 1000 + heads * 100 + size + block_size)
        self.batch = ragged_batch(mix, block_size, generator)
        blocks = int(self.batch.block_tables.max()) + 3
        self.scale = size**-0.5
        self.pool = torch.full((blocks, 2, 2, kv_heads, block_size, size), torch.nan, dtype=dtype)
        self.kv = self.pool[:, 1]  # a strided view, as the model passes it
        rows = sum(q_len for q_len, _ in mix)
        self.q, self.k, self.v = (
            torch.randn(rows, n, size, generator=generator).to(dtype) for n in (heads, kv_heads, kv_heads)
        )
        for s, (_, past) in enumerate(mix):
            for position in range(past):
                block = self.batch.block_tables[s, position // block_size]
                token = torch.randn(2, kv_heads, size, generator=generator).to(dtype)
                self.kv[block, :, :, position % block_size] = token

    def run(self, name: str, dtype: torch.dtype, window: int = 0, soft_cap: float = 0.0) -> Tensor:
        """Write and attend with inputs and pool in `dtype`."""
        backend, kv = backends[name](), self.kv.to(dtype)
        plan = backend.plan(self.batch)
        backend.write_kv(self.k.to(dtype), self.v.to(dtype), kv, self.batch, plan)
        return backend.attend(self.q.to(dtype), kv, self.batch, plan, self.scale, window=window, soft_cap=soft_cap)


def ragged_batch(mix: list[tuple[int, int]], block_size: int, generator: torch.Generator) -> RaggedBatch:
    q_lens, kv_lens = [q for q, _ in mix], [q + past for q, past in mix]
    counts = [-(-n // block_size) for n in kv_lens]
    shuffled = (torch.randperm(sum(counts) + 2, generator=generator) + 1).tolist()
    tables = torch.zeros(len(mix), max(counts) + 2, dtype=torch.int32)
    slots, positions = [], []
    for s, (q_len, past) in enumerate(mix):
        own = [shuffled.pop() for _ in range(counts[s])]
        tables[s, : len(own)] = torch.tensor(own)
        for position in range(past, past + q_len):
            slots.append(own[position // block_size] * block_size + position % block_size)
            positions.append(position)
    return RaggedBatch(
        cu_q=torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32),
        ctx_lens=torch.tensor(kv_lens, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.tensor(slots),
        positions=torch.tensor(positions),
        num_decodes=q_lens.count(1),
        block_size=block_size,
        q_lens=q_lens,
        kv_lens=kv_lens,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), GEOMETRIES)
def test_no_further_from_the_truth_than_twice_plain_torch(heads, kv_heads, size, block_size, dtype):
    """|ours - ref64| <= 2 |plain - ref64| + SLACK, plain being the reference in the dtype under test."""
    for name, mix in MIXES.items():
        case = Case(mix, heads, kv_heads, size, block_size, dtype)
        truth = case.run("reference", torch.float64)
        plain = (case.run("reference", dtype).double() - truth).abs().max()
        ours = (case.run("torch", dtype).double() - truth).abs().max()
        assert truth.isfinite().all()
        assert ours <= 2 * plain + SLACK, f"{name}: {ours:.2e}, plain torch {plain:.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("window", "soft_cap"), [(1, 0.0), (16, 0.0), (20, 0.0), (20, 2.0), (0, 2.0), (10_000, 0.0)])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (8, 1, 80)])
@pytest.mark.parametrize("backend", [name for name in ON_CPU if name != "reference"])
def test_windows_and_soft_caps(backend, heads, kv_heads, size, window, soft_cap, dtype):
    """The same rule, for every backend of the CPU."""
    for name in ("ragged decodes", "prefix and chunk", "everything"):
        case = Case([*MIXES[name], (300, 9)], heads, kv_heads, size, 16, dtype)
        truth = case.run("reference", torch.float64, window, soft_cap)
        plain = (case.run("reference", dtype, window, soft_cap).double() - truth).abs().max()
        ours = (case.run(backend, dtype, window, soft_cap).double() - truth).abs().max()
        assert truth.isfinite().all()
        assert ours <= 2 * plain + SLACK, f"{name}: {ours:.2e}, plain torch {plain:.2e}"


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
    out = case.run("reference", torch.float64)[:, 0]
    a, b = (case.scale * (q[1] @ k[j]) for j in (0, 1))
    share = 1 / (1 + (b - a).exp())
    torch.testing.assert_close(out, torch.stack((v[0], share * v[0] + (1 - share) * v[1])))


@pytest.mark.parametrize("name", ON_CPU)
def test_writes_its_slots_and_no_other(name):
    case = Case(MIXES["everything"], 3, 3, 32, 16, torch.float32)
    case.batch.slot_mapping[-3:] = -1  # padding rows
    before = case.pool.clone()
    backend = backends[name]()
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
    backend = backends[name]()
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
    keys, values = tokens_of(kv, torch.tensor([2, 0], dtype=torch.int32), 6)
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
    assert choose("auto", "cpu").name == "torch"
    assert choose("reference", "cpu").name == "reference"
    with pytest.raises(ValueError, match=r"'flash'.*auto, reference, torch"):
        choose("flash", "cpu")
