"""The runner: step metadata against a naive construction, order of results, hooks, and step times."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.reference import tokens_of
from engine.model.decoder import Between
from engine.model.gpu import Host, Past
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import SamplingRow
from engine.step.inputs import InputBuilder
from engine.step.runner import QUEUED, Row, Runner
from tests.engine.tiny_llama import BLOCK_SIZE, runner, tiny

GREEDY = SamplingParams(temperature=0)
BUILDERS = {size: InputBuilder(size, torch.device("cpu")) for size in (1, 4, 16, 32)}
"""Each builds many steps in the same memory, as a node's does."""


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
        row.num_samples = draw(st.integers(1, count))
        rows.append(row if draw(st.booleans()) else Row(ids, start, blocks))
        if draw(st.booleans()):
            rows[-1].block_ids = np.array(blocks, dtype=np.int32)
    return rows, block_size


@settings(max_examples=80, deadline=None)
@given(steps())
def test_metadata_equals_the_naive_construction(step):
    rows, block_size = step
    inputs = BUILDERS[block_size].build(rows)
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
            wanted += range(len(token_ids) - row.num_samples, len(token_ids))
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
    assert together == [alone.step([row])[0] for row in first]

    second = [
        Row([10] * 20, 3, [0, 3]),
        greedy_row([11], 2, [1]),
        greedy_row([12, 13], 1, [2]),
        greedy_row([4], 0, [9]),
    ]
    together = ours.step(second)
    assert [len(chosen) for chosen in together] == [0, 1, 1, 1]
    apart = [alone.step([row])[0] for row in second]
    assert together == apart


def test_blocks_may_be_any_integer_sequence():
    """The engine may keep its tables as arrays."""
    ours = runner(tiny())
    expected = ours.step([greedy_row(list(range(20)), 0, [4, 2])])
    row = greedy_row(list(range(20)), 0, [])
    row.block_ids = np.array([7, 3], dtype=np.int32)
    assert ours.step([row]) == expected


def test_a_row_may_ask_for_the_tokens_after_each_of_its_draft():
    """What speculation verifies: the choices after the known tokens, after one draft token, after two, ... equal those
    of steps that know these tokens, also where the counts of tokens matter."""
    known, draft = [5, 6, 7, 8], [9, 6, 9]
    for params in (GREEDY, SamplingParams(seed=3), SamplingParams(temperature=0, frequency_penalty=2, min_tokens=3)):
        ours, plain = runner(tiny()), runner(tiny())
        expected = []
        plain.step([Row(known[:-1], 0, [3])])
        for j in range(len(draft) + 1):
            tokens = known + draft[:j]
            sample = SamplingRow(params, tokens, 2, eos_ids=(4,))
            expected += plain.step([Row(tokens[-1:], len(tokens) - 1, [3], sample)])[0]
        ours.step([Row(known[:-1], 0, [3])])
        rows = [
            Row([8, *draft], 3, [3], SamplingRow(params, known, 2, eos_ids=(4,)), num_samples=4),
            greedy_row([1], 0, [7]),
        ]
        assert ours.step(rows)[0] == expected
    with pytest.raises(ValueError, match="row 0 of the step requests 3 tokens after 2"):
        ours.step([Row([8, 9], 3, [3], SamplingRow(GREEDY, known, 2), num_samples=3)])


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
            assert tokens_of(copy, torch.tensor(table), length, copy.dtype).isfinite().all()
    assert ours.kv_pool[6, :, :, :, 4:].isnan().all(), "slots after the last token stay unwritten"


class Numbered(Past):
    """The n-th mark of a stream."""

    def __init__(self, number: int, waited: list[int]) -> None:
        self._number, self._waited = number, waited

    def synchronize(self) -> None:
        self._waited.append(self._number)


class Device(Host):
    """Work runs later; only `mark` and the waits for it are seen."""

    asynchronous = True

    def __init__(self) -> None:
        self.marks, self.waited = 0, list[int]()

    def mark(self, like: torch.Tensor) -> Numbered:
        self.marks += 1
        return Numbered(self.marks - 1, self.waited)


