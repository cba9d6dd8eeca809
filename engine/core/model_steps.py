"""ModelSteps: computes a step in the engine thread.

The model runs once for each of the weights that the step's requests use: once, except while requests finish on weights
that have been replaced (engine/core/held_weights.py). A part of a long prompt (engine/prefill_group/) runs by itself,
because its rows pass other layers than those of the other requests, or wait for KV of other nodes in every layer; so
does a request whose KV exceeds the arena (engine/step/cold.py), because it reads the rest of it layer by layer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

from cache.ssd import SsdError
from engine.core.held_weights import HeldWeights
from engine.core.kv_transfer import KvTransfer
from engine.core.layered_load import Arriving, LayerGate
from engine.model.decoder import Between
from engine.model.experts.losses import Loss
from engine.model.layers_cpu import Stop, Stopped
from engine.sampling.sampler import Sampled
from engine.speculation.draft import DraftModel
from engine.speculation.layer_drafts import LayerDrafts
from engine.step.cold import PartLate
from engine.step.exchange import Exchange, ExchangeEnded
from engine.step.hidden import HiddenQueue
from engine.step.layer_blocks import read_layer, write_layer
from engine.step.part import Part, Stage, Stripes
from engine.step.request import Request
from engine.step.rows import row_of
from engine.step.runner import Runner
from engine.step.step import ScheduledRow, Step
from sched.part_turns import SLICE_S

if TYPE_CHECKING:
    from torch import Tensor

Transfers = Sequence[tuple[KvTransfer, Sequence[int], int, int, Sequence[Sequence[int]]]]
Gates = Mapping[str, LayerGate]
Inputs = dict[str, HiddenQueue | Exchange]
"""What parts of long prompts get from other nodes, by request id."""


class ModelSteps:
    """`transfers`: of requests whose KV leaves while it is computed, by request id; `arriving`: prefixes that arrive
    during the step."""

    def __init__(
        self,
        weights: HeldWeights[Runner],
        draft: DraftModel | LayerDrafts | None,
        eos_token_ids: tuple[int, ...],
        arriving: Arriving,
        transfers: Mapping[str, KvTransfer],
    ) -> None:
        self.ran = (0.0, 0.0)  # begin and end of the last step, monotonic seconds
        self.losses: dict[int, Loss] = {}  # of the last step's rows whose experts were lost
        self.unread: dict[int, Exception] = {}  # of the last step's rows whose cold blocks could not be read: why
        self.late: dict[int, PartLate] = {}  # of the last step's rows for which another node has not answered yet
        self.ended: dict[int, int] = {}  # of the last step's parts that have not passed all layers: which they are in
        self.gave_way = False  # the last step ended between two layers, without a result
        self._lets_in_at = self._waits_until = inf  # monotonic seconds
        self._stop = Stop()  # of a step that gives way
        self.unusual = False  # the last step had to wait for KV, or used several weights
        self.inputs: Inputs = {}  # the event loop fills them
        self.passed: dict[int, Tensor] = {}  # the outputs of parts in the last step, by the place of their row
        self._ahead: dict[int, tuple[Runner, Tensor]] = {}  # see Runner.ahead, by the place of the row
        self._weights, self._draft, self._eos_token_ids = weights, draft, eos_token_ids
        self._arriving, self._transfers = arriving, transfers

    def drafting_s(self, step: Step | None) -> float:
        """Seconds in which tokens will be proposed for this step."""
        if step is None or self._draft is None:
            return 0.0
        return self._draft.step_seconds * max((row.num_drafts for row in step.rows), default=0)

    def lets_in_at(self, at: float) -> None:
        """The part of the running step, or of the next one, ends behind the layer or the attention that it is in at
        `at`, in monotonic seconds; and a step that gives way, behind its layer. On the event loop."""
        self._lets_in_at = at
        self._stop.set(self._left_s() <= 0)
        for one in self.inputs.values():
            if isinstance(one, Exchange):
                one.look_again()

    def _left_s(self) -> float:
        return self._lets_in_at - time.monotonic()

    def _may_wait_s(self) -> float:
        return min(self._lets_in_at, self._waits_until) - time.monotonic()

    def kept(self, place: int, request: Request, right: int) -> None:
        """Of a row of the last step, the first `right` draft tokens were accepted. On the event loop."""
        if isinstance(self._draft, LayerDrafts) and place in self._ahead:
            runner, outputs = self._ahead[place]
            self._draft.goes_on(request, request.num_tokens + right + 1, runner, outputs[right])

    def run(self, step: Step, loop: asyncio.AbstractEventLoop) -> list[list[Sampled]]:
        """The tokens and blocks of the step's requests do not change while it runs: only commit, fail and schedule
        change them, and an abort leaves both until the step has ended."""
        proposals = self._draft.propose(step.rows, self._eos_token_ids) if self._draft is not None else {}
        begin, sampled, waited = time.monotonic(), dict[int, list[Sampled]](), False
        self.losses, self.passed, self.unread, self.late, self.ended, self._ahead = {}, {}, {}, {}, {}, {}
        self.gave_way = False
        decodes = any(not row.request.apart for row in step.rows)
        self._waits_until = begin + SLICE_S if decodes else inf  # they are behind the part
        for place, row in enumerate(step.rows):
            if (part := row.request.part) is not None:
                sampled[place] = self._run_part(place, row, part, loop)
                waited = waited or isinstance(part, Stripes)
            elif (cold := row.request.cold) is not None:
                runner = self._weights.runner(row.request.weights)
                assert row.layers is not None, "the batcher has chosen them"
                try:
                    sampled[place] = runner.step_beyond(row_of(row, self._eos_token_ids), cold, row.layers)
                except PartLate as late:
                    sampled[place], self.late[place] = [], late
                except (OSError, SsdError) as error:  # of the disk, or another node: the other requests go on
                    sampled[place], self.unread[place] = [], error
        passes = by_weights(step.rows)
        for weights, places in passes.items():
            rows = [step.rows[place] for place in places]
            gates = self._arriving.gates(row.request for row in rows)
            transfers = [
                # A prefix that is still arriving leaves layer by layer, like the layers that the step computes.
                (
                    transfer,
                    list(row.request.block_ids),
                    0 if row.request.request_id in gates else row.start,
                    row.start + row.num_tokens,
                    [list(table) for table in row.request.others],
                )
                for row in rows
                if (transfer := self._transfers.get(row.request.request_id)) is not None
            ]

            def on_layer(layer: int, transfers: Transfers = transfers) -> None:
                loop.call_soon_threadsafe(_layer_done, transfers, layer)

            runner = self._weights.runner(weights)
            stop = self._stop if step.gives_way and runner.can_begin_again and not gates else None

            def before_layer(layer: int, gates: Gates = gates) -> None:
                for gate in gates.values():
                    gate.wait(layer)

            try:
                results = runner.step(
                    [row_of(row, self._eos_token_ids, proposals.get(row.request.request_id, ())) for row in rows],
                    on_layer if transfers else None,
                    before_layer if gates else stop,
                )
            except Stopped:
                self.gave_way, self.ran, self.unusual = True, (begin, time.monotonic()), True
                return [[] for _ in step.rows]
            self.losses |= {places[row]: loss for row, loss in runner.losses.items()}
            self._ahead |= {places[row]: (runner, outputs) for row, outputs in runner.ahead.items()}
            waited = waited or bool(gates)
            sampled.update(zip(places, results, strict=True))
        self.ran, self.unusual = (begin, time.monotonic()), waited or len(passes) > 1
        return [sampled[place] for place in range(len(step.rows))]

    def _run_part(self, place: int, row: ScheduledRow, part: Part, loop: asyncio.AbstractEventLoop) -> list[Sampled]:
        """Some or all layers of a part: those of the row, or fewer if it has to end (`lets_in_at`)."""
        request, entering = row.request, part.hidden
        arrived, on_layer = self.inputs.get(request.request_id), self._leaving(row, loop)
        if isinstance(part, Stripes) and isinstance(arrived, Exchange):
            goes_on, on_layer = self._through(arrived, row, loop, on_layer)
        elif isinstance(part, Stage) and (part.first or isinstance(arrived, HiddenQueue)):
            goes_on = self._goes_on(row)
            if entering is None and isinstance(arrived, HiddenQueue):
                entering = arrived.take(row.start, row.num_tokens)
        else:
            return []  # the request ended after this step was chosen
        runner, began = self._weights.runner(request.weights), time.perf_counter()
        try:
            found, chosen = runner.step_part(
                row_of(row, self._eos_token_ids), part.layers_left, entering, on_layer, goes_on
            )
        except ExchangeEnded:
            return []  # and so has the request
        part.spent(time.perf_counter() - began, found if isinstance(found, Between) else None)
        if isinstance(found, Between):
            self.ended[place] = found.layer
        elif found is not None:
            self.passed[place] = found
        return chosen

    def _leaving(self, row: ScheduledRow, loop: asyncio.AbstractEventLoop) -> Callable[[int], None] | None:
        """Sends each layer of a row with a part to the decode node."""
        request, end = row.request, row.start + row.num_tokens
        transfer = self._transfers.get(request.request_id)
        if transfer is None:
            return None
        leaves: Transfers = [(transfer, list(request.block_ids), row.start, end, ())]

        def on_layer(layer: int) -> None:
            loop.call_soon_threadsafe(_layer_done, leaves, layer)

        return on_layer

    def _goes_on(self, row: ScheduledRow) -> Callable[[int], bool]:
        """Whether the part of a row enters a layer, or goes on behind the layer's attention: in any case at the first
        time, so that every step computes something."""
        layers, asked = row.layers, 0
        assert layers is not None, "the batcher has chosen them"

        def goes_on(layer: int) -> bool:
            nonlocal asked
            asked += 1
            return layer in layers and (asked == 1 or (self._left_s() > 0 and not row.request.finished))

        return goes_on

    def _through(
        self,
        exchange: Exchange,
        row: ScheduledRow,
        loop: asyncio.AbstractEventLoop,
        leaves: Callable[[int], None] | None,
    ) -> tuple[Callable[[int], bool], Callable[[int], None]]:
        """(goes_on, on_layer) for all layers of some tokens. Before the attention of a layer, the KV that other nodes
        have computed in it goes into the pool; after it, the new KV goes to them and `leaves`."""
        request, runner = row.request, self._weights.runner(row.request.weights)
        pool, size, block_ids = runner.kv_pool, runner.block_size, list(request.block_ids)
        end, enters = row.start + row.num_tokens, self._goes_on(row)
        own = block_ids[row.start // size : -(-end // size)]

        def goes_on(layer: int) -> bool:
            arrived = exchange.take(layer, row.start, self._may_wait_s) if enters(layer) else None
            for start, blocks in arrived or ():
                write_layer(pool, layer, block_ids[start // size :][: len(blocks)], blocks)
            return arrived is not None

        def on_layer(layer: int) -> None:
            if leaves is not None:
                leaves(layer)
            blocks = read_layer(pool, layer, own) if exchange.needed_behind(end) else None
            loop.call_soon_threadsafe(exchange.give, layer, row, blocks)

        return goes_on, on_layer


def by_weights(rows: Sequence[ScheduledRow]) -> dict[bytes, list[int]]:
    """The places of a step's rows in the ragged batch by the weights that they use; the order of rows stays."""
    parts: dict[bytes, list[int]] = {}
    for place, row in enumerate(rows):
        if not row.request.apart:
            parts.setdefault(row.request.weights, []).append(place)
    return parts


def _layer_done(transfers: Transfers, layer: int) -> None:
    """Runs on the event loop, once per layer for all (transfer, block ids, start, end, those of other groups) of
    a step."""
    for transfer, block_ids, start, end, others in transfers:
        transfer.layer_done(block_ids, layer, start, end, others)
