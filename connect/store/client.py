"""Client: the entry of one MooncakeDistributedStore to the pool, and the event loop on which it lives."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

from cache.results import NoRoom, StoreError
from cache.store.remote import Remote
from connect.common.forked import watch
from connect.common.raw_memory import Pieces
from connect.store import codes
from connect.store.named_values import NamedValues, Target
from connect.store.nodes import Entry, enter
from connect.store.quick_values import QuickValues
from connect.store.settings import Setup
from net.channel.cluster_key import KeyFileError
from net.errors import PeerLost, PeerRefused, RemoteError
from net.http.client import ClusterError
from net.loop.own_thread import EventLoop, LoopClosed, ended

log = logging.getLogger("mooncake.connect")

T = TypeVar("T")
Call = TypeVar("Call", bound=Callable[..., Any])


REFUSALS = (ClusterError, PeerRefused, PeerLost, RemoteError, TimeoutError, KeyFileError, OSError)


class NotReady(Exception):
    """A call before setup, after close, or in a child that was forked since: it needs a setup of its own."""


class Client:
    """One entry to the pool. Any thread may call."""

    def __init__(self) -> None:
        self.hostname = ""
        self._reset()
        watch(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._loop: EventLoop | None = None
        self._entry: Entry | None = None
        self._values: NamedValues | None = None
        self._quick: QuickValues | None = None
        self._in_quick = threading.Condition()  # guards the number of calls in `_quick`, and `_quick` itself
        self._quick_calls = 0

    def let_go(self) -> object:
        """See connect.common.forked."""
        parts = self._loop, self._entry, self._values, self._quick
        self._reset()
        return parts

    def open(self, setup: Setup) -> int:
        """A code. A second call does nothing."""
        with self._lock:
            if self._values is not None:
                return codes.OK
            loop = EventLoop("mooncake-store")
            try:
                entry = loop.run(enter(setup.master_server_addr, setup.segment_bytes))
            except BaseException as error:
                loop.close()
                if not isinstance(error, REFUSALS):
                    raise
                log.error("setup: %s", error)
                return codes.NO_ANSWER
            try:
                quick = loop.run(_quick(entry.remote, setup.tenant))
            except BaseException:
                loop.run(entry.close())
                loop.close()
                raise
            self._loop, self._entry = loop, entry
            self._quick, self._values = quick, NamedValues(entry.remote.store, setup.tenant)
            port = entry.address.rpartition(":")[2]
            self.hostname = setup.local_hostname if ":" in setup.local_hostname else f"{setup.local_hostname}:{port}"
            return codes.OK

    @property
    def ready(self) -> bool:
        return self._values is not None

    def run(self, work: Callable[[NamedValues], Coroutine[Any, Any, T]]) -> T:
        """Raises NotReady, also if the client is closed meanwhile, and what the work raises."""
        try:
            return ended(self.begin(work))
        except CancelledError:
            raise NotReady from None

    def begin(self, work: Callable[[NamedValues], Coroutine[Any, Any, T]]) -> Future[T]:
        """For callers that do not wait; callbacks of the future run in the client's thread. Raises NotReady."""
        values, loop = self._values, self._loop
        if values is None or loop is None:
            raise NotReady
        try:
            return loop.begin(work(values))
        except LoopClosed:
            raise NotReady from None

    def put(self, items: Sequence[tuple[str, Pieces]], *, pin: bool, replicas: int) -> list[int]:
        """NamedValues.put, in the calling thread where that is possible. Raises NotReady, and what that raises."""
        quick = self._enter_quick()
        try:
            ends = {} if pin or replicas > 1 else quick.put(items)
        finally:
            self._leave_quick()
        left = [position for position in range(len(items)) if position not in ends]
        if left:
            rest = [items[position] for position in left]
            ends |= zip(left, self.run(lambda values: values.put(rest, pin=pin, replicas=replicas)), strict=True)
        return [ends[position] for position in range(len(items))]

    def get(self, names: Sequence[str], target: Target) -> list[int]:
        """NamedValues.get, in the calling thread where that is possible. Raises NotReady, and what that raises."""
        quick = self._enter_quick()
        try:
            ends = quick.get(names, target)
        finally:
            self._leave_quick()
        left = [position for position in range(len(names)) if position not in ends]
        if left:
            rest = [names[position] for position in left]
            found = self.run(lambda values: values.get(rest, lambda at, nbytes: target(left[at], nbytes)))
            ends |= zip(left, found, strict=True)
        return [ends[position] for position in range(len(names))]

    def _enter_quick(self) -> QuickValues:
        """`close` waits for the caller to leave: it takes memory and connections away. Raises NotReady."""
        with self._in_quick:
            if self._quick is None:
                raise NotReady
            self._quick_calls += 1
            return self._quick

    def _leave_quick(self) -> None:
        with self._in_quick:
            self._quick_calls -= 1
            if not self._quick_calls:
                self._in_quick.notify_all()

    def answers(self) -> bool:
        """Whether any node of the pool answers. Raises NotReady."""
        entry, loop = self._entry, self._loop
        if entry is None or loop is None:
            raise NotReady
        try:
            return any(stats is not None for stats in loop.run(entry.remote.store.stats_of_homes()).values())
        except LoopClosed:
            raise NotReady from None

    def close(self) -> None:
        """Idempotent. Calls of other threads that still run end: those in the calling thread are awaited, the others
        fail."""
        with self._lock:
            with self._in_quick:
                loop, entry, quick = self._loop, self._entry, self._quick
                self._loop = self._entry = self._values = self._quick = None
                self._in_quick.wait_for(lambda: not self._quick_calls)
            if quick is not None:
                quick.close()
            if loop is not None and entry is not None:
                try:
                    loop.run(entry.close())
                finally:
                    loop.close()

    def __del__(self) -> None:
        if self._entry is not None and self._quick is not None and self._loop is not None and self._loop.alive:
            self._quick.close()
            self._loop.end_with(self._entry.close())  # this may run in the loop's own thread


async def _quick(remote: Remote, tenant: str) -> QuickValues:
    return QuickValues(remote, tenant)


def answering(otherwise: Callable[[tuple[Any, ...], int], Any]) -> Callable[[Call], Call]:
    """Calls that never raise for what happens in the pool: otherwise(arguments, code) is their answer then, the
    arguments in the order of the call's parameters. TypeError remains: it names a wrong argument. So does ImportError:
    a call for tensors without torch."""

    def decorate(call: Call) -> Call:
        names = list(signature(call).parameters)[1:]

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
            except (BufferError, UnicodeError) as error:  # a value in strides; a name that is no text
                log.warning("%s: %s", call.__name__, error)
                code = codes.INVALID
            except Exception:
                log.exception("%s", call.__name__)
                code = codes.INTERNAL
            return otherwise((*args, *(kwargs[name] for name in names if name in kwargs)), code)

        return cast(Call, answer)

    return decorate


answers_code = answering(lambda given, code: code)
"""For calls that answer one code."""

answers_codes = answering(lambda given, code: [code] * len(given[0]))
"""For calls that answer a code per key; the keys come first."""
