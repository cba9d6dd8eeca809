"""The edge of the gossip socket: seals outgoing packets, opens or drops incoming ones, with or without a key."""

from __future__ import annotations

import logging
import os
from collections import Counter

from net.channel.cluster_key import ClusterKey
from net.errors import ONE_KEY, OTHER_KEY
from net.gossip.sealed_packets import MAGIC, SESSION_BYTES, PacketSeal, SealError

log = logging.getLogger("mooncake.net")

Address = tuple[str, int]

REASONS = {"no key": ONE_KEY, "key": ONE_KEY, "other key": OTHER_KEY}
LOGGED_MAX = 256  # (address, reason) pairs, each logged once: strangers must not fill the log


class PacketGuard:
    """Without a key, packets pass unchanged, except that sealed ones are dropped: this node cannot read them."""

    def __init__(self, cluster_key: ClusterKey | None) -> None:
        self._cluster_key = cluster_key
        self._seal = PacketSeal(os.urandom(SESSION_BYTES))
        self._logged: set[tuple[str, str]] = set()
        self.dropped: Counter[str] = Counter()

    def outgoing(self, packet: bytes) -> bytes:
        return packet if self._cluster_key is None else self._seal.seal(self._cluster_key.ring(), packet)

    def incoming(self, datagram: bytes, source: Address) -> bytes | None:
        """The packet, or None if it is dropped."""
        if self._cluster_key is None:
            if datagram[: len(MAGIC)] != MAGIC:
                return datagram
            self._drop("key", source)
            return None
        try:
            return self._seal.open(self._cluster_key.ring(), datagram)
        except SealError as error:
            self._drop(str(error), source)
            return None

    def _drop(self, reason: str, source: Address) -> None:
        self.dropped[reason] += 1
        if (source[0], reason) not in self._logged and len(self._logged) < LOGGED_MAX:
            self._logged.add((source[0], reason))
            log.warning("dropped gossip from %s:%d: %s", *source, REASONS.get(reason, f"it is {reason}"))
