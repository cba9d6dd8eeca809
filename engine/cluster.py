"""What a node reaches the others by."""

from __future__ import annotations

from dataclasses import dataclass

from cache.store import Store
from net.channel import Channel
from net.gossip import Gossip
from net.load_words import LoadWords
from net.staging import DeviceTransferEngine


@dataclass(frozen=True, slots=True)
class Cluster:
    """Of one node."""

    channel: Channel
    gossip: Gossip
    transfer: DeviceTransferEngine
    words: LoadWords
    store: Store
