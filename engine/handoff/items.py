"""Builds the updates (engine/handoff/updates.py) that an engine node sends to an acceptor about one request."""

from __future__ import annotations

from engine.core.emissions import Emission
from engine.handoff.messages import timeline_events
from engine.handoff.updates import Failed, Report, Token, Update
from engine.step.request import Request


def update_of(emission: Emission, node_id: str, now: float) -> Update:
    """The update for one token or one failure; `now` is this node's monotonic clock in seconds."""
    request = emission.request
    if emission.token_id is None or emission.error is not None:
        return Failed(emission.error or "the request ended without a token", report_of(request, node_id, now))
    behind = emission.num_behind
    finish = None if behind or request.finish_reason == "handover" else request.finish_reason
    index = request.num_output_tokens - 1 - behind
    tells = finish is not None or request.first_output_index == index
    return Token(
        index, emission.token_id, emission.logprobs, finish, report_of(request, node_id, now) if tells else None
    )


def report_of(request: Request, node_id: str, now: float) -> Report:
    """The events of the request on this node since the last report. Drains its journal."""
    return Report(request.num_cached, timeline_events(request.journal.drain(now), node_id))


def made(request: Request) -> list[Token]:
    """All output tokens so far, for an acceptor that adopts the request."""
    tokens = request.token_ids[request.num_prompt_tokens :]
    last = len(tokens) - 1
    finish = request.finish_reason if request.finished else None
    return [Token(index, token, finish=finish if index == last else None) for index, token in enumerate(tokens)]
