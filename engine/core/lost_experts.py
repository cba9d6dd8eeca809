"""Requests whose experts were lost with a rank: they end, or keep their KV for themselves.

A request that may not go on without them ends here with the reason, and its acceptor places it again. One that goes on
keeps its KV for itself: other requests must not find KV that was computed with fewer experts.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.core.batcher import Batcher
from engine.core.emissions import Emission
from engine.model.experts.losses import Loss
from engine.step.step import Step


def settle_losses(now: float, batcher: Batcher, step: Step, losses: Mapping[int, Loss]) -> list[Emission]:
    """Before the commit of the step. `losses`: by row. Returns an error emission for each request that ends."""
    ended = []
    for place, loss in losses.items():
        request = step.rows[place].request
        if request.finished:
            continue
        if loss.fails:
            batcher.abort(now, request.request_id)
            ended.append(Emission(request, None, error=loss.reason))
        else:
            batcher.keep_private(request)
            request.journal.note(now, "experts_dropped", {"pairs": loss.dropped, "ranks": list(loss.ranks)})
    return ended
