"""An open RDMA device: its port, its completion queues, its events, and memory that it may use.

Nothing here waits. Who opens a card waits for its two descriptors, `completions_fd` and `events_fd`: an event loop
(net/transfer/rdma/device.py), or a thread.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from net.transfer.common.memory import Region
from net.transfer.common.transport import Unusable
from net.transfer.rdma import gids
from net.transfer.rdma.completion_shares import CompletionShares
from net.transfer.rdma.registrations import Registered
from net.transfer.rdma.verbs import COMPLETION, VerbsError, verbs

log = logging.getLogger("mooncake.net")

COMPLETIONS = 4096  # entries of a completion queue: enough for 15 peers, or 200 that only read from this node
POLL_MAX = 256  # completions per poll call
PORT = 1
READS_MAX = 16  # concurrent READs and atomics of a queue pair


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished request of a queue pair."""

    number: int  # the wr_id
    status: int
    why: str  # empty when it succeeded


class Card:
    """Calls are those of one thread at a time, except `pin` and `unpin`."""

    def __init__(self, name: str, gid_index: int | None = None) -> None:
        """Raises Unusable with the reason if the device cannot be used."""
        self.name = name
        self._verbs = verbs()
        ffi, lib = self._verbs.ffi, self._verbs.lib
        self.handlers: dict[int, Callable[[Completion], None]] = {}  # by queue pair number
        self._cqs: list[Any] = []
        with ExitStack() as undo:
            try:
                self._context = self._open(name)
                undo.callback(lib.ibv_close_device, self._context)
                self._attr = ffi.new("struct ibv_device_attr *")
                self._verbs.check(lib.ibv_query_device(self._context, self._attr), "query_device")
                self._query_port()
                chosen = self._choose_gid(gid_index)
                self.gid_index, self.gid = chosen.index, chosen.raw
                self.pd = self._verbs.pointer(lib.ibv_alloc_pd(self._context), "alloc_pd")
                undo.callback(lib.ibv_dealloc_pd, self.pd)
                self._channel = self._verbs.pointer(lib.ibv_create_comp_channel(self._context), "create_comp_channel")
                undo.callback(lib.ibv_destroy_comp_channel, self._channel)
                for fd in (self.completions_fd, self.events_fd):
                    self._verbs.check(lib.kv_nonblocking(fd), "fcntl")
            except VerbsError as error:
                raise Unusable(f"RDMA device {name}: {error.strerror}") from None
            undo.pop_all()
        self._shares = CompletionShares(min(COMPLETIONS, int(self._attr.max_cqe)), int(self._attr.max_cq))
        self._records = ffi.new("struct kv_completion[]", POLL_MAX)

    def _open(self, name: str) -> Any:
        ffi, lib = self._verbs.ffi, self._verbs.lib
        count = ffi.new("int *")
        devices = self._verbs.pointer(lib.ibv_get_device_list(count), "get_device_list")
        try:
            for i in range(count[0]):
                if ffi.string(lib.ibv_get_device_name(devices[i])).decode() == name:
                    return self._verbs.pointer(lib.ibv_open_device(devices[i]), "open_device")
        finally:
            lib.ibv_free_device_list(devices)
        raise VerbsError(errno.ENODEV, "libibverbs has no driver for it (Debian: apt install ibverbs-providers)")

    def _query_port(self) -> None:
        self._port = self._verbs.ffi.new("struct ibv_port_attr *")
        self._verbs.check(self._verbs.lib.ibv_query_port(self._context, PORT, self._port), "query_port")

    def _choose_gid(self, index: int | None) -> gids.Gid:
        ffi, lib = self._verbs.ffi, self._verbs.lib
        entries = ffi.new("struct ibv_gid_entry[]", 256)
        count = lib.ibv_query_gid_table(self._context, entries, 256, 0)
        table = [
            gids.Gid(one.gid_index, one.port_num, bytes(one.gid.raw), one.gid_type == lib.IBV_GID_TYPE_ROCE_V2)
            for one in entries[0 : max(0, count)]
        ]
        try:
            return gids.choose(table, PORT, index)
        except ValueError as error:
            raise VerbsError(errno.EADDRNOTAVAIL, f"it does not have {error}") from None

    # --- facts

    @property
    def completions_fd(self) -> int:
        """Readable when a completion has come since `arm`."""
        return int(self._channel.fd)

    @property
    def events_fd(self) -> int:
        """Readable when `events` has some."""
        return int(self._context.async_fd)

    @property
    def active(self) -> bool:
        """Whether the link is up, as of the last event."""
        return bool(self._port.state == self._verbs.lib.IBV_PORT_ACTIVE)

    @property
    def mtu(self) -> int:
        """verbs.h's enum of the path MTU: 1 = 256 bytes ... 5 = 4096."""
        return int(self._port.active_mtu)

    @property
    def most_bytes(self) -> int:
        """Of one request."""
        return int(self._port.max_msg_sz)

    @property
    def lid(self) -> int:
        return int(self._port.lid)

    @property
    def is_ethernet(self) -> bool:
        return bool(self._port.link_layer == self._verbs.lib.IBV_LINK_LAYER_ETHERNET)

    @property
    def max_sends(self) -> int:
        return int(self._attr.max_qp_wr)

    @property
    def reads(self) -> int:
        """READs and atomics that one of its queue pairs can have in flight."""
        return min(READS_MAX, int(self._attr.max_qp_init_rd_atom))

    @property
    def answers(self) -> int:
        """READs and atomics of the other side that one of its queue pairs answers at a time."""
        return min(READS_MAX, int(self._attr.max_qp_rd_atom))

    # --- memory

    def pin(self, region: Region) -> tuple[Any, Registered]:
        """(handle for `unpin`, keys). Blocks. Raises Unusable naming the limit."""
        lib = self._verbs.lib
        access = (
            lib.IBV_ACCESS_LOCAL_WRITE
            | lib.IBV_ACCESS_REMOTE_WRITE
            | lib.IBV_ACCESS_REMOTE_READ
            | lib.IBV_ACCESS_REMOTE_ATOMIC
        )
        pointer = self._verbs.ffi.cast("void *", region.address)
        try:
            mr = self._verbs.pointer(lib.ibv_reg_mr(self.pd, pointer, region.nbytes, access), "reg_mr")
        except VerbsError as error:
            hint = " (raise the locked-memory limit: ulimit -l unlimited)" if error.errno == errno.ENOMEM else ""
            raise Unusable(f"{self.name} cannot register {region.nbytes} bytes: {error.strerror}{hint}") from None
        return mr, Registered(region.address, region.nbytes, int(mr.lkey), int(mr.rkey))

    def unpin(self, mr: Any) -> None:
        """The card refuses the keys from now on. Raises VerbsError."""
        self._verbs.check(self._verbs.lib.ibv_dereg_mr(mr), "dereg_mr")

    # --- completions and events

    def take_completions(self, count: int) -> tuple[int, Any]:
        """(number, completion queue) for a queue pair with at most `count` requests in flight. Raises VerbsError."""
        lib = self._verbs.lib
        try:
            number = self._shares.take(count)
        except ValueError as error:
            raise VerbsError(errno.ENOSPC, f"{self.name}: {error}") from None
        try:
            if number == len(self._cqs):
                made = lib.ibv_create_cq(self._context, self._shares.entries, self._verbs.ffi.NULL, self._channel, 0)
                self._cqs.append(self._verbs.pointer(made, "create_cq"))
                self._verbs.check(lib.ibv_req_notify_cq(self._cqs[number], 0), "req_notify_cq")
        except VerbsError:
            self._shares.give_back(number, count)
            raise
        return number, self._cqs[number]

    def give_back_completions(self, number: int, count: int) -> None:
        """The queue pair has been destroyed."""
        with suppress(Exception):  # a broken queue is the matter of who waits for completions
            self.poll()  # take its last completions first
        self._shares.give_back(number, count)

    def arm(self) -> None:
        """Take the events of `completions_fd`; the next completion makes another one. Poll afterwards: a completion
        that came before has none. Raises VerbsError."""
        self._verbs.lib.kv_drain_events(self._channel)
        for cq in self._cqs:
            self._verbs.check(self._verbs.lib.ibv_req_notify_cq(cq, 0), "req_notify_cq")

    def poll(self) -> int:
        """Pass all completions to their handlers; returns their number. Raises VerbsError if a queue is broken, and the
        exception of a handler: the completions after that one are lost."""
        return sum(self._poll(cq) for cq in self._cqs)

    def _poll(self, cq: Any) -> int:
        total = 0
        lib, ffi = self._verbs.lib, self._verbs.ffi
        while (count := lib.kv_poll(cq, self._records, POLL_MAX)) > 0:
            total += count
            for record in COMPLETION.iter_unpack(bytes(ffi.buffer(self._records, count * COMPLETION.size))):
                number, status, qp_num = record
                handler = self.handlers.get(qp_num)
                if handler is not None:
                    why = self._verbs.status(status) if status else ""
                    handler(Completion(number, status, why))
        if count < 0:
            raise VerbsError(errno.EIO, f"a completion queue of {self.name} is broken")
        return total

    def port_changed(self) -> bool:
        """Take the events of `events_fd`: whether one may have changed `active`. Raises VerbsError."""
        ffi, lib = self._verbs.ffi, self._verbs.lib
        kind, qp_num = ffi.new("int *"), ffi.new("uint32_t *")
        changed = False
        while lib.kv_next_event(self._context, kind, qp_num) == 0:
            log.info("%s: %s", self.name, ffi.string(lib.ibv_event_type_str(kind[0])).decode())
            if kind[0] in (lib.IBV_EVENT_PORT_ACTIVE, lib.IBV_EVENT_PORT_ERR, lib.IBV_EVENT_DEVICE_FATAL):
                self._query_port()
                changed = True
        return changed

    def close(self) -> None:
        """Close the queue pairs and unpin the memory first. Errors are only logged: the kernel frees everything when
        the process ends."""
        lib = self._verbs.lib
        try:
            for cq in self._cqs:
                self._verbs.check(lib.ibv_destroy_cq(cq), "destroy_cq")
            self._verbs.check(lib.ibv_destroy_comp_channel(self._channel), "destroy_comp_channel")
            self._verbs.check(lib.ibv_dealloc_pd(self.pd), "dealloc_pd")
            self._verbs.check(lib.ibv_close_device(self._context), "close_device")
        except VerbsError:
            log.exception("closing RDMA device %s", self.name)
