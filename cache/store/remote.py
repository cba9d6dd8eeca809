"""Remote: the pooled store for a process outside the cluster: scripts, loaders, benchmarks.

It asks any node for the members, again every second, and accesses the homes directly, over shared memory on the same
host.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from cache.messages import MEMBERS, PoolMembers
from cache.protocol import Deadlines
from cache.store.options import StoreOptions
from cache.store.store import Store
from net.bodies import Nothing, answered, encode
from net.channel.channel import Channel
from net.channel.cluster_key import ClusterKey
from net.channel.links import Links
from net.errors import PeerLost, PeerRefused, RemoteError
from net.http.client import IDENTITY, fetch_cluster
from net.loop.tasks import keep
from net.transfer.engine import TransferEngine

log = logging.getLogger(__name__)

REFRESH_S = 1.0
ANSWER_S = 5.0


class Remote:
    """`store` is usable between `open` and `close`, on the event loop of `open`."""

    def __init__(self, channel: Channel, transfer: TransferEngine, contact: str) -> None:
        self.store: Store
        self.transfer = transfer
        self._channel = channel
        self._contact = contact
        self._members: dict[str, int] = {}
        self._refreshing: asyncio.Task[None] | None = None

    @property
    def links(self) -> Links:
        """The connections of this client."""
        return self._channel.links

    @classmethod
    async def open(
        cls,
        address: str,
        *,
        api_key: str | None = None,
        cluster_key_file: str | None = None,
        transports: Sequence[str] = ("shm", "tcp"),
        deadlines: Deadlines | None = None,
    ) -> Self:
        """`address`: HOST:PORT of any node's HTTP API. Raises ClusterError when no node answers there, KeyFileError,
        PeerRefused, PeerLost."""
        key = None if cluster_key_file is None else ClusterKey(Path(cluster_key_file))
        cluster = await fetch_cluster(address, api_key, cluster_key=key)
        channel = Channel(f"client-{secrets.token_hex(4)}", {name: cluster[name] for name in IDENTITY}, cluster_key=key)
        transfer = TransferEngine(channel, transports)
        try:
            remote = cls(channel, transfer, await channel.connect(tuple(cluster["control"])))
            first = await remote._refresh()
        except BaseException:
            await transfer.close()
            await channel.close()
            raise
        remote.store = Store(
            channel.node_id,
            channel,
            transfer,
            None,
            lambda: remote._members,
            StoreOptions(block_bytes=first.block_bytes, deadlines=deadlines or Deadlines(), replicas=first.replicas),
        )
        remote._refreshing = keep(remote._keep_fresh, "asking for the members of the pool")
        return remote

    async def close(self) -> None:
        """Idempotent."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
        await self.transfer.close()
        await self._channel.close()
        await self.store.close()

    async def _refresh(self) -> PoolMembers:
        reply, _ = await self._channel.call(self._contact, MEMBERS, encode(Nothing()), timeout_s=ANSWER_S)
        answer = answered(PoolMembers, reply)
        for node_id, host, port, _ in answer.members:
            self._channel.introduce(node_id, (host, port))
        here = {node_id: share for node_id, _, _, share in answer.members if share > 0}
        gone, self._members = self._members.keys() - here.keys(), here
        for node_id in gone:  # its pending calls need not wait for their deadline
            self._channel.drop(node_id, "the cluster has found it gone")
        return answer

    async def _keep_fresh(self) -> None:
        """Refresh the members, from another member when the present one does not answer."""
        while True:
            await asyncio.sleep(REFRESH_S)
            for contact in (self._contact, *self._members):
                with suppress(PeerLost, PeerRefused, RemoteError, TimeoutError):
                    self._contact = contact
                    await self._refresh()
                    break
            else:
                log.warning("no node of the pool answers")
