"""ModelSteps: computes a step in the engine thread.

The model runs once for each of the weights that the step's requests use: once, except while requests finish on weights
that have been replaced (engine/core/held_weights.py). A part of a long prompt (engine/pipeline/) runs by itself,
because its rows pass other layers than those of the other requests; so does a request whose KV exceeds the arena
(engine/step/cold.py), because it reads the rest of it layer by layer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cache.ssd import SsdError
from engine.core.held_weights import HeldWeights
from engine.core.kv_transfer import KvTransfer
from engine.core.layered_load import Arriving, LayerGate
from engine.model.experts.losses import Loss
from engine.sampling.sampler import Sampled
from engine.speculation.draft import DraftModel
from engine.step.hidden import HiddenQueue
from engine.step.rows import row_of
from engine.step.runner import Runner
from engine.step.step import ScheduledRow, Step

if TYPE_CHECKING:
    from torch import Tensor

Transfers = Sequence[tuple[KvTransfer, Sequence[int], int, int, Sequence[Sequence[int]]]]
Gates = Mapping[str, LayerGate]


class ModelSteps:
    """`transfers`: of requests whose KV leaves while it is computed, by request id; `arriving`: prefixes that arrive
    during the step."""

    def __init__(
        self,
        weights: HeldWeights[Runner],
        draft: DraftModel | None,
        eos_token_ids: tuple[int, ...],
        arriving: Arriving,
        transfers: Mapping[str, KvTransfer],
    ) -> None:
        self.ran = (0.0, 0.0)  # begin and end of the last step, monotonic seconds
        self.losses: dict[int, Loss] = {}  # of the last step's rows whose experts were lost
        self.unread: dict[int, str] = {}  # of the last step's rows whose cold blocks could not be read: why
        self.unusual = False  # the last step had to wait for a prefix, or used several weights
        self.hidden: dict[str, HiddenQueue] = {}  # the inputs of parts, by request id; the event loop fills them
        self.passed: dict[int, Tensor] = {}  # the outputs of parts in the last step, by the place of their row
        self._weights, self._draft, self._eos_token_ids = weights, draft, eos_token_ids
        self._arriving, self._transfers = arriving, transfers

    def run(self, step: Step, loop: asyncio.AbstractEventLoop) -> list[list[Sampled]]:
        """The tokens and blocks of the step's requests do not change while it runs: only commit, fail and schedule
        change them, and an abort leaves both until the step has ended."""
        proposals = self._draft.propose(step.rows, self._eos_token_ids) if self._draft is not None else {}
        begin, sampled, waited = time.monotonic(), dict[int, list[Sampled]](), False
        self.losses, self.passed, self.unread = {}, {}, {}
        for place, row in enumerate(step.rows):
            if row.request.part is not None:
                sampled[place] = self._run_part(place, row, loop)
            elif (cold := row.request.cold) is not None:
                runner = self._weights.runner(row.request.weights)
                assert row.layers is not None, "the batcher has chosen them"
                try:
                    sampled[place] = runner.step_beyond(row_of(row, self._eos_token_ids), cold, row.layers)
                except (OSError, SsdError) as error:  # of the disk: the step's other requests go on
                    sampled[place], self.unread[place] = [], f"{type(error).__name__}: {error}"
        parts = by_weights(step.rows)
        for weights, places in parts.items():
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

            def before_layer(layer: int, gates: Gates = gates) -> None:
                for gate in gates.values():
                    gate.wait(layer)

            runner = self._weights.runner(weights)
            results = runner.step(
                [row_of(row, self._eos_token_ids, proposals.get(row.request.request_id, ())) for row in rows],
                on_layer if transfers else None,
                before_layer if gates else None,
            )
            self.losses |= {places[row]: loss for row, loss in runner.losses.items()}
            waited = waited or bool(gates)
            sampled.update(zip(places, results, strict=True))
        self.ran, self.unusual = (begin, time.monotonic()), waited or len(parts) > 1
        return [sampled[place] for place in range(len(step.rows))]

    def _run_part(self, place: int, row: ScheduledRow, loop: asyncio.AbstractEventLoop) -> list[Sampled]:
        request, part = row.request, row.request.part
        assert part is not None
        transfer, end = self._transfers.get(request.request_id), row.start + row.num_tokens
        leaves: Transfers = [] if transfer is None else [(transfer, list(request.block_ids), row.start, end, ())]

        def on_layer(layer: int) -> None:
            loop.call_soon_threadsafe(_layer_done, leaves, layer)

        hidden = None
        if not part.first:
            if (arrived := self.hidden.get(request.request_id)) is None:
                return []  # the request ended after this step was chosen
            hidden = arrived.take(row.start, row.num_tokens)
        runner, layers = self._weights.runner(request.weights), range(part.begin, part.end)
        passed, chosen = runner.step_part(
            row_of(row, self._eos_token_ids), layers, hidden, on_layer if leaves else None
        )
        if passed is not None:
            self.passed[place] = passed
        return chosen


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
