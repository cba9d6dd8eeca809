"""Mirror: memory of which parts are written to the same places of another process, by RDMA.

Both processes have memory of the same layout, and a queue pair. A message is written part by part, then its number, and
the queue pair keeps the order: who sees the number sees the message (memory is registered without relaxed ordering).
So a thread that spins on the number needs nobody's help. For one that sleeps, the number has an immediate value: it
gives a completion at the other end, where the thread of the mirror wakes it.

A queue pair that breaks stays broken, and the memory is of one connection only. `close` destroys the queue pair and
unpins the memory: what the other side writes later is refused, and can land nowhere else.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from net.rounds.desk import NUMBER_BYTES
from net.transfer.common.memory import Region
from net.transfer.common.transport import Unusable
from net.transfer.rdma.card import Card
from net.transfer.rdma.endpoint import Endpoint
from net.transfer.rdma.queue_pair import QueuePair, VerbsError, WorkRequest
from net.transfer.rdma.verbs import verbs

log = logging.getLogger("mooncake.net")

SENDS = 128
MOST_WRITES = 32
"""Of one message: with those before it, whose completions are not known yet, they fit into SENDS."""
RECEIVES = 8
"""Numbers that land before this process notices one. A message waits for the answer to the one before it, so that there
are two at most."""
RETRIES = 6
"""Of a request that is not acknowledged, every 0.5 s. Soft-RoCE takes 7 for: without end."""
PROBE_S = 5.0
LOOK_S = 0.002

Part = tuple[int, int]  # offset, bytes


@dataclass(frozen=True, slots=True)
class Side:
    """What the other process must know of a mirror."""

    endpoint: Endpoint
    address: int
    nbytes: int
    key: int

    def __post_init__(self) -> None:
        """Raises ValueError: the verbs take unsigned integers of these sizes."""
        if not (0 <= self.key < 1 << 32 and self.nbytes > 0 and 0 <= self.address < (1 << 64) - self.nbytes):
            raise ValueError("an address or a key is not one of memory")


class Mirror:
    """Open until `close`; `region` stays. Who opens it calls `connect` and `probe`, then `watch`, then `write`."""

    def __init__(self, device: str, gid_index: int | None, region: Region, parts: Iterable[Part]) -> None:
        """`parts`: of the largest message and its answer. The card is this mirror's own, so no connection waits for
        another one. Raises Unusable."""
        self.region = region
        self.device = device
        self.broken: str | None = None
        """Why nothing arrives any more."""
        self._lock = threading.Lock()  # of all below, and of the card
        self._closed = self._landed = self._probed = False
        self._there: Side | None = None
        self._thread: threading.Thread | None = None
        with ExitStack() as undo:
            self._card = Card(device, gid_index)
            undo.callback(self._card.close)
            self._most = min(self._card.most_bytes, 1 << 30)
            if (count := sum(1 for _ in pieces(parts, self._most))) >= MOST_WRITES:
                raise Unusable(f"a message takes {count + 1} writes of {device}, more than {MOST_WRITES}")
            try:
                self._handle, self._here = self._card.pin(region)
                undo.callback(self._card.unpin, self._handle)
                ends = self._done, self._failed, SENDS, RECEIVES, self._noted
                self._pair = QueuePair(self._card, *ends)
                undo.callback(self._pair.close)
                self._wake = os.eventfd(0)
            except OSError as error:
                raise Unusable(f"RDMA device {device}: {error.strerror}") from None
            undo.pop_all()

    @property
    def side(self) -> Side:
        """For the other process."""
        here = self._here
        return Side(self._pair.endpoint(), here.address, here.nbytes, here.rkey)

    def connect(self, there: Side) -> None:
        """Raises Unusable."""
        if there.nbytes != self._here.nbytes:
            raise Unusable(f"the other side has {there.nbytes} bytes for messages, this one {self._here.nbytes}")
        self._there = there
        try:
            self._pair.connect(there.endpoint, retries=RETRIES)
        except VerbsError as error:
            raise Unusable(f"RDMA device {self.device}: {error.strerror}") from None

    def probe(self, at: int) -> None:
        """Write the number at this place, and wait until it has arrived. Raises Unusable."""
        self._post([], at, signal_last=True)
        until = time.monotonic() + PROBE_S
        while not self._probed:
            if self.broken is not None or time.monotonic() > until:
                raise Unusable(self.broken or f"RDMA over {self.device}: nothing arrives within {PROBE_S:g} s")
            time.sleep(LOOK_S)
            with self._lock:
                self._poll()

    def watch(self, landed: Callable[[], None], ended: Callable[[str], None]) -> None:
        """From now on, in a thread: `landed()` when a number has come, and at last `ended(why)`, unless the mirror is
        closed before."""
        with self._lock:
            if self._closed:
                return
            events = select.poll()
            for descriptor in (self._card.completions_fd, self._card.events_fd, self._wake):
                events.register(descriptor, select.POLLIN)
            told = events, landed, ended
            self._thread = threading.Thread(target=self._watch, args=told, name="rounds-rdma", daemon=True)
            self._thread.start()

    def write(self, parts: Iterable[Part], at: int) -> None:
        """In any thread: these parts, then the number at this place. They must not change until the other side has
        answered. If the connection is broken, `ended` says so."""
        self._post(parts, at, signal_last=False)

    def close(self) -> None:
        """No byte lands here any more when this returns. Idempotent, in any thread."""
        with self._lock:
            first, self._closed = not self._closed, True
            if first:
                self._fence()
                os.eventfd_write(self._wake, 1)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if first:
            self._card.close()
            os.close(self._wake)

    def discard(self) -> None:
        """Close it, and the memory too."""
        self.close()
        self.region.close()

    def _fence(self) -> None:
        """Errors are only logged: pages that are still pinned are nobody else's."""
        steps = self._pair.close, partial(self._card.unpin, self._handle)  # the second one also if the first fails
        for undo in steps:
            try:
                undo()
            except VerbsError:
                log.exception("closing a queue pair of RDMA device %s", self.device)

    # --- sending

    def _post(self, parts: Iterable[Part], at: int, signal_last: bool) -> None:
        lib = verbs().lib
        with self._lock:
            if self._closed or not self._pair.ready:
                return
            requests = [self._request(lib.IBV_WR_RDMA_WRITE, *piece) for piece in pieces(parts, self._most)]
            requests.append(self._request(lib.IBV_WR_RDMA_WRITE_WITH_IMM, at, NUMBER_BYTES))
            if self._pair.room < len(requests):
                self._poll()
            try:
                if self._pair.room < len(requests):
                    self._pair.break_off("its send queue is full")
                else:
                    self._pair.post(requests, signal_last)
            except VerbsError as error:  # a card that cannot even stop its queue pair
                self._break(str(error.strerror))

    def _request(self, opcode: int, at: int, nbytes: int) -> WorkRequest:
        assert self._there is not None
        local, remote = self._here.address + at, self._there.address + at
        return WorkRequest(opcode, local, self._here.lkey, remote, self._there.key, nbytes, None)

    # --- what the card says; the lock is held

    def _poll(self) -> None:
        try:
            self._card.poll()
        except VerbsError as error:
            self._break(str(error.strerror))

    def _done(self, items: list[None]) -> None:
        self._probed = True

    def _failed(self, items: list[None], why: str, refused: bool) -> None:
        self._break(why)

    def _noted(self) -> None:
        self._landed = True

    def _break(self, why: str) -> None:
        self.broken = self.broken or f"RDMA over {self.device}: {why}"
        os.eventfd_write(self._wake, 1)

    # --- the thread

    def _watch(self, events: select.poll, landed: Callable[[], None], ended: Callable[[str], None]) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                self._look()
                came, self._landed = self._landed, False
            if came:
                landed()
            if self.broken is not None:
                ended(self.broken)
                return
            events.poll()

    def _look(self) -> None:
        try:
            self._card.arm()
            self._card.poll()
            if self._card.port_changed() and not self._card.active:
                self._pair.break_off("its link went down")
        except VerbsError as error:
            self._break(str(error.strerror))


def pieces(parts: Iterable[Part], most: int) -> Iterator[Part]:
    """The same bytes in pieces of at most `most` bytes."""
    for at, nbytes in parts:
        for begin in range(0, nbytes, most):
            yield at + begin, min(most, nbytes - begin)
