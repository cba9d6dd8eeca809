"""Questions and answers on the TCP connection of an RDMA link."""

from __future__ import annotations

import asyncio
from typing import Any

from net.channel.connection import Connection
from net.channel.wire import Header
from net.errors import PeerLost

ANSWER_S = 10.0
REGION_S = 120.0  # for keys of a region: the first question waits until all its memory is pinned


class Questions:
    """The "op" of an answer, with its rail and generation or its name, identifies the question. Who asks for the same
    region once more waits for the same answer, also after a timeout."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._open: dict[tuple[str, Any], asyncio.Future[Header]] = {}

    async def ask(self, answer: str, question: Header, within_s: float = ANSWER_S) -> Header:
        """Send `question` and wait for the answer of that name. Raises PeerLost, TimeoutError."""
        key = (answer, _about(question))
        future = self._open.get(key)
        if future is None:
            future = self._open[key] = asyncio.get_running_loop().create_future()
            future.add_done_callback(lambda _: self._open.pop(key, None))
            self._connection.send(question)
        try:
            async with asyncio.timeout(within_s):
                return await asyncio.shield(future)
        except TimeoutError:
            if "generation" in question:  # nobody asks this again
                self._open.pop(key, None)
            raise

    def answered(self, header: Header) -> None:
        future = self._open.get((header["op"], _about(header)))
        if future is not None and not future.done():
            future.set_result(header)

    def end(self, error: PeerLost) -> None:
        for future in list(self._open.values()):
            if not future.done():
                future.set_exception(error)
                future.exception()


def _about(header: Header) -> Any:
    return header.get("rail", header.get("name")), header.get("generation")
