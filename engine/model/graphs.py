"""CUDA graphs: a small step needs one launch instead of about ten per layer.

A graph replays recorded kernels on recorded addresses. A step is therefore copied into static tensors of one of a few
shapes, its *bucket*, and padded with rows that have no effect:

    decodes      0 .. d of the step, then padding: slot -1 (nothing is written), ctx_len 0 (no key is read)
    chunks       the step's prefill requests, then requests without rows
    chunk rows   the step's, then rows that belong to no request: slot -1

A step that verifies drafts (engine/speculation) has a few rows per request and needs the logits of all of them. Its
buckets have chunks only: a request without a draft is a chunk of one row there.

Results are the same as without graphs: rows are independent of each other, and the logits of padding rows are not
read. The Triton backend divides its work on the device, so one recording serves all lengths. A step that fits no bucket
(a long prompt, the logits of many rows), or one with callbacks for its layers, runs without a graph.

All buckets are recorded once, at the start, largest first and in one memory pool: smaller buckets reuse the memory of
the largest one's activations. They also share the rows of logits, which would otherwise take a gigabyte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention.interface import RaggedBatch
from engine.model.decoder import Model, Scores
from engine.model.parallel import Alone

MIXED_DECODES = (0, 8, 32, 128)
MIXED_ROWS = (16, 64, 256)
"""Small mixed steps: above about 256 rows, the products are long enough to hide the launches."""

MIXED_CHUNKS = 4

VERIFIED_ROWS = 256
"""The largest step that verifies drafts: its products are long enough, and each of its rows has logits."""

WARM_UPS = 2
"""Runs before the recording: they compile kernels and let cuBLAS allocate its workspace."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a recorded step."""

    decodes: int
    chunks: int = 0  # prefill requests
    chunk_rows: int = 0  # of all chunks together
    longest: int = 0  # rows of one chunk in a step that verifies drafts; 0 = any other step

    @property
    def num_requests(self) -> int:
        return self.decodes + self.chunks

    @property
    def num_rows(self) -> int:
        return self.decodes + self.chunk_rows

    @property
    def num_logits(self) -> int:
        """One row per request, or every row if drafts are verified."""
        return self.num_rows if self.longest else self.num_requests

    def holds(self, batch: RaggedBatch, num_wanted: int) -> bool:
        """Whether `batch` fits, with at most `num_logits` rows of logits."""
        if self.longest:
            fits = batch.num_requests <= self.chunks and max(batch.q_lens) <= self.longest
            return fits and batch.num_requests < num_wanted <= self.num_logits
        chunks = batch.num_requests - batch.num_decodes
        rows = sum(batch.q_lens) - batch.num_decodes
        fits = batch.num_decodes <= self.decodes and chunks <= self.chunks and rows <= self.chunk_rows
        return fits and num_wanted <= self.num_requests


def decode_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 8 up to 64, of 16 up to 256, of 64 above; always includes `most`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max(most, 256) + 1, 64)]
    return [*(size for size in sizes if size < most), most]


def buckets(max_num_seqs: int, max_drafts: int = 0) -> list[Bucket]:
    """Buckets for steps of at most `max_num_seqs` requests, cheapest first; some verify up to `max_drafts` tokens per
    request."""
    decodes = [Bucket(size) for size in decode_sizes(max_num_seqs)]
    counts = sorted({min(count, max_num_seqs) for count in MIXED_DECODES})
    mixed = [Bucket(count, MIXED_CHUNKS, rows) for count in counts for rows in MIXED_ROWS]
    each = max_drafts + 1
    verified = [Bucket(0, size, size * each, each) for size in decode_sizes(max_num_seqs) if max_drafts]
    verified = [bucket for bucket in verified if bucket.num_rows <= VERIFIED_ROWS]
    return decodes + sorted([*verified, *mixed], key=lambda bucket: bucket.num_rows)


