"""Updates from an engine node to the acceptor about one attempt of a request, and their wire format. Pure.

A message of kind TOKENS has a list of updates. Each is a JSON array that begins with the attempt's id:

    [attempt, index, token id]                                       a token
    [attempt, index, token id, log probabilities, finish, report]    a token with more fields
    [attempt, "landed", report]
    [attempt, "handed_over"]
    [attempt, "moved", node, report]
    [attempt, "stayed"]
    [attempt, "failed", reason, report, whether the prefix arrived incomplete]
    [attempt, "refused", reason, retry_after_s, facts, report]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from engine.sampling.params import TokenLogprobs
from net.bodies import BodyError

FINISHES = (None, "stop", "length")
EVENT_FIELDS = {"t": (int, float), "node": (str,), "event": (str,), "detail": (dict,)}


@dataclass(frozen=True, slots=True)
class Report:
    """What happened to the request on a node since that node's last report."""

    cached_tokens: int  # of the prompt, found on the node instead of computed
    events: Sequence[dict[str, Any]]  # in the form of engine/observe/timeline.py


@dataclass(frozen=True, slots=True)
class Token:
    """One output token."""

    index: int  # among the request's output tokens, from 0
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish: str | None = None  # "stop" or "length" on the last token
    report: Report | None = None  # with the first and the last token of a node


@dataclass(frozen=True, slots=True)
class Landed:
    """From the prefill node: all KV is on the decode node."""

    report: Report


@dataclass(frozen=True, slots=True)
class HandedOver:
    """From the prefill node: the decode node continues, and this node is no longer needed."""


@dataclass(frozen=True, slots=True)
class Moved:
    """From a decode node: another decode node goes on with the request, and this node no longer knows it."""

    to: str
    report: Report


@dataclass(frozen=True, slots=True)
class Stayed:
    """From a decode node: the announced move did not happen; the request goes on here."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt ends; the request can be placed again."""

    reason: str
    report: Report | None = None
    incomplete: bool = False  # the loaded prefix did not arrive whole


@dataclass(frozen=True, slots=True)
class Refused:
    """The decode node refuses the computed prompt (--rejection stage-load)."""

    reason: str
    retry_after_s: float
    facts: dict[str, Any]  # JSON-ready, for the timeline
    report: Report | None = None


@dataclass(frozen=True, slots=True)
class TimedOut:
    """From the acceptor itself: the request's deadline has passed. One timer replaces a timeout per token."""


@dataclass(frozen=True, slots=True)
class Closing:
    """From the acceptor itself: its node shuts down before the request ends."""


@dataclass(frozen=True, slots=True)
class Ended:
    """From the acceptor itself: the answer is complete without another token. Workers of --backend may end so."""

    finish: str  # "stop" or "length"


Update = Token | Landed | HandedOver | Moved | Stayed | Failed | Refused
"""The updates that nodes send."""


def ends_there(update: Update) -> bool:
    """Whether the sender no longer knows the attempt, so that there is nothing to abort."""
    match update:
        case Token(finish=finish):
            return finish is not None
        case Landed() | Stayed():
            return False
        case HandedOver() | Moved() | Failed() | Refused():
            return True


def encode(attempt: str, update: Update) -> list[Any]:
    """JSON-ready."""
    match update:
        case Token(index, token_id, None, None, None):
            return [attempt, index, token_id]
        case Token(index, token_id, logprobs, finish, report):
            return [attempt, index, token_id, _logprobs_out(logprobs), finish, _report_out(report)]
        case Landed(report):
            return [attempt, "landed", _report_out(report)]
        case HandedOver():
            return [attempt, "handed_over"]
        case Moved(to, report):
            return [attempt, "moved", to, _report_out(report)]
        case Stayed():
            return [attempt, "stayed"]
        case Failed(reason, report, incomplete):
            return [attempt, "failed", reason, _report_out(report), incomplete]
        case Refused(reason, retry_after_s, facts, report):
            return [attempt, "refused", reason, retry_after_s, facts, _report_out(report)]


