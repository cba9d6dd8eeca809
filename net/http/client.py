"""What a joining node asks over HTTP before it has anything else: GET /cluster."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp


class ClusterError(Exception):
    """The cluster cannot be joined. The message is one line and names the remedy."""


async def fetch_cluster(address: str, api_key: str | None = None, timeout_s: float = 10.0) -> dict[str, Any]:
    """The answer of GET http://`address`/cluster. A node that just starts is given time; raises ClusterError."""
    deadline = time.monotonic() + timeout_s
    url = f"http://{address}/cluster"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0), headers=headers) as session:
        while True:
            try:
                async with session.get(url) as response:
                    if response.status == 200:
                        answer: dict[str, Any] = await response.json()
                        return answer
                    if response.status == 401:
                        raise ClusterError(f"--join {address}: the cluster wants another --api-key")
                    reason = f"{url} answered {response.status}: is that a Mooncake node?"
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"--join {address}: no node answered ({reason}); give HOST:PORT of a running node's API"
                )
            await asyncio.sleep(0.2)
