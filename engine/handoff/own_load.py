"""How busy this node is: answers probes, and redirects prompts whose acceptor decided on outdated load."""

from __future__ import annotations

import time

from engine.core.engine_load import EngineLoad
from engine.handoff.messages import LoadNow, Promise
from engine.step.request import Request
from net.channel.channel import RemoteError
from net.gossip.load_words import LoadWords
from net.transfer.shm.transport import boot_id
from sched.admission import retry_after_s
from sched.gossip.load_word import CLAIM_UNIT_S
from sched.rejection import Rejection, bounded_s

REDIRECT_SHARE, REDIRECT_S = 0.25, 0.1
"""A prompt is redirected if its first token would be late by more than REDIRECT_SHARE of its promised time to first
token, plus REDIRECT_S."""


class OwnLoad:
    """The load of an engine node, for peers that ask."""

    def __init__(self, node_id: str, load: EngineLoad, words: LoadWords, rejection: Rejection) -> None:
        self.load = load
        self._node_id, self._words, self._rejection = node_id, words, rejection

    async def answer(self, horizon_s: float) -> LoadNow:
        """The answer to a probe; `horizon_s`: seconds until the prompt would arrive here to decode."""
        claims = (await self._words.probe([self._node_id]))[self._node_id]
        return LoadNow(
            record=self.load.record().pack(),
            claimed=claims.claimed,
            outstanding=claims.outstanding,
            step_soon_s=self.load.step_s(self.load.running_soon(horizon_s) + 1),
            step_alone_s=self.load.step_s(1),
            decode_s=self._decode_s(),
            unix_s=time.time(),
            boot_id=boot_id(),
        )

    def keep(self, promise: Promise, request: Request) -> None:
        """A claimed prompt has arrived. Raises RemoteError (redirect) if its first token would be much later than its
        acceptor expected. `redirects_left` limits how often this happens to a prompt. A longer queue is no reason by
        itself: queued prompts may compute a part of this one."""
        if promise.claim:
            self._words.arrived(promise.claim)
        most = REDIRECT_SHARE * promise.ttft_s + REDIRECT_S
        late = self.load.record().work_s + self._words.outstanding * CLAIM_UNIT_S - promise.wait_s
        if promise.redirects_left and late > most:
            late += min(0.0, self.load.prefill_s(request) - (promise.ttft_s - promise.wait_s))
            if late > most:
                raise RemoteError(f"{self._node_id} has {late:.2f} s more work than the acceptor knew", code="redirect")

    def room_in_s(self) -> float:
        """Retry-After while the prompt queue is full: seconds until the next prompt is computed."""
        record = self.load.record()
        return retry_after_s([(record.waiting, record.work_s)])

    def blocks_in_s(self) -> float:
        """Retry-After while too many requests wait for KV blocks: seconds until the next running request ends."""
        return bounded_s(self._decode_s() / max(1, self.load.record().running))

    def _decode_s(self) -> float:
        """Seconds of a typical decode, first to last token."""
        return self.load.lengths.mean * self.load.step_s(max(1, self.load.running_soon(0.0)))

    def decode(self, service_class: str) -> None:
        """A prompt arrives here to decode. Raises RemoteError (refused) if --rejection refuses it."""
        load = self.load
        step_s = load.step_s(load.running_soon(0.0) + 1)
        refusal = self._rejection.after_prefill(service_class, step_s, load.step_s(1), self._decode_s())
        if refusal is not None:
            raise RemoteError(refusal.reason, "refused", refusal.as_dict())
