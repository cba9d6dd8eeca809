"""What an engine node tells an acceptor of one request: [id, index, token, logprobs, finish, extra]. Pure.

`index` counts the request's output tokens from 0 and is -1 where there is no token; `extra` comes with the first and
the last one. From a prefill node two items follow its token: finish is 'landed' when all KV is on the decode node, and
'handed_over' when that goes on.
"""

from __future__ import annotations

from typing import Any

from engine.request import Request
from engine.serving.intervals import Intervals
from engine.serving.messages import pack_events, pack_logprobs
from engine.worker import Emission


def item(emission: Emission, node_id: str, now: float) -> list[Any]:
    """Of one token, or of an end without one."""
    request = emission.request
    behind = emission.num_behind
    finish = None if behind or request.finish_reason == "handover" else request.finish_reason
    index = request.num_output_tokens - 1 - behind
    more = None
    if emission.error or finish or request.first_output_index == index:
        more = extra(request, node_id, now, emission.error)
    if emission.error:
        return [request.request_id, -1, None, None, "failed", more]
    return [request.request_id, index, emission.token_id, pack_logprobs(emission.logprobs), finish, more]


def extra(request: Request, node_id: str, now: float, error: str | None = None) -> dict[str, Any]:
    """What happened to the request here since the last time; `now` is this node's monotonic clock."""
    if request.steps:
        request.log.append((now, "computed", {"intervals": request.steps.before(now)}))
        request.steps = Intervals()
    events = pack_events(request, node_id)
    request.log.clear()
    return {"cached_tokens": request.num_cached, "events": events, "error": error}


def made(request: Request) -> list[list[Any]]:
    """All output tokens so far as [index, token, logprobs, finish, extra], for an acceptor that takes the request
    over."""
    tokens = request.token_ids[request.num_prompt_tokens :]
    items: list[list[Any]] = [[index, token, None, None, None] for index, token in enumerate(tokens)]
    if request.finished and items:
        items[-1][3] = request.finish_reason
    return items
