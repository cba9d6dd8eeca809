"""Runs one step: takes rows of tokens and returns sampled tokens. Ragged batch -> tensors -> model -> sampler.

The call blocks; it is meant for the node's one executor thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attention.declared import by_address
from attention.interface import RaggedBatch
from cache.block import PLANES
from engine.model.decoder import Between, Model
from engine.model.experts.losses import Loss
from engine.model.gpu import Event, Gpu, gpu_of
from engine.model.graphs import GraphedModel, Recorder
from engine.sampling.logit_rules import Masks, SamplingRow
from engine.sampling.logprobs import PromptRows, PromptScorer
from engine.sampling.sampler import Sampled, sample
from engine.step.cold import Cold, Lodged
from engine.step.inputs import InputBuilder, Inputs, Row
from engine.step.layer_reports import LayerReports
from engine.step.one_space import OneSpace
from engine.step.split_attention import SplitAttention

__all__ = ["Row", "Runner", "StepTime"]

QUEUED = 4
"""Halves of layers (attention, and the rest) of a part of a long prompt that a device has yet to compute when the host
queues the next one: the device always has work, and the part ends at most as many halves later than wanted."""


@dataclass(slots=True)
class StepTime:
    """The duration of a step and its work, in the terms of the cost models (sched/cost.py)."""

    seconds: float
    num_decodes: int
    decode_context: int  # sum of the decodes' KV lengths, tokens
    prefill_tokens: int
    prefill_pairs: int  # sum of n (n + 2 past) over the chunks: twice the (query, key) pairs attended


class Runner:
    """Runs the model over a KV pool [num_blocks, *BlockGeometry.shape] (cache/block.py)."""

    def __init__(
        self,
        model: Model,
        kv_pool: Tensor,
        block_size: int,
        device: str = "cpu",
        gpu: Gpu | None = None,
        masks: Masks | None = None,
        around_forward: Callable[[Sequence[Row]], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """gpu: the device that holds the pool; by default the one of `device`. masks: of requests with a grammar.
        around_forward: makes a context entered around each forward pass with its rows, so that other ranks compute the
        same pass (RankProcesses.step)."""
        config = model.config
        layers = config.kv_layers if model.groups is None else model.groups.layers
        shape = (layers, PLANES[config.kv_kind], config.num_kv_heads, block_size, config.head_size)
        if kv_pool.dim() != 6 or tuple(kv_pool.shape[1:]) != shape:
            raise ValueError(f"the KV pool must be [num_blocks, {', '.join(map(str, shape))}], is {[*kv_pool.shape]}")
        self.model, self.kv_pool, self.block_size, self.device = model, kv_pool, block_size, torch.device(device)
        self.last: StepTime | None = None
        self.losses: dict[int, Loss] = {}  # of the last step's rows whose experts were lost
        self.ahead: dict[int, Tensor] = {}
        """Of the last step's rows that sampled, with a layer that drafts: its outputs at their last num_samples tokens
        [num_samples, H]. Those of tokens behind a wrong draft mean nothing."""
        self._forward: Callable[..., Tensor] = model.forward
        self._gpu = gpu or gpu_of(self.device)
        self._inputs = InputBuilder(block_size, self.device, self._gpu, model.groups)
        self._reports = LayerReports(self._gpu, kv_pool) if self._gpu.asynchronous else None
        self._masks = masks
        self._by_address = by_address(model.backend)
        self._space: tuple[Tensor, OneSpace | None] | None = None  # of the DRAM tier whose memory is the first
        self._around_forward = around_forward
        self.unlike = False  # whether its blocks differ from the cluster's, by which nodes of a group exchange KV

    @property
    def why_whole(self) -> str | None:
        """Why it computes whole prompts alone; None if it can be a part of a group. Nodes gossip it
        (sched/gossip/load_word.py), so acceptors form groups of nodes that can."""
        if self.unlike:
            return "the blocks of this node differ from the cluster's, so it computes all of a prompt"
        if not self.model.alone:
            return "the ranks of --tensor-parallel-size compute all layers of a prompt"
        if self.model.groups is not None:
            return "with --kv-groups windows, or with states, one node computes all layers of a prompt"
        if self.model.draft is not None:
            return "with --speculative-method mtp or eagle one node computes all layers of a prompt"
        if self.model.experts is not None:  # a lost expert would have to be told to the other nodes
            return "the ranks of --expert-parallel-size compute all layers of a prompt"
        if self.model.offload is not None:
            return "with --offload auto, a pass reads the weights of all layers"
        return None

    @property
    def can_begin_again(self) -> bool:
        """Whether `before_layer` may raise, and a later step compute the same tokens: not where states have moved on,
        other ranks compute the same pass, or weights of later layers are on their way. On a device that computes later,
        all layers are queued before anybody comes."""
        model = self.model
        states = 0 if model.groups is None else model.groups.num_states
        plain = model.experts is None and model.draft is None and model.offload is None
        return plain and not states and model.alone and not self._gpu.asynchronous

    def with_model(self, model: Model) -> Runner:
        """A runner of another model of the same shape over the same pool, on one rank and without recordings."""
        other = Runner(model, self.kv_pool, self.block_size, str(self.device), self._gpu, self._masks)
        other.unlike = self.unlike
        return other

    def record(self, recorder: Recorder, max_num_seqs: int, max_model_len: int, max_drafts: int = 0) -> None:
        """Record small steps now and replay the recordings from now on (engine/model/graphs.py). No other code may use
        the device during the call. Only for models without an `obstacle`. max_drafts: tokens that a step verifies per
        request."""
        sizes = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "max_drafts": max_drafts}
        self._forward = GraphedModel(self.model, self.kv_pool, self.block_size, recorder, **sizes).forward

    def follow(self, rows: Sequence[Row]) -> None:
        """Compute the same pass as rank 0, on another rank. Only rank 0 samples tokens."""
        inputs = self._inputs.build(rows)
        self._forward(
            inputs.token_ids,
            inputs.batch,
            self.kv_pool,
            inputs.last_rows,
            scores=self._scores(PromptRows, rows, inputs),
            **_of_groups(inputs),
        )

    def step(
        self,
        rows: Sequence[Row],
        on_layer: Callable[[int], None] | None = None,
        before_layer: Callable[[int], None] | None = None,
    ) -> list[list[Sampled]]:
        """Compute every row's KV and sample its tokens. Returns a list per row, in the order of `rows`: row.num_samples
        tokens, or none without row.sample. Log probabilities of prompts go to row.scores. A layer that drafts computes
        the same rows when the tokens after them are known.

        on_layer(l), before_layer(l): see Model.forward. Raises ValueError for a row without tokens or with too few
        blocks.
        """
        if not rows:
            return []
        began = time.perf_counter()
        inputs = self._inputs.build(rows)
        wanted = [(i, sampling) for i in inputs.order for sampling in _sampling_rows(rows[i])]
        hidden: list[Tensor] = []
        drafts: dict[str, Any] = {} if self.model.draft is None else {"on_hidden": hidden.append}
        if self._reports is not None and on_layer is not None:
            on_layer = self._reports.behind(on_layer)
        try:
            with self._around_forward(rows):
                logits = self._forward(
                    inputs.token_ids,
                    inputs.batch,
                    self.kv_pool,
                    inputs.last_rows,
                    on_layer,
                    before_layer,
                    self._scores(PromptScorer, rows, inputs),
                    **_of_groups(inputs),
                    **drafts,
                )
            if self.model.experts is not None:
                self.losses = self.model.experts.take_losses().by_row(inputs.order, inputs.batch.q_lens)
            chosen = sample(logits, [sampling for _, sampling in wanted], self._masks)
            results: list[list[Sampled]] = [[] for _ in rows]
            for (i, _), token in zip(wanted, chosen, strict=True):
                results[i].append(token)
            if hidden:
                self._look_ahead(rows, inputs, results, hidden[0], on_layer, before_layer)
            if not wanted or hidden:
                # No code has waited for the device yet. When a step returns, its KV must be in the pool, because it is
                # pushed and published from there.
                self._gpu.settle(self.kv_pool)
            if self._reports is not None:
                self._reports.finish()
        except BaseException:
            self._gpu.settle(self.kv_pool)  # its blocks are reused now: queued work must not write to them
            raise
        self.last = _step_time(inputs.batch, time.perf_counter() - began)
        return results

    def _look_ahead(
        self,
        rows: Sequence[Row],
        inputs: Inputs,
        results: Sequence[Sequence[Sampled]],
        hidden: Tensor,
        on_layer: Callable[[int], None] | None,
        before_layer: Callable[[int], None] | None,
    ) -> None:
        """The layer that drafts, for a step whose tokens are chosen. hidden [T, H]: the model's output."""
        layer, following = self.model.config.kv_layers - 1, list[int]()
        for i in inputs.order:
            after = [token.token_id for token in results[i]] or [rows[i].next_token]
            following += [*rows[i].token_ids[1 : len(rows[i].token_ids) - len(after) + 1], *after]
        if before_layer is not None:
            before_layer(layer)
        tokens = torch.tensor(following, device=self.device)
        found = self.model.forward_draft(tokens, hidden, inputs.batch, self.kv_pool)
        if on_layer is not None:
            on_layer(layer)
        sampled = [i for i in inputs.order if results[i]]
        parts = found[inputs.last_rows].split([len(results[i]) for i in sampled])
        self.ahead = dict(zip(sampled, parts, strict=True))

    def guess(self, ahead: Tensor, sampling: Sequence[SamplingRow]) -> list[Sampled]:
        """A draft token for each row of `ahead` [R, H]: outputs of the layer that drafts."""
        return sample(self.model.draft_logits(ahead), sampling, None)

    def guess_on(self, rows: Sequence[Row], ahead: Tensor) -> Tensor:
        """The outputs [R, H] of the layer that drafts, behind one draft token of each row. ahead [R, H]: those from
        which the tokens were chosen. row.start: the token's position, less one."""
        inputs = self._inputs.build(rows)
        return self.model.forward_draft(inputs.token_ids, ahead, inputs.batch, self.kv_pool)

    def step_part(
        self,
        row: Row,
        layers: range,
        entering: Tensor | Between | None,
        on_layer: Callable[[int], None] | None,
        goes_on: Callable[[int], bool] | None = None,
    ) -> tuple[Tensor | Between | None, list[Sampled]]:
        """Compute some layers of one row (Model.forward_part), as a part of a long prompt. entering: [T, H], the output
        of the stage before; None = of the tokens; or what a step that ended between two layers returned. Returns the
        hidden states [T, H] for the next stage, on the CPU, or None behind the last layer, or a Between; and the
        sampled token of a row with `sample`."""
        inputs, model = self._inputs.build([row]), self.model
        if self._reports is not None and on_layer is not None:
            on_layer = self._reports.behind(on_layer)
        if self._gpu.asynchronous and goes_on is not None:
            goes_on = self._in_time(goes_on)
        try:
            if entering is None:
                entering = model.embed(inputs.token_ids)
            elif isinstance(entering, Tensor):
                entering = entering.to(self.device)
            found = model.forward_part(
                layers, entering, inputs.batch, self.kv_pool, inputs.last_rows, on_layer, goes_on
            )
            passed: Tensor | Between | None = None
            chosen: Sequence[Sampled] = ()
            if isinstance(found, Between):
                passed = found
            elif layers.stop == model.config.num_layers:
                chosen = sample(found, _sampling_rows(row), self._masks)
            else:
                passed = found.cpu()
            if not chosen:
                self._gpu.settle(self.kv_pool)  # as in `step`
            if self._reports is not None:
                self._reports.finish()
        except BaseException:
            self._gpu.settle(self.kv_pool)
            raise
        return passed, list(chosen)

    def _in_time(self, goes_on: Callable[[int], bool]) -> Callable[[int], bool]:
        """Ask when the device has computed all halves of layers before but the last QUEUED. The host queues them much
        faster than the device computes them, and would otherwise ask about the last one at the begin."""
        queued: deque[Event] = deque()

        def asked(layer: int) -> bool:
            queued.append(self._gpu.mark(self.kv_pool))
            if len(queued) > QUEUED:
                queued.popleft().synchronize()
            return goes_on(layer)

        return asked

    def step_beyond(self, row: Row, cold: Cold, layers: range) -> list[Sampled]:
        """Compute some layers of a row whose earlier KV lies in a tier (engine/step/cold.py): its oldest blocks in the
        arena move there if its tokens need their room. Every layer attends to the tier's blocks where they lie
        (OneSpace), or as they come through the window. Behind the last layer it returns the sampled token of a row with
        `sample`; otherwise the next step goes on with `cold.hidden`. Only on a CPU and on one rank."""
        model, began = self.model, time.perf_counter()
        before = cold.make_room(row.start, len(row.token_ids))
        wanted = _sampling_rows(row)
        assert cold.lodged is not None
        space = self._space_with(cold.lodged, cold.slots)
        ends = layers.stop == model.config.num_layers
        left, goes_on = range(layers.start, model.config.num_layers), layers.__contains__
        entering: Between | None = cold.hidden
        if space is not None:
            inputs = self._inputs.build([replace(row, block_ids=space.ids(cold.slots, cold.hot))])
            if ends and entering is None:
                found: Tensor | Between = model.forward(inputs.token_ids, inputs.batch, space.pool, inputs.last_rows)
            else:
                x: Tensor | Between = model.embed(inputs.token_ids) if entering is None else entering
                found = model.forward_part(left, x, inputs.batch, space.pool, inputs.last_rows, goes_on=goes_on)
        else:
            inputs = self._inputs.build([replace(row, start=row.start - before, block_ids=cold.hot)])
            batch = replace(inputs.batch, positions=inputs.batch.positions + before)
            with cold.lodged.read(cold.slots, cold.window, layers) as pieces:
                attend = SplitAttention(model.backend, self.kv_pool, batch, pieces)
                # A copy: after PartLate these layers are passed again.
                x = model.embed(inputs.token_ids) if entering is None else entering.copy()
                found = model.forward_part(
                    left, x, batch, self.kv_pool, inputs.last_rows, goes_on=goes_on, attend=attend
                )
        chosen = list(sample(found, wanted, self._masks)) if isinstance(found, Tensor) else []
        seconds = time.perf_counter() - began
        cold.computed(len(row.token_ids), layers, seconds, None if ends else found)
        return chosen

    def _space_with(self, lodged: Lodged, slots: Sequence[int]) -> OneSpace | None:
        """The arena and the DRAM tier as one pool, if all of these slots lie there and the kernels find them."""
        near = lodged.near_of(slots) if self._by_address else None
        if near is None:
            return None
        if self._space is None or self._space[0] is not near:
            try:
                self._space = near, OneSpace(self.kv_pool, near)
            except ValueError:
                self._space = near, None
        return self._space[1]

    def _scores(self, kind: type[PromptRows], rows: Sequence[Row], inputs: Inputs) -> PromptRows | None:
        """None if no row needs log probabilities of its prompt."""
        asked = [row.scores for row in rows]
        if not any(asked):
            return None
        return kind(asked, inputs.order, inputs.batch.q_lens, self.device)


