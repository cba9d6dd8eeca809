"""The runner: step metadata against a naive construction, order of results, hooks, and step times."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llama import BLOCK_SIZE, runner, tiny

from attention.reference import tokens_of
from engine.request import SamplingParams
from engine.runner import Row, Runner, build_inputs
from engine.sampler import SamplingRow

GREEDY = SamplingParams(temperature=0)
CPU = torch.device("cpu")


def greedy_row(token_ids: list[int], start: int, block_ids: list[int]) -> Row:
    return Row(token_ids, start, block_ids, SamplingRow(GREEDY, [0] * start + token_ids, 1))


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Row], int]:
    block_size = draw(st.sampled_from([1, 4, 16, 32]))
    rows = []
    for i in range(draw(st.integers(1, 8))):
        count, start = draw(st.sampled_from([1, 1, 2, 5, 40])), draw(st.integers(0, 100))
        ids = draw(st.lists(st.integers(0, 49151), min_size=count, max_size=count))
        needed = -(-(start + count) // block_size)
        blocks = draw(st.permutations(range(1000 * i, 1000 * i + needed + draw(st.integers(0, 3)))))
        row = greedy_row(ids, start, blocks)
        rows.append(row if draw(st.booleans()) else Row(ids, start, blocks))
    return rows, block_size


@settings(max_examples=80, deadline=None)
@given(steps())
def test_metadata_equals_the_naive_construction(step):
    rows, block_size = step
    inputs = build_inputs(rows, block_size, CPU)
    batch = inputs.batch

    decodes = [i for i, row in enumerate(rows) if len(row.token_ids) == 1]
    order = decodes + [i for i in range(len(rows)) if i not in decodes]
    token_ids, positions, slots, wanted, cu_q = [], [], [], [], [0]
    for s, i in enumerate(order):
        row = rows[i]
        for offset, token in enumerate(row.token_ids):
            position = row.start + offset
            token_ids.append(token)
            positions.append(position)
            slots.append(row.block_ids[position // block_size] * block_size + position % block_size)
        cu_q.append(len(token_ids))
        if row.sample is not None:
            wanted.append(len(token_ids) - 1)
        used = -(-(row.start + len(row.token_ids)) // block_size)
        table = batch.block_tables[s].tolist()
        assert table == list(row.block_ids[:used]) + [0] * (len(table) - used)

    assert inputs.order == order
    assert inputs.token_ids.tolist() == token_ids
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots
    assert inputs.last_rows.tolist() == wanted
    assert batch.cu_q.tolist() == cu_q
    assert batch.num_decodes == len(decodes)
    assert batch.q_lens == [len(rows[i].token_ids) for i in order]
    assert batch.kv_lens == batch.ctx_lens.tolist() == [rows[i].start + len(rows[i].token_ids) for i in order]
    assert batch.block_tables.shape[1] % 16 == 0
    assert {t.dtype for t in (inputs.token_ids, batch.positions, batch.slot_mapping)} == {torch.int64}
    assert {t.dtype for t in (batch.cu_q, batch.ctx_lens, batch.block_tables)} == {torch.int32}


def test_results_come_in_the_order_of_the_rows():
    """Prefill before decode in the caller's list, one row that wants no token."""
    theirs = tiny()
    ours, alone = runner(theirs), runner(theirs)
    first = [greedy_row([5, 6, 7], 0, [0]), greedy_row([8, 9], 0, [1]), greedy_row([3], 0, [2])]
    together = ours.step(first)
    assert [s.token_id for s in together] == [alone.step([row])[0].token_id for row in first]

    second = [
        Row([10] * 20, 3, [0, 3]),
        greedy_row([11], 2, [1]),
        greedy_row([12, 13], 1, [2]),
        greedy_row([4], 0, [9]),
    ]
    together = ours.step(second)
    assert together[0] is None
    apart = [alone.step([row])[0] for row in second]
    assert [s and s.token_id for s in together] == [s and s.token_id for s in apart]


def test_blocks_may_be_any_integer_sequence():
    """The engine may keep its tables as arrays."""
    ours = runner(tiny())
    expected = ours.step([greedy_row(list(range(20)), 0, [4, 2])])
    row = greedy_row(list(range(20)), 0, [])
    row.block_ids = np.array([7, 3], dtype=np.int32)
    assert ours.step([row]) == expected


def test_on_layer_comes_when_the_layers_kv_is_in_the_pool_and_no_later_layers():
    """The hook pushes a layer to the decode node while the next one computes: at the call the layer's slots hold this
    step's KV, and what it copies then is what the pool holds at the end."""
    ours = runner(tiny(layers=4))
    ours.step([greedy_row([1] * 18, 0, [0, 1])])
    before = ours.kv_pool.clone()
    calls, copies = [], []

    def on_layer(index: int) -> None:
        calls.append(index)
        copies.append(ours.kv_pool[:, index].clone())
        assert torch.equal(ours.kv_pool[:, index + 1 :].nan_to_num(7), before[:, index + 1 :].nan_to_num(7))

    ours.step([greedy_row([2, 3, 4], 0, [5]), greedy_row([9], 18, [0, 1]), greedy_row([6] * 20, 0, [8, 6])], on_layer)
    assert calls == [0, 1, 2, 3]
    for index, copy in enumerate(copies):
        assert torch.equal(copy.nan_to_num(7), ours.kv_pool[:, index].nan_to_num(7))
        for table, length in (([5], 3), ([0, 1], 19), ([8, 6], 20)):
            assert tokens_of(copy, torch.tensor(table), length).isfinite().all()
    assert ours.kv_pool[6, :, :, :, 4:].isnan().all(), "slots after the last token stay unwritten"


def test_an_error_in_the_hook_reaches_the_caller():
    ours = runner(tiny())

    def on_layer(index: int) -> None:
        raise RuntimeError(f"push of layer {index} failed")

    with pytest.raises(RuntimeError, match="push of layer 0 failed"):
        ours.step([greedy_row([1], 0, [0])], on_layer)
    assert ours.step([greedy_row([1], 0, [0])])[0] is not None


def test_step_time_says_what_the_step_did():
    ours = runner(tiny())
    assert ours.last is None
    ours.step([greedy_row([1] * 30, 0, [0, 1])])
    ours.step([greedy_row([1], 30, [0, 1]), Row([1] * 5, 0, [2]), Row([1] * 4, 30, [0, 1, 3]), Row([7], 0, [4])])
    last = ours.last
    assert last.seconds > 0
    assert (last.num_decodes, last.decode_context) == (2, 31 + 1)
    assert (last.prefill_tokens, last.prefill_pairs) == (9, 5 * 5 + 4 * (4 + 60))


def test_empty_step():
    assert runner(tiny()).step([]) == []


def test_rows_that_cannot_run_are_refused_before_anything_is_written():
    ours = runner(tiny())
    with pytest.raises(ValueError, match="row 1 of the step has no tokens"):
        ours.step([greedy_row([1], 0, [0]), Row([], 0, [1])])
    with pytest.raises(ValueError, match="row 0 of the step needs 2 blocks, has 1"):
        ours.step([Row([1], BLOCK_SIZE, [3])])
    assert ours.kv_pool.isnan().all()


def test_pool_of_another_shape_is_refused():
    ours = runner(tiny())
    with pytest.raises(ValueError, match=r"must be \[num_blocks, 3, 2, 2, 32, 32\], is \[64, 3, 2, 2, 16, 32\]"):
        Runner(ours.model, ours.kv_pool, 32)