class StaticStep:
    """The tensors that a bucket's graph reads; `load` copies a step into them. Works on any device."""

    def __init__(self, bucket: Bucket, max_blocks: int, block_size: int, device: torch.device) -> None:
        requests, rows = bucket.num_requests, bucket.num_rows
        self.bucket = bucket
        self.token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.rows = torch.zeros(bucket.num_logits, dtype=torch.int64, device=device)
        self.batch = RaggedBatch(
            cu_q=torch.zeros(requests + 1, dtype=torch.int32, device=device),
            ctx_lens=torch.zeros(requests, dtype=torch.int32, device=device),
            block_tables=torch.zeros(requests, max_blocks, dtype=torch.int32, device=device),
            slot_mapping=torch.full((rows,), -1, dtype=torch.int64, device=device),
            positions=torch.zeros(rows, dtype=torch.int64, device=device),
            num_decodes=bucket.decodes,
            block_size=block_size,
            # Of the recording: a backend chooses the kernel of chunks by the longest one.
            q_lens=[1] * bucket.decodes + [bucket.longest] * bucket.chunks,
            kv_lens=[0] * bucket.decodes + [bucket.longest] * bucket.chunks,
            recorded=True,
        )
        # Each decode has one row, also a padding one; this part of cu_q never changes.
        decodes = bucket.decodes
        self.batch.cu_q[: decodes + 1] = torch.arange(decodes + 1, dtype=torch.int32, device=device)
        self.batch.cu_q[decodes + 1 :] = decodes

    def load(self, token_ids: Tensor, batch: RaggedBatch, rows: Tensor) -> None:
        """Copy a step, which must fit `bucket`. Only queues copies: nothing waits for the device.

        All rows after the copied part are padding or become padding again: only the slot, the context length and the
        number of rows of a padding row have an effect."""
        mine, decodes = self.batch, min(batch.num_decodes, self.bucket.decodes)
        shift = self.bucket.decodes - decodes
        num_rows, requests = len(token_ids), batch.num_requests
        mine.slot_mapping.fill_(-1)
        mine.ctx_lens.zero_()
        self._copy(self.token_ids, token_ids, decodes, shift)
        self._copy(mine.positions, batch.positions, decodes, shift)
        self._copy(mine.slot_mapping, batch.slot_mapping, decodes, shift)
        self._copy(mine.ctx_lens, batch.ctx_lens, decodes, shift)
        width = batch.block_tables.shape[1]
        self._copy(mine.block_tables[:, :width], batch.block_tables, decodes, shift)
        mine.q_lens = self._padded(batch.q_lens, decodes, padding_decode=1)
        mine.kv_lens = self._padded(batch.kv_lens, decodes, padding_decode=0)
        if not self.bucket.chunks:
            self.rows[: len(rows)].copy_(rows)
            return
        # Rows of chunks begin `shift` later than in the step; requests without rows end with the last request.
        first, end = self.bucket.decodes + 1, self.bucket.decodes + 1 + requests - decodes
        torch.add(batch.cu_q[decodes + 1 :], shift, out=mine.cu_q[first:end])
        mine.cu_q[end:].fill_(num_rows + shift)
        torch.add(rows, rows.ge(decodes), alpha=shift, out=self.rows[: len(rows)])

    def _copy(self, target: Tensor, source: Tensor, decodes: int, shift: int) -> None:
        target[:decodes].copy_(source[:decodes], non_blocking=True)
        if len(source) > decodes:
            target[decodes + shift : len(source) + shift].copy_(source[decodes:], non_blocking=True)

    def _padded(self, lens: Sequence[int], decodes: int, padding_decode: int) -> list[int]:
        """The host's lengths in the order of the tensors."""
        padding = [padding_decode] * (self.bucket.decodes - decodes)
        return [
            *lens[:decodes],
            *padding,
            *lens[decodes:],
            *[0] * (self.bucket.num_requests - len(lens) - len(padding)),
        ]


@dataclass(slots=True)
class Recorded:
    """A bucket's graph with its inputs and outputs."""

    step: StaticStep
    replay: Callable[[], None]
    logits: Tensor  # [num_logits of the bucket, vocab_size] float32, in memory that all buckets share


Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""Records a function's work on tensors at fixed addresses; returns a function that repeats it."""


class CudaRecorder:
    """CUDA graphs in one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        replay: Callable[[], None] = graph.replay
        return replay


def obstacle(model: Model) -> str | None:
    """Why steps of `model` cannot be recorded; None if they can."""
    if model.device.type != "cuda" or model.backend.name != "triton":
        return "CUDA graphs need --device cuda and --attention-backend triton"
    if model.config.num_experts:
        return "CUDA graphs are for dense models: experts are counted on the host"
    if model.groups is not None:
        return "CUDA graphs are for one block table: this model's layers are in groups (--kv-groups)"
    if model.draft is not None:
        return "CUDA graphs are for models without a layer that drafts (--speculative-method mtp or eagle)"
    if not isinstance(model.ranks, Alone):
        return "CUDA graphs are for one GPU: recording the ranks' collectives is untried"
    return None


class GraphedModel:
    """Model.forward for one KV pool; replays a graph if one fits. For models without an `obstacle`."""

    def __init__(
        self,
        model: Model,
        kv_pool: Tensor,
        block_size: int,
        record: Recorder,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_drafts: int = 0,
    ) -> None:
        """Records every bucket; nothing else may use the GPU meanwhile. max_drafts: tokens that a step verifies per
        request."""
        self.model, self.kv_pool = model, kv_pool
        self._max_blocks = -(-max_model_len // (16 * block_size)) * 16
        self._block_size = block_size
        self._recorder = record
        ordered = buckets(max_num_seqs, max_drafts)
        most = max(bucket.num_logits for bucket in ordered)
        self._logits = torch.empty(most, model.config.vocab_size, dtype=torch.float32, device=kv_pool.device)
        recorded = {bucket: self._record(bucket) for bucket in sorted(ordered, key=lambda bucket: -bucket.num_rows)}
        self.recorded = [recorded[bucket] for bucket in ordered]

    def forward(
        self,
        token_ids: Tensor,
        batch: RaggedBatch,
        kv_pool: Tensor,
        rows: Tensor,
        on_layer: Callable[[int], None] | None = None,
        before_layer: Callable[[int], None] | None = None,
        scores: Scores | None = None,
    ) -> Tensor:
        """See Model.forward. The logits of a replayed step are valid until the next call."""
        plain = on_layer is None and before_layer is None and scores is None
        recorded = self.find(batch, len(rows)) if plain else None
        if recorded is None:
            return self.model.forward(token_ids, batch, kv_pool, rows, on_layer, before_layer, scores)
        if kv_pool.data_ptr() != self.kv_pool.data_ptr():
            raise ValueError("the graphs were recorded over another KV pool")
        recorded.step.load(token_ids, batch, rows)
        recorded.replay()
        return recorded.logits[: len(rows)]

    def find(self, batch: RaggedBatch, num_wanted: int) -> Recorded | None:
        """The cheapest recording that the step fits."""
        if batch.block_tables.shape[1] > self._max_blocks:
            return None
        return next((one for one in self.recorded if one.step.bucket.holds(batch, num_wanted)), None)

    def _record(self, bucket: Bucket) -> Recorded:
        step = StaticStep(bucket, self._max_blocks, self._block_size, self.kv_pool.device)
        logits = self._logits[: bucket.num_logits]

        def run() -> None:
            logits.copy_(self.model.forward(step.token_ids, step.batch, self.kv_pool, step.rows))

        return Recorded(step, self._recorder(run), logits)
