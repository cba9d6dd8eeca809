"""How busy this node is: what it answers to a probe, and whether a prompt that was sent on older news may stay."""

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
"""A prompt is sent elsewhere if its first token would come later than promised by more than this."""


class OwnLoad:
    """Of an engine node."""

    def __init__(
        self, node_id: str, load: EngineLoad, words: LoadWords, rejection: Rejection, slo_scale: float
    ) -> None:
        self.load = load
        self._node_id, self._words = node_id, words
        self._rejection, self._slo_scale = rejection, slo_scale

    async def answer(self, horizon_s: float) -> LoadNow:
        """To a probe; `horizon_s`: when the prompt would come here to decode."""
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
        """The prompt of a claim is here. Raises RemoteError (redirect) if its first token would come much later than
        its acceptor knew when it chose this node; not for ever: a prompt brings the number of times that this may
        still happen. What is in the queue may have become longer, but may compute a part of this prompt too."""
        if promise.claim:
            self._words.arrived(promise.claim)
        most = REDIRECT_SHARE * promise.ttft_s + REDIRECT_S
        late = self.load.record().work_s + self._words.outstanding * CLAIM_UNIT_S - promise.wait_s
        if promise.redirects_left and late > most:
            late += min(0.0, self.load.prefill_s(request) - (promise.ttft_s - promise.wait_s))
            if late > most:
                raise RemoteError(f"{self._node_id} has {late:.2f} s more work than the acceptor knew", code="redirect")

    def room_in_s(self) -> float:
        """Retry-After while the queue of prompts is full: until the next of them is computed."""
        record = self.load.record()
        return retry_after_s([(record.waiting, record.work_s)])

    def blocks_in_s(self) -> float:
        """Retry-After while too many wait for KV blocks: until the next running request ends."""
        return bounded_s(self._decode_s() / max(1, self.load.record().running))

    def _decode_s(self) -> float:
        """A typical decode, first to last token."""
        return self.load.lengths.mean * self.load.step_s(max(1, self.load.running_soon(0.0)))

    def decode(self, service_class: str) -> None:
        """A prompt arrives here to decode. Raises RemoteError (refused) if --rejection says that it may not."""
        load = self.load
        step_s = load.step_s(load.running_soon(0.0) + 1)
        alone_s = load.step_s(1)
        refusal = self._rejection.after_prefill(service_class, step_s, alone_s, self._decode_s(), self._slo_scale)
        if refusal is not None:
            raise RemoteError(refusal.reason, "refused", refusal.as_dict())
