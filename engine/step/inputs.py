"""Converts a step's rows to the model's tensors: numpy fills one host buffer, and one copy moves it to the device.

The buffer grows as needed; for a GPU it is pinned, so that the copy is asynchronous. A request's block ids come as an
int32 array that grows with the request (Request.block_table), so a decode step copies them instead of walking a list.
On the CPU the tensors are the buffer itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from attention.interface import RaggedBatch
from attention.states import StateBatch
from cache.layer_groups import GONE, LayerGroups
from engine.model.gpu import Event, Gpu, gpu_of
from engine.sampling.logit_rules import SamplingRow
from engine.sampling.logprobs import PromptScores

TABLE_ALIGN = 16
"""Block tables are padded to a multiple of this many entries, so that kernels may load them in vectors."""


@dataclass(slots=True)
class Row:
    """One request's part of a step.

    With `sample`, the tokens that follow each of the last `num_samples` of token_ids are chosen. More than one is
    speculation: the last num_samples - 1 of token_ids are then a draft, not part of sample.token_ids.
    """

    token_ids: Sequence[int]  # computed in this step, at positions start, start + 1, ...
    start: int  # number of tokens of this request whose KV is already in its blocks
    block_ids: Sequence[int] | np.ndarray  # of the request, in order; enough for start + len(token_ids) tokens
    sample: SamplingRow | None = None
    num_samples: int = 1
    proposals: Sequence[Tensor] = ()  # [V] each: distributions of the draft's tokens; empty = compare tokens
    scores: PromptScores | None = None
    others: Sequence[Sequence[int]] = ()  # of the other groups (cache/layer_groups.py); empty: as block_ids
    next_token: int = 0  # after token_ids, without `sample`; only a layer that drafts reads it

    @property
    def num_wanted(self) -> int:
        """Number of rows of logits that this request needs."""
        return 0 if self.sample is None else self.num_samples


@dataclass(slots=True)
class Inputs:
    """A step's tensors on the device, decodes first."""

    token_ids: Tensor  # [T] int64
    batch: RaggedBatch
    last_rows: Tensor  # [R] int64: the rows of q whose logits are needed, grouped by request
    order: list[int]  # request s of the batch is rows[order[s]]
    others: Sequence[RaggedBatch] = ()  # of the other groups: the same rows in other blocks
    states: StateBatch | None = None  # of the groups of states, if there are any