def _of_groups(inputs: Inputs) -> dict[str, Any]:
    """Arguments of Model.forward, which recordings do not take."""
    of_states = {} if inputs.states is None else {"states": inputs.states}
    return of_states | ({"others": inputs.others} if inputs.others else {})


def _sampling_rows(row: Row) -> Sequence[SamplingRow]:
    """One sampling row per needed row of logits: the j-th follows j tokens of the draft."""
    if row.sample is None:
        return ()
    if row.num_samples == 1:
        return (row.sample,)
    own, draft = row.sample, row.token_ids[len(row.token_ids) - row.num_samples + 1 :]
    judged = [*zip(draft, row.proposals, strict=True), None] if row.proposals else [None] * row.num_samples
    return [replace(own, draft=draft[:j], proposal=judged[j]) for j in range(row.num_samples)]


def _step_time(batch: RaggedBatch, seconds: float) -> StepTime:
    decodes = batch.num_decodes
    chunks = list(zip(batch.q_lens[decodes:], batch.kv_lens[decodes:], strict=True))
    return StepTime(
        seconds=seconds,
        num_decodes=decodes,
        decode_context=sum(batch.kv_lens[:decodes]),
        prefill_tokens=sum(n for n, _ in chunks),
        prefill_pairs=sum(n * (2 * kv_len - n) for n, kv_len in chunks),
    )
