"""One RDMA device of this machine: its queues of completions and events on the event loop, and registered memory."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from net.memory import Region
from net.rdma.verbs import COMPLETION, VerbsError, verbs
from net.transport import Unusable

log = logging.getLogger("mooncake.net")

COMPLETIONS = 4096  # entries of the completion queue
POLL = 256  # completions taken in one call
PORT = 1
V4_MAPPED = bytes(10) + b"\xff\xff"


@dataclass(frozen=True, slots=True)
class Registered:
    """A region as this device knows it."""

    address: int
    nbytes: int
    lkey: int
    rkey: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished request of a queue pair."""

    number: int  # the wr_id
    status: int
    why: str  # empty when it succeeded
    opcode: int
    length: int  # bytes received
    immediate: int


class Device:
    """Open device. `on_port(active)` hears of the link going down and coming back. Use inside a running loop."""

    def __init__(self, name: str, gid_index: int | None = None) -> None:
        """Raises Unusable when the device cannot be used, with the reason."""
        self.name = name
        self._verbs = verbs()
        ffi, lib = self._verbs.ffi, self._verbs.lib
        self._dmabufs: list[Any] = []
        self.handlers: dict[int, Callable[[Completion], None]] = {}  # by queue pair number
        self.on_port: list[Callable[[bool], None]] = []
        self._registered: dict[str, tuple[Region, Any, Registered]] = {}
        try:
            self._context = self._open(name)
            self._attr = ffi.new("struct ibv_device_attr *")
            self._verbs.check(lib.ibv_query_device(self._context, self._attr), "query_device")
            self._query_port()
            self.gid_index, self.gid = self._choose_gid(gid_index)
            self.pd = self._verbs.pointer(lib.ibv_alloc_pd(self._context), "alloc_pd")
            self._channel = self._verbs.pointer(lib.ibv_create_comp_channel(self._context), "create_comp_channel")
            self.cq = self._verbs.pointer(
                lib.ibv_create_cq(self._context, COMPLETIONS, ffi.NULL, self._channel, 0), "create_cq"
            )
            for fd in (self._channel.fd, self._context.async_fd):
                self._verbs.check(lib.kv_nonblocking(fd), "fcntl")
            self._verbs.check(lib.ibv_req_notify_cq(self.cq, 0), "req_notify_cq")
        except VerbsError as error:
            raise Unusable(f"RDMA device {name}: {error.strerror}") from None
        self._records = ffi.new("struct kv_completion[]", POLL)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel.fd, self._completions_wait)
        self._loop.add_reader(self._context.async_fd, self._events_wait)

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

    def _choose_gid(self, index: int | None) -> tuple[int, bytes]:
        """RoCE v2 over IPv4 first: routable and the one peers can be named by."""
        ffi, lib = self._verbs.ffi, self._verbs.lib
        entries = ffi.new("struct ibv_gid_entry[]", 256)
        count = lib.ibv_query_gid_table(self._context, entries, 256, 0)
        gids = [(entries[i].gid_index, bytes(entries[i].gid.raw), entries[i].gid_type) for i in range(max(0, count))]
        if index is not None:
            gids = [gid for gid in gids if gid[0] == index]
        gids.sort(key=lambda gid: (gid[2] != lib.IBV_GID_TYPE_ROCE_V2, gid[1][:12] != V4_MAPPED, gid[0]))
        if not gids:
            which = "any address (GID): is its network interface up?" if index is None else f"a GID of index {index}"
            raise VerbsError(errno.EADDRNOTAVAIL, f"it does not have {which}")
        return gids[0][0], gids[0][1]

    # --- facts

    @property
    def active(self) -> bool:
        """Whether the link is up, as of the last event."""
        return bool(self._port.state == self._verbs.lib.IBV_PORT_ACTIVE)

    @property
    def mtu(self) -> int:
        """verbs.h's enum of the path MTU: 1 = 256 bytes ... 5 = 4096."""
        return int(self._port.active_mtu)

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
    def max_reads(self) -> int:
        """READs and atomics of one queue pair under way at a time."""
        return min(16, int(self._attr.max_qp_rd_atom))

    # --- memory

    def register(self, region: Region) -> Registered:
        """Pin the region for this device, once. Raises Unusable naming the limit that was hit."""
        known = self._registered.get(region.name)
        if known is not None and known[0] is region:
            return known[2]
        if known is not None:
            self.deregister(region.name)
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
        registered = Registered(region.address, region.nbytes, int(mr.lkey), int(mr.rkey))
        self._registered[region.name] = (region, mr, registered)
        return registered

    def register_dmabuf(self, fd: int, offset: int, nbytes: int) -> tuple[int, int]:
        """(lkey, rkey) of GPU memory behind a dma-buf, for GPUDirect; until this device is closed. Raises VerbsError
        where `dmabuf_refusal` gives a reason, and when the descriptor is none (EBADF, EINVAL)."""
        access = (
            self._verbs.lib.IBV_ACCESS_LOCAL_WRITE
            | self._verbs.lib.IBV_ACCESS_REMOTE_WRITE
            | self._verbs.lib.IBV_ACCESS_REMOTE_READ
        )
        mr = self._verbs.lib.kv_reg_dmabuf(self.pd, offset, nbytes, fd, access)
        self._dmabufs.append(self._verbs.pointer(mr, "reg_dmabuf_mr"))
        return int(mr.lkey), int(mr.rkey)

    def dmabuf_refusal(self) -> str | None:
        """Why GPU memory must be staged through host memory here, in one line; None when this device can reach it."""
        try:
            self.register_dmabuf(-1, 0, 4096)
        except VerbsError as error:
            if error.errno == errno.ENOSYS:
                return "libibverbs is older than rdma-core 34 and has no ibv_reg_dmabuf_mr"
            if error.errno in (errno.EOPNOTSUPP, errno.EPROTONOSUPPORT):
                return f"the driver of {self.name} does not register dma-bufs"
        return None

    def deregister(self, name: str) -> None:
        """The fence of withdrawn memory: what peers still send to its key is refused by the card. Idempotent."""
        known = self._registered.pop(name, None)
        if known is not None:
            self._verbs.check(self._verbs.lib.ibv_dereg_mr(known[1]), "dereg_mr")

    # --- completions and events

    def poll(self) -> int:
        """Hand out everything that has completed; returns how many."""
        total = 0
        lib, ffi = self._verbs.lib, self._verbs.ffi
        while (count := lib.kv_poll(self.cq, self._records, POLL)) > 0:
            total += count
            for record in COMPLETION.iter_unpack(bytes(ffi.buffer(self._records, count * COMPLETION.size))):
                number, status, opcode, length, immediate, qp_num, _, _, _ = record
                handler = self.handlers.get(qp_num)
                if handler is not None:
                    why = self._verbs.status(status) if status else ""
                    handler(Completion(number, status, why, opcode, length, immediate))
        if count < 0:
            raise VerbsError(errno.EIO, f"the completion queue of {self.name} is broken")
        return total

    def _completions_wait(self) -> None:
        self._verbs.lib.kv_drain_events(self._channel, self.cq)
        # Armed before the poll: a completion in between makes a new event instead of being overlooked.
        self._verbs.check(self._verbs.lib.ibv_req_notify_cq(self.cq, 0), "req_notify_cq")
        self.poll()

    def _events_wait(self) -> None:
        ffi, lib = self._verbs.ffi, self._verbs.lib
        kind, qp_num = ffi.new("int *"), ffi.new("uint32_t *")
        while lib.kv_next_event(self._context, kind, qp_num) == 0:
            log.info("%s: %s", self.name, ffi.string(lib.ibv_event_type_str(kind[0])).decode())
            if kind[0] in (lib.IBV_EVENT_PORT_ACTIVE, lib.IBV_EVENT_PORT_ERR, lib.IBV_EVENT_DEVICE_FATAL):
                self._query_port()
                for listener in list(self.on_port):
                    listener(self.active)

    def close(self) -> None:
        """After its queue pairs. Errors are logged: at the end of the process the kernel frees everything anyway."""
        self._loop.remove_reader(self._channel.fd)
        self._loop.remove_reader(self._context.async_fd)
        lib = self._verbs.lib
        try:
            for name in list(self._registered):
                self.deregister(name)
            for mr in self._dmabufs:
                self._verbs.check(lib.ibv_dereg_mr(mr), "dereg_mr")
            self._verbs.check(lib.ibv_destroy_cq(self.cq), "destroy_cq")
            self._verbs.check(lib.ibv_destroy_comp_channel(self._channel), "destroy_comp_channel")
            self._verbs.check(lib.ibv_dealloc_pd(self.pd), "dealloc_pd")
            self._verbs.check(lib.ibv_close_device(self._context), "close_device")
        except VerbsError:
            log.exception("closing RDMA device %s", self.name)