def decode(wire: object) -> tuple[str, Update]:
    """Returns (attempt, update) from parsed JSON. Raises BodyError for anything that `encode` cannot produce."""
    if type(wire) is not list or not wire or type(wire[0]) is not str:
        raise _wrong(wire)
    match wire:
        case [attempt, int() as index, token_id]:
            return attempt, Token(_count(index), _count(token_id))
        case [attempt, int() as index, token_id, logprobs, finish, report] if finish in FINISHES:
            parsed = _report_in(report)
            return attempt, Token(_count(index), _count(token_id), _logprobs_in(logprobs), finish, parsed)
        case [attempt, "landed", [_, _] as report]:
            return attempt, Landed(_report(report))
        case [attempt, "handed_over"]:
            return attempt, HandedOver()
        case [attempt, "moved", str() as to, [_, _] as report]:
            return attempt, Moved(to, _report(report))
        case [attempt, "stayed"]:
            return attempt, Stayed()
        case [attempt, "failed", str() as reason, report, bool() as incomplete]:
            return attempt, Failed(reason, _report_in(report), incomplete)
        case [attempt, "refused", str() as reason, retry_after_s, dict() as facts, report]:
            return attempt, Refused(reason, _seconds(retry_after_s), facts, _report_in(report))
    raise _wrong(wire)


def encode_all(updates: Iterable[tuple[str, Update]]) -> dict[str, Any]:
    """The body of a TOKENS message."""
    return {"updates": [encode(attempt, update) for attempt, update in updates]}


def decode_all(body: dict[str, Any]) -> list[tuple[str, Update]]:
    """The updates of a TOKENS message. Raises BodyError for the whole message if any update is invalid."""
    updates = body.get("updates")
    if type(updates) is not list or len(body) != 1:
        raise BodyError("a TOKENS message must have a list of updates and nothing else")
    return [decode(update) for update in updates]


# --- parts


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise BodyError(f"expected an index or a token id, got {value!r:.40}")
    return value


def _seconds(value: object) -> float:
    if (type(value) is not float and type(value) is not int) or not 0 <= value < inf:
        raise BodyError(f"expected seconds, got {value!r:.40}")
    return float(value)


def _logprobs_out(logprobs: TokenLogprobs | None) -> list[Any] | None:
    return None if logprobs is None else [logprobs.logprob, logprobs.top]


def _logprobs_in(wire: object) -> TokenLogprobs | None:
    match wire:
        case None:
            return None
        case [logprob, list() as top] if all(type(pair) is list and len(pair) == 2 for pair in top):
            return TokenLogprobs(_logprob(logprob), [(_count(token_id), _logprob(one)) for token_id, one in top])
    raise _wrong(wire)


def _logprob(value: object) -> float:
    """JSON has no infinity, so a log probability of minus infinity travels as null."""
    if value is None:
        return -inf
    if type(value) is float or type(value) is int:
        return float(value)
    raise BodyError(f"expected a log probability, got {value!r:.40}")


def _report_out(report: Report | None) -> list[Any] | None:
    return None if report is None else [report.cached_tokens, report.events]


def _report_in(wire: object) -> Report | None:
    return None if wire is None else _report(wire)


def _report(wire: object) -> Report:
    match wire:
        case [cached_tokens, list() as events] if all(map(_is_event, events)):
            return Report(_count(cached_tokens), events)
    raise _wrong(wire)


def _is_event(event: object) -> bool:
    return (
        type(event) is dict
        and event.keys() == EVENT_FIELDS.keys()
        and all(type(event[name]) in kinds for name, kinds in EVENT_FIELDS.items())
    )


def _wrong(wire: object) -> BodyError:
    return BodyError(f"not an update of a request: {wire!r:.80}")
