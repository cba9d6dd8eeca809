"""The first question of a joining node, over HTTP: GET /cluster."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import aiohttp
import orjson

from net.channel.cluster_key import ClusterKey
from net.http.common.joining import NONCE_BYTES, SEALED_TYPE, NotOurs, Question

Json = dict[str, Any]

IDENTITY = ("model", "root", "block_size", "dtype", "pool_dtype", "wire_dtype")
"""Fields of the answer that nodes compare before they connect; a node that only asks sends the same."""


class ClusterError(Exception):
    """The cluster cannot be joined. The message is one line and names the remedy."""


async def fetch_cluster(
    address: str, api_key: str | None = None, timeout_s: float = 10.0, cluster_key: ClusterKey | None = None
) -> Json:
    """The answer of GET http://`address`/cluster. With a cluster key, the question proves the key, no API key is sent,
    and the answer is sealed. Retries for `timeout_s`, because the node may still start. Raises ClusterError."""
    deadline = time.monotonic() + timeout_s
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session:
        while True:
            try:
                if cluster_key is None:
                    return await _plain(session, address, api_key)
                return await _sealed(session, address, cluster_key)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                reason = _reason(error)
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"--join {address}: no node answered ({reason}); give HOST:PORT of a running node's API"
                )
            await asyncio.sleep(0.2)


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):  # its own text says "ssl:default", also without TLS
        return str(error.os_error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def _plain(session: aiohttp.ClientSession, address: str, api_key: str | None) -> Json:
    """Raises ValueError if the answer does not describe a cluster, ClusterError for a refusal that retries cannot
    change."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with session.get(f"http://{address}/cluster", headers=headers) as response:
        if response.status == 401:
            raise ClusterError(
                f"--join {address}: the cluster requires another API key (--api-key, or the first line of "
                "--api-key-file)"
            )
        return _cluster(response.status, await response.read())


async def _sealed(session: aiohttp.ClientSession, address: str, cluster_key: ClusterKey) -> Json:
    """Asks once per key of the file, the primary first: during a key rotation, a node may lack one."""
    for key in cluster_key.ring().keys:
        question = Question(key, os.urandom(NONCE_BYTES))
        headers = {"Authorization": question.header()}
        async with session.get(f"http://{address}/cluster", headers=headers) as response:
            body = await response.read()
            if response.status == 200 and response.content_type == SEALED_TYPE:
                try:
                    return _cluster(200, question.open(body))
                except NotOurs:
                    raise ClusterError(f"--join {address}: the answering node does not have this cluster key") from None
            if response.status not in (200, 401):
                _cluster(response.status, body)
    raise ClusterError(
        f"--join {address}: that node has no cluster key or a different one; give both nodes the same "
        "--cluster-key-file"
    )


def _cluster(status: int, body: bytes) -> Json:
    """Raises ValueError."""
    if status != 200:
        raise ValueError(f"it answered {status}: is that a Mooncake node?")
    answer: Json = orjson.loads(body)
    return answer
