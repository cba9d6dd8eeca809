"""The connections through which a node reaches the others."""

from __future__ import annotations

from dataclasses import dataclass

from cache.store.store import Store
from net.channel.channel import Channel
from net.gossip.driver import Gossip
from net.gossip.load_words import LoadWords
from net.transfer.device.staging import DeviceTransferEngine


@dataclass(frozen=True, slots=True)
class Cluster:
    """Gossip, channel and load words of one node."""

    channel: Channel
    gossip: Gossip
    transfer: DeviceTransferEngine
    words: LoadWords
    store: Store