class InputBuilder:
    """Builds the inputs of each step. They are valid until the next `build`."""

    def __init__(
        self, block_size: int, device: torch.device, gpu: Gpu | None = None, groups: LayerGroups | None = None
    ) -> None:
        """gpu: copies to the device; by default the one of `device`. groups: of the model's layers; None = one."""
        self._num_others = 0 if groups is None else groups.first_state - 1  # without states
        self._num_states = 0 if groups is None else groups.num_states
        self._block_size = block_size
        self._gpu = gpu or gpu_of(device)
        self._device = torch.empty(0, dtype=torch.int64, device=device)  # any tensor there
        self._host = torch.empty(0, dtype=torch.int64)
        self._copied: Event | None = None

    def build(self, rows: Sequence[Row]) -> Inputs:
        """The inputs of `rows`: one-token rows first, otherwise in the given order. Raises ValueError for a row that
        cannot run."""
        order, q_lens, starts, wanted = _shape(rows)
        kv_lens = starts + q_lens
        num_blocks = -(-kv_lens // self._block_size)
        _check(rows, order, q_lens, num_blocks, wanted)
        num_requests, num_tokens, num_wanted = len(order), int(q_lens.sum()), int(wanted.sum())
        width = -(-int(num_blocks.max()) // TABLE_ALIGN) * TABLE_ALIGN

        # The int64 part, then the int32 part, each cut into its arrays.
        sizes = (num_tokens, num_tokens, num_tokens, num_wanted)
        sizes32 = (num_requests + 1, num_requests, num_requests * width)
        num_int64 = sum(sizes)
        host = self._room(num_int64 + -(-sum(sizes32) // 2))
        buffer = host.numpy()
        token_ids, positions, slots = buffer[: 3 * num_tokens].reshape(3, num_tokens)
        last_rows = buffer[3 * num_tokens : num_int64]
        int32 = buffer[num_int64:].view(np.int32)
        cu_q, ctx_lens = int32[: num_requests + 1], int32[num_requests + 1 : 2 * num_requests + 1]
        tables = int32[2 * num_requests + 1 : sum(sizes32)].reshape(num_requests, width)

        cu_q[0] = 0
        np.cumsum(q_lens, out=cu_q[1:])
        ctx_lens[:] = kv_lens
        tables[:] = 0
        counts = num_blocks.tolist()
        for s, i in enumerate(order):
            tables[s, : counts[s]] = rows[i].block_ids[: counts[s]]
        token_ids[:] = np.fromiter(chain.from_iterable(rows[i].token_ids for i in order), np.int64, num_tokens)
        request = np.repeat(np.arange(num_requests), q_lens)
        np.add(np.arange(num_tokens), (starts - cu_q[:-1])[request], out=positions)
        block, offset = np.divmod(positions, self._block_size)
        np.add(np.multiply(tables[request, block], self._block_size, dtype=np.int64), offset, out=slots)
        # Request s wants the rows cu_q[s + 1] - wanted[s] .. cu_q[s + 1].
        last_rows[:] = np.arange(num_wanted) + np.repeat(cu_q[1:] - np.cumsum(wanted), wanted)

        moved = self._move(host)
        token_ids_t, positions_t, slots_t, last_rows_t = moved[:num_int64].split(sizes)
        cu_q_t, ctx_lens_t, tables_t = moved[num_int64:].view(torch.int32)[: sum(sizes32)].split(sizes32)
        batch = RaggedBatch(
            cu_q=cu_q_t,
            ctx_lens=ctx_lens_t,
            block_tables=tables_t.view(num_requests, width),
            slot_mapping=slots_t,
            positions=positions_t,
            num_decodes=int((q_lens == 1).sum()),
            block_size=self._block_size,
            q_lens=q_lens.tolist(),
            kv_lens=kv_lens.tolist(),
        )
        if not self._num_others and not self._num_states:
            return Inputs(token_ids_t, batch, last_rows_t, order)
        of_rows: list[Sequence[Sequence[int] | np.ndarray]] = [
            rows[i].others or [rows[i].block_ids] * (self._num_others + self._num_states) for i in order
        ]
        others = [
            self._other_batch(batch, [tables[group] for tables in of_rows], counts, request, positions)
            for group in range(self._num_others)
        ]
        states = self._state_batch(batch, of_rows, [rows[i] for i in order]) if self._num_states else None
        return Inputs(token_ids_t, batch, last_rows_t, order, others, states)

    def _state_batch(
        self, batch: RaggedBatch, of_rows: Sequence[Sequence[Sequence[int] | np.ndarray]], rows: Sequence[Row]
    ) -> StateBatch:
        """Where the step reads and writes states. A row without tables of its own for them measures time, and only its
        last state is written, to a block of its KV. A draft leaves no state: it may be wrong."""
        size, device = self._block_size, batch.block_tables.device
        read = np.zeros((len(of_rows), self._num_states), np.int64)
        decodes = np.zeros((batch.num_decodes, self._num_states), np.int64)
        fresh = np.zeros(len(of_rows), np.bool_)
        chunks, drafts = [], []
        for s, (tables, count, end) in enumerate(zip(of_rows, batch.q_lens, batch.kv_lens, strict=True)):
            of_states, start = tables[self._num_others :], end - count
            fresh[s] = start == 0
            if start:
                read[s] = [table[(start - 1) // size] for table in of_states]
            drafted = max(0, rows[s].num_wanted - 1)
            known = end - drafted
            last = (known - 1) // size
            if s < batch.num_decodes:
                decodes[s] = [table[last] for table in of_states]
                continue
            drafts.append(drafted)
            places = range(start // size if rows[s].others else last, last + 1)
            kept = [place for place in places if of_states[0][place] != GONE]
            chunks.append(
                [
                    (
                        min((place + 1) * size, known) - start,
                        torch.tensor([int(table[place]) for table in of_states], device=device),
                    )
                    for place in kept
                ]
            )
        of_all, begin, of_decodes = (torch.from_numpy(each).to(device) for each in (read, fresh, decodes))
        return StateBatch(of_all, begin, of_decodes, chunks, drafts)

    def _other_batch(
        self,
        batch: RaggedBatch,
        tables: Sequence[Sequence[int] | np.ndarray],
        counts: Sequence[int],
        request: np.ndarray,
        positions: np.ndarray,
    ) -> RaggedBatch:
        """`batch` with the blocks of another group. In place of blocks that were given back, which no row sees, stands
        block 0."""
        found = np.zeros(tuple(batch.block_tables.shape), np.int32)
        for s, table in enumerate(tables):
            found[s, : counts[s]] = table[: counts[s]]
        np.maximum(found, 0, out=found)
        block, offset = np.divmod(positions, self._block_size)
        slots = found[request, block].astype(np.int64) * self._block_size + offset
        device = batch.block_tables.device
        return replace(
            batch,
            block_tables=torch.from_numpy(found).to(device),
            slot_mapping=torch.from_numpy(slots).to(device),
        )

    def _room(self, count: int) -> Tensor:
        """The first `count` int64 of the host buffer, after the previous step's copy has finished."""
        if self._copied is not None:
            self._copied.synchronize()
        if len(self._host) < count:
            self._host = self._gpu.buffer(2 * count, self._device)
        return self._host[:count]

    def _move(self, host: Tensor) -> Tensor:
        moved = self._gpu.move(host, self._device)
        self._copied = self._gpu.mark(self._device)
        return moved


def _shape(rows: Sequence[Row]) -> tuple[list[int], np.ndarray, np.ndarray, np.ndarray]:
    """(order of the batch, and in this order per request: new tokens, tokens before them, needed rows of logits)."""
    facts = np.array([(len(row.token_ids), row.start, row.num_wanted) for row in rows], dtype=np.int64)
    order = np.argsort(facts[:, 0] != 1, kind="stable")
    q_lens, starts, wanted = np.ascontiguousarray(facts[order].T)
    return order.tolist(), q_lens, starts, wanted


def _check(
    rows: Sequence[Row], order: list[int], q_lens: np.ndarray, num_blocks: np.ndarray, wanted: np.ndarray
) -> None:
    have = np.array([len(rows[i].block_ids) for i in order])
    if (q_lens == 0).any():
        raise ValueError(f"row {order[int(np.argmin(q_lens))]} of the step has no tokens")
    if (short := have < num_blocks).any():
        s = int(np.argmax(short))
        raise ValueError(f"row {order[s]} of the step needs {num_blocks[s]} blocks, has {have[s]}")
    if (wanted > q_lens).any():
        s = int(np.argmax(wanted > q_lens))
        raise ValueError(f"row {order[s]} of the step requests {wanted[s]} tokens after {q_lens[s]}")