def test_the_host_queues_a_part_hardly_faster_than_the_device_computes_it():
    """It asks in each layer whether the part goes on. If all layers were queued by then, the answer would come too
    late."""
    model, pool = runner(tiny(layers=6)).model, runner(tiny(layers=6)).kv_pool
    device = Device()
    ours = Runner(model, pool, BLOCK_SIZE, gpu=device)
    asked = []

    def goes_on(layer: int) -> bool:
        asked.append((layer, len(device.waited)))
        return layer < 5

    found, chosen = ours.step_part(Row([1] * 18, 0, [0, 1]), range(6), None, None, goes_on)
    assert isinstance(found, Between) and found.layer == 5 and not chosen
    assert asked == [(half // 2, max(0, half + 1 - QUEUED)) for half in range(11)]
    assert device.waited == sorted(device.waited)
    found, _ = ours.step_part(Row([1] * 18, 0, [0, 1]), range(5, 6), found, None, lambda layer: True)
    assert found is None
    whole = runner(tiny(layers=6))
    whole.step([Row([1] * 18, 0, [0, 1])])
    assert torch.equal(whole.kv_pool.nan_to_num(7), pool.nan_to_num(7))


def test_an_error_in_the_hook_reaches_the_caller():
    ours = runner(tiny())

    def on_layer(index: int) -> None:
        raise RuntimeError(f"push of layer {index} failed")

    with pytest.raises(RuntimeError, match="push of layer 0 failed"):
        ours.step([greedy_row([1], 0, [0])], on_layer)
    assert ours.step([greedy_row([1], 0, [0])])[0]


def test_a_step_that_ended_between_two_layers_is_computed_again_as_if_nothing_had_been():
    """Other rows were computed in between, and the second time it has other chunks."""
    prompt, other, blocks = list(range(100, 140)), list(range(50, 60)), [3, 4, 5]
    whole = runner(tiny())
    (want,) = whole.step([greedy_row(prompt, 0, blocks)])
    one = runner(tiny())
    assert one.can_begin_again

    def end(layer: int) -> None:
        if layer == one.model.config.num_layers - 1:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        one.step([greedy_row(prompt, 0, blocks)], before_layer=end)
    one.step([greedy_row(other, 0, [7])])
    one.step([Row(prompt[:BLOCK_SIZE], 0, blocks)])
    (got,) = one.step([greedy_row(prompt[BLOCK_SIZE:], BLOCK_SIZE, blocks)])
    assert got[0].token_id == want[0].token_id
    torch.testing.assert_close(one.kv_pool[blocks[:2]], whole.kv_pool[blocks[:2]])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alone", False),
        ("experts", object()),
        ("draft", object()),
        ("offload", object()),
        ("groups", Mock(num_states=2)),
    ],
)
def test_ranks_and_states_cannot_compute_a_step_again(monkeypatch, name, value):
    """Nor can streamed weights, whose next layers are on their way, and a device that computes later does not try."""
    one = runner(tiny())
    monkeypatch.setattr(one.model, name, value)
    assert not one.can_begin_again
    if name == "groups":
        value.num_states = 0
        assert one.can_begin_again, "windows alone"


def test_step_time_says_what_the_step_did():
    ours = runner(tiny())
    assert ours.last is None
    ours.step([greedy_row([1] * 30, 0, [0, 1])])
    ours.step([greedy_row([1], 30, [0, 1]), Row([1] * 5, 0, [2]), Row([1] * 4, 30, [0, 1, 3]), Row([7], 0, [4])])
    last = ours.last
    assert last.seconds > 0
    assert (last.num_decodes, last.decode_context) == (2, 31 + 1)
    assert (last.prefill_tokens, last.prefill_pairs) == (9, 5 * 5 + 4 * (4 + 60))


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("alone", False, "--tensor-parallel-size"),
        ("groups", "windows", "--kv-groups windows"),
        ("experts", "ranks", "--expert-parallel-size"),
    ],
)
def test_ranks_and_groups_of_layers_compute_all_layers_of_a_prompt(monkeypatch, name, value, flag):
    one = runner(tiny())
    assert one.why_whole is None
    monkeypatch.setattr(one.model, name, value)
    assert flag in (one.why_whole or "")


def test_a_node_whose_blocks_differ_computes_whole_prompts():
    one = runner(tiny())
    one.unlike = True
    for each in (one, one.with_model(one.model)):
        assert "the blocks of this node differ" in (each.why_whole or "")


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
