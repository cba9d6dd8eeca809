"""Client: the entry of one MooncakeDistributedStore to the pool, and the event loop on which it lives."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import wraps
from typing import Any, TypeVar, cast

from cache.results import NoRoom, StoreError
from cache.store.remote import Remote
from connect.common.event_loop import EventLoop
from connect.common.raw_memory import Pieces
from connect.store import codes
from connect.store.named_values import NamedValues, Target
from connect.store.nodes import Entry, enter
from connect.store.quick_values import QuickValues
from connect.store.settings import Setup
from net.channel.cluster_key import KeyFileError
from net.errors import PeerLost, PeerRefused, RemoteError
from net.http.client import ClusterError

log = logging.getLogger("mooncake.connect")

T = TypeVar("T")
Call = TypeVar("Call", bound=Callable[..., Any])


REFUSALS = (ClusterError, PeerRefused, PeerLost, RemoteError, TimeoutError, KeyFileError, OSError)


class NotReady(Exception):
    """A call before setup, or after close."""


class Client:
    """One entry to the pool. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: EventLoop | None = None
        self._entry: Entry | None = None
        self._values: NamedValues | None = None
        self._quick: QuickValues | None = None
        self.hostname = ""

    def open(self, setup: Setup) -> int:
        """A code. A second call does nothing."""
        with self._lock:
            if self._values is not None:
                return codes.OK
            loop = EventLoop("mooncake-store")
            try:
                self._entry = loop.run(enter(setup.master_server_addr, setup.segment_bytes))
            except BaseException as error:
                loop.close()
                if not isinstance(error, REFUSALS):
                    raise
                log.error("setup: %s", error)
                return codes.NO_ANSWER
            self._loop = loop
            self._quick = loop.run(_quick(self._entry.remote, setup.tenant))
            self._values = NamedValues(self._entry.remote.store, setup.tenant)
            port = self._entry.address.rpartition(":")[2]
            self.hostname = setup.local_hostname if ":" in setup.local_hostname else f"{setup.local_hostname}:{port}"
            return codes.OK

    @property
    def ready(self) -> bool:
        return self._values is not None

    def run(self, work: Callable[[NamedValues], Coroutine[Any, Any, T]]) -> T:
        """Raises NotReady, and what the work raises."""
        return self.begin(work).result()

    def begin(self, work: Callable[[NamedValues], Coroutine[Any, Any, T]]) -> Future[T]:
        """For callers that do not wait; callbacks of the future run in the client's thread. Raises NotReady."""
        values, loop = self._values, self._loop
        if values is None or loop is None:
            raise NotReady
        return loop.begin(work(values))

    def put(self, items: Sequence[tuple[str, Pieces]], *, pin: bool, replicas: int) -> list[int]:
        """NamedValues.put, in the calling thread where that is possible. Raises NotReady, and what that raises."""
        if self._quick is None:
            raise NotReady
        ends = {} if pin or replicas > 1 else self._quick.put(items)
        left = [position for position in range(len(items)) if position not in ends]
        if left:
            rest = [items[position] for position in left]
            ends |= zip(left, self.run(lambda values: values.put(rest, pin=pin, replicas=replicas)), strict=True)
        return [ends[position] for position in range(len(items))]

    def get(self, names: Sequence[str], target: Target) -> list[int]:
        """NamedValues.get, in the calling thread where that is possible. Raises NotReady, and what that raises."""
        if self._quick is None:
            raise NotReady
        ends = self._quick.get(names, target)
        left = [position for position in range(len(names)) if position not in ends]
        if left:
            rest = [names[position] for position in left]
            found = self.run(lambda values: values.get(rest, lambda at, nbytes: target(left[at], nbytes)))
            ends |= zip(left, found, strict=True)
        return [ends[position] for position in range(len(names))]

    def answers(self) -> bool:
        """Whether any node of the pool answers."""
        entry, loop = self._entry, self._loop
        if entry is None or loop is None:
            raise NotReady
        return any(stats is not None for stats in loop.run(entry.remote.store.stats_of_homes()).values())

    def close(self) -> None:
        """Idempotent; no other call may run."""
        with self._lock:
            loop, entry, quick = self._loop, self._entry, self._quick
            self._loop = self._entry = self._values = self._quick = None
            if quick is not None:
                quick.close()
            if loop is not None and entry is not None:
                loop.run(entry.close())
                loop.close()


async def _quick(remote: Remote, tenant: str) -> QuickValues:
    return QuickValues(remote, tenant)


def answering(otherwise: Callable[[tuple[Any, ...], int], Any]) -> Callable[[Call], Call]:
    """Calls that never raise for what happens in the pool: otherwise(arguments, code) is their answer then. TypeError
    remains: it names a wrong argument. So does ImportError: a call for tensors without torch."""

    def decorate(call: Call) -> Call:
        @wraps(call)
        def answer(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return call(self, *args, **kwargs)
            except NotReady:
                code = codes.NOT_READY
            except NoRoom as error:
                log.warning("%s: %s", call.__name__, error)
                code = codes.NO_ROOM
            except StoreError as error:
                log.warning("%s: %s", call.__name__, error)
                code = codes.NO_ANSWER
            except (TypeError, ImportError):
                raise
            except Exception:
                log.exception("%s", call.__name__)
                code = codes.INTERNAL
            return otherwise((*args, *kwargs.values()), code)

        return cast(Call, answer)

    return decorate


answers_code = answering(lambda given, code: code)
"""For calls that answer one code."""

answers_codes = answering(lambda given, code: [code] * len(given[0]))
"""For calls that answer a code per key; the keys come first."""
