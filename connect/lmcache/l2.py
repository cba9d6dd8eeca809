"""MooncakeL2: our pool as the second level of LMCache's server process.

    {"type": "plugin", "module_path": "mooncake_rooms.connect.lmcache.l2", "class_name": "MooncakeL2",
     "adapter_params": {"nodes": "127.0.0.1:8000"}}

A value is LAYOUT_BYTES that name the layout of the object, then its bytes, which move between the pool and LMCache's
memory directly. LMCache's controllers submit tasks from several threads; results are fetched when an event fd says so.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future, wait
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from connect.common.raw_memory import Pieces
from connect.lmcache.chunks import LAYOUT_BYTES, layout_of, server_name
from connect.store import codes
from connect.store.client import Client, answering
from connect.store.named_values import NamedValues
from connect.store.settings import Setup

log = logging.getLogger("mooncake.connect")

Work = Callable[[NamedValues], Coroutine[Any, Any, list[Any]]]


class Tasks:
    """The submitted tasks of one kind: their results until they are fetched, and the fd that says so."""

    def __init__(self, client: Client, numbers: itertools.count[int]) -> None:
        self._client, self._numbers = client, numbers
        self._lock = threading.Lock()
        self._ended: dict[int, Any] = {}
        self._waiting: set[Future[Any]] = set()
        self.notifier = create_event_notifier()

    @property
    def fd(self) -> int:
        return int(self.notifier.fileno())

    def submit(self, work: Work, result: Callable[[list[Any]], Any]) -> int:
        """The task's number. `result` makes its result from what the work returns, [] if it failed; it runs in the
        client's thread."""
        number = next(self._numbers)
        future = self._client.begin(work)
        with self._lock:
            self._waiting.add(future)
        future.add_done_callback(lambda done: self._end(number, done, result))
        return number

    def _end(self, number: int, done: Future[list[Any]], result: Callable[[list[Any]], Any]) -> None:
        if error := CancelledError("closed meanwhile") if done.cancelled() else done.exception():
            log.warning("task %s: %s", number, error, exc_info=error)
        try:
            made = result([] if error else done.result())
        except Exception:  # of a listener of LMCache; a caller that waits for the task needs an end
            log.exception("task %s", number)
            made = result([])
        with self._lock:
            self._ended[number] = made
            self._waiting.discard(done)
            self.notifier.notify()

    def take(self, number: int) -> Any:
        """None if it is not ended, or was taken before."""
        with self._lock:
            return self._ended.pop(number, None)

    def take_all(self) -> dict[int, Any]:
        with self._lock:
            ended, self._ended = self._ended, {}
        return ended

    def wait(self) -> None:
        """Until all have ended."""
        with self._lock:
            waiting = list(self._waiting)
        wait(waiting)


class MooncakeL2(L2AdapterInterface):
    """Raises ConnectionError if no node answers. It has no capacity of its own: the pool evicts by its policy, so
    LMCache's counts of bytes are those of what this process has stored and not deleted."""

    def __init__(self, params: dict[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        nodes = str(params.get("nodes") or os.environ.get("MOONCAKE_MASTER", ""))
        tenant = str(params.get("tenant_id") or os.environ.get("MOONCAKE_TENANT_ID") or "default")
        self._tag = str(params.get("root") or "")
        self._client = Client()
        if code := self._client.open(Setup.of({"master_server_addr": nodes, "tenant_id": tenant})):
            raise ConnectionError(f"no node of the pool answers at {nodes or 'this host'} (code {code}): see the log")
        numbers = itertools.count()
        self._stores, self._lookups, self._loads = (Tasks(self._client, numbers) for _ in range(3))

    def get_store_event_fd(self) -> int:
        return self._stores.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.fd

    def get_load_event_fd(self) -> int:
        return self._loads.fd

    # --- store

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        items = [(name, _value(one, _layout(one))) for name, one in zip(self._names(keys), objects, strict=True)]

        def result(ends: list[int]) -> L2StoreResult:
            new = [i for i, end in enumerate(ends) if end == codes.OK]
            sizes = [objects[i].get_size() for i in new]
            if new:
                self._notify_keys_stored([keys[i] for i in new], sizes)
            good = bool(ends) and all(end in (codes.OK, codes.EXISTS) for end in ends)
            if not good:
                log.warning("%s of %s objects were stored: codes %s", len(new), len(keys), sorted(set(ends)))
            return L2StoreResult(good or not keys, sum(sizes))

        return self._stores.submit(lambda store: store.put_new(items), result)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.take_all()

    # --- look up

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], group_layout_descs: Any) -> int:
        """Nothing is locked: the pool may evict an object before it is loaded, and the load then says so."""
        names = self._names(keys)
        return self._lookups.submit(lambda store: store.exist(names), lambda here: _bitmap(len(names), here))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        return None

    # --- load

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        names = self._names(keys)
        heads = [bytearray(LAYOUT_BYTES) for _ in names]
        values = [_value(one, head) for one, head in zip(objects, heads, strict=True)]

        def target(i: int, nbytes: int) -> Pieces | int:
            return values[i] if values[i].nbytes == nbytes else codes.INVALID

        def result(ends: list[int]) -> Any:
            good = [end > 0 and bytes(heads[i]) == _layout(objects[i]) for i, end in enumerate(ends)]
            if any(good):
                self._notify_keys_accessed([key for key, here in zip(keys, good, strict=True) if here])
            return _bitmap(len(names), good)

        return self._loads.submit(lambda store: store.get(names, target), result)

    def query_load_result(self, task_id: int) -> Any:
        return self._loads.take(task_id)

    # --- the rest

    @answering(lambda given, code: None)
    def delete(self, keys: Sequence[Any]) -> None:
        names = self._names(keys)
        sizes = self._client.run(lambda store: store.sizes(names))
        ends = self._client.run(lambda store: store.remove(names))
        gone = [i for i, end in enumerate(ends) if end == codes.OK and sizes[i] > LAYOUT_BYTES]
        if gone:
            self._notify_keys_deleted([keys[i] for i in gone], [sizes[i] - LAYOUT_BYTES for i in gone])

    @answering(lambda given, code: {"is_healthy": False, "type": "MooncakeL2"})
    def report_status(self) -> dict[str, Any]:
        return {"is_healthy": self._client.answers(), "type": "MooncakeL2"}

    def close(self) -> None:
        """Wait for the submitted tasks, whose memory is LMCache's. Idempotent."""
        if not self._client.ready:
            return
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.wait()
        self._client.close()
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.notifier.close()

    def _names(self, keys: Sequence[Any]) -> list[str]:
        return [server_name(key, self._tag) for key in keys]


def _layout(memory_obj: Any) -> bytes:
    return layout_of(memory_obj.get_shapes(), memory_obj.get_dtypes())


def _value(memory_obj: Any, head: bytes | bytearray) -> Pieces:
    """The layout, which `head` has or gets, and the bytes of the object."""
    first = Pieces.of(head)
    return Pieces([*first.pieces, (memory_obj.data_ptr, memory_obj.get_size())], (first, memory_obj))


def _bitmap(size: int, good: Sequence[bool]) -> Any:
    made = Bitmap(size)
    for i, here in enumerate(good):
        if here:
            made.set(i)
    return made
