"""Messages in which nodes claim blocks that they compute (sched/gossip/intents.py) and work in flight
(sched/gossip/load_word.py). After every message other nodes read the claims, and time passes."""

from __future__ import annotations

from typing import Any

import orjson

from engine.front.claiming.bursts import answer
from engine.handoff.messages import Intend
from net.bodies import decode, encode
from net.gossip.load_words import Amount
from sched.gossip.intents import Intents
from sched.gossip.load_word import COUNTERS, ClaimLedger, Load, LoadWord

PASSES_S = 0.5
KEYS = bytes(range(32)) * 2
HONEST = {"node": "n1", "ready_s": 0.1, "instead_of": ""}


class IntentsTarget:
    """The claims on blocks that one node keeps."""

    corpus = tuple(
        orjson.dumps(body) for body in (HONEST, HONEST | {"node": "n2", "ready_s": 3}, HONEST | {"instead_of": "n1"})
    )

    def __init__(self) -> None:
        self._kept, self._now = Intents(capacity=8), 0.0

    def feed(self, data: bytes) -> None:
        self._now += PASSES_S
        try:
            answer(self._kept, self._now, decode(Intend, _body(data)), memoryview(KEYS))
        finally:
            orjson.dumps(encode(answer(self._kept, self._now, decode(Intend, HONEST), memoryview(KEYS))))
            if self._now % 7 == 0:
                self._kept.drop("n1")


class ClaimsTarget:
    """A node's counters of claims, and the load word that subtracts the finished ones."""

    corpus = (b'{"amount": 1000}', b'{"amount": 4294967296, "release": 1}')

    def __init__(self) -> None:
        self._ledger, self._now = ClaimLedger(ttl_s=5.0), 0.0
        self._claimed = self._released = 0

    def feed(self, data: bytes) -> None:
        self._now += PASSES_S
        body = _body(data)
        release = body.pop("release", None)
        amount = decode(Amount, body).amount
        if release is not None:
            self._released += amount
        else:
            self._claimed += amount
        counters = COUNTERS.pack(0, 0, self._claimed, self._released)
        self._ledger.seen(self._now, self._claimed, self._released)
        load = Load.unpack(LoadWord(settled=self._ledger.settled).pack() + counters)
        if load.outstanding != self._ledger.outstanding or self._ledger.outstanding < 0:
            raise AssertionError("readers see other claims than their owner")


def _body(data: bytes) -> dict[str, Any]:
    """The body as a handler gets it from the control connection: an object (net/channel/wire.py)."""
    body = orjson.loads(data)
    if not isinstance(body, dict):
        raise ValueError("no object")
    return body
