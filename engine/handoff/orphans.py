"""Keeps requests whose acceptor was lost while they decoded, for LEASE_S, so that their clients can reconnect.

A client may reconnect to any node with the request's id. That node becomes the new acceptor: it adopts the request with
all tokens so far and receives the later ones. Ended requests are kept equally long. Tokens are identified by
(request, index), so the client never gets one twice.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping

from engine.handoff import messages
from engine.handoff.items import made
from engine.handoff.messages import Adopt, Adopted, prompt_digest
from engine.handoff.updates import encode
from engine.step.request import Request, RequestState
from net.bodies import typed
from net.channel.channel import Channel, RemoteError

LEASE_S = 10.0
MAX_ENDED = 256
NOBODY = ""
"""Replaces the acceptor's name while a request has none."""


class Orphans:
    """The orphans of an engine node. `requests`: its unfinished requests by attempt id; `adopted(attempt id, node)` is
    called when `node` takes a request over, `give_up(attempt id)` when its lease expires."""

    def __init__(
        self,
        channel: Channel,
        requests: Mapping[str, Request],
        adopted: Callable[[str, str], None],
        give_up: Callable[[str], None],
    ) -> None:
        self._requests, self._adopted, self._give_up = requests, adopted, give_up
        self._leases: dict[str, asyncio.TimerHandle] = {}
        self._ended: OrderedDict[str, tuple[Request, float]] = OrderedDict()
        channel.handle(messages.ADOPT, typed(Adopt, self._on_adopt))

    def keep(self, attempt_id: str) -> bool:
        """The request's acceptor was lost. Returns True if the request decodes here and is kept for its client."""
        request = self._requests.get(attempt_id)
        if request is None or request.handover or request.state is RequestState.REMOTE or request.finished:
            return False
        if not request.num_output_tokens or _with_logprobs(request):
            return False  # no output to lose yet, or log probabilities, which are not kept
        loop = asyncio.get_running_loop()
        self._leases[attempt_id] = loop.call_later(LEASE_S, self._expire, attempt_id)
        return True

    def ended(self, request: Request) -> None:
        """The request produced its last token; it is kept in case its acceptor is lost before the client has it."""
        now = asyncio.get_running_loop().time()
        self._drop_lease(request.request_id)
        if not _with_logprobs(request):
            self._ended[request.request_id] = request, now
        while self._ended and (len(self._ended) > MAX_ENDED or next(iter(self._ended.values()))[1] < now - LEASE_S):
            self._ended.popitem(last=False)

    async def _on_adopt(self, peer: str, body: Adopt, data: memoryview) -> Adopted:
        """Raises RemoteError (gone) if the request is not here, or if its acceptor is alive."""
        for attempt_id, request in [
            *((name, self._requests[name]) for name in self._leases if name in self._requests),
            *((name, one) for name, (one, _) in self._ended.items()),
        ]:
            # Clients use an id again, perhaps for another question: equal ones get equal tokens.
            named = attempt_id.partition("/")[2].rpartition("#")[0] == body.request_id
            same = named and request.sampling == body.sampling
            if same and prompt_digest(request.root, request.token_ids[: request.num_prompt_tokens]) == body.digest:
                if not request.finished:
                    self._drop_lease(attempt_id)
                    self._adopted(attempt_id, peer)
                return Adopted(attempt_id, [encode(attempt_id, token) for token in made(request)], request.weights)
        raise RemoteError("this node does not keep that request", code="gone")

    def _expire(self, attempt_id: str) -> None:
        if self._leases.pop(attempt_id, None) is not None:
            self._give_up(attempt_id)

    def _drop_lease(self, attempt_id: str) -> None:
        lease = self._leases.pop(attempt_id, None)
        if lease is not None:
            lease.cancel()

    def close(self) -> None:
        for attempt_id in list(self._leases):
            self._drop_lease(attempt_id)


def _with_logprobs(request: Request) -> bool:
    return request.sampling.logprobs is not None or request.sampling.prompt_logprobs is not None
