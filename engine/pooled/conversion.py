"""A thread that encodes and decodes KV blocks while the event loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from net.transfer.common.copying import all_ended


class Conversion:
    """Runs one conversion after the other. A conversion writes to memory that others own, so a call ends
    only after it."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, work: Callable[[], None]) -> None:
        """Ends when the thread is done with the memory, however often this is cancelled; then it raises
        CancelledError. Raises what `work` raised."""
        await all_ended([asyncio.get_running_loop().run_in_executor(self._executor, work)])

    def close(self) -> None:
        """Waits for the conversion that is running."""
        self._executor.shutdown(wait=True)
