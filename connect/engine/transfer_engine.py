"""TransferEngine and TransferNotify: upstream's calls for transfers between programs, answered by our transfers.

Every call waits, except batch_transfer_async_*; any thread may make it. Bytes go from process to process on one host,
in the calling thread, and over TCP otherwise. MC_FORCE_TCP=1 forbids the first. docs/connect.md lists what differs.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from connect.common.event_loop import EventLoop
from connect.engine.core import Core, locate
from connect.engine.messages import Notify
from net.errors import PeerLost, PeerRefused, RemoteError, TransferError
from net.transfer.cma.process import Move
from net.transfer.common.transport import Op

log = logging.getLogger("mooncake.connect")

OK, FAILED = 0, -1
ALREADY, UNKNOWN = -7, -3
AWAY = -102
DONE, RUNNING = 1, 0
ASYNC_THREADS = 4
ERRORS = (TransferError, PeerLost, PeerRefused, RemoteError, TimeoutError, OSError, ValueError)


class TransferOpcode(IntEnum):
    """The direction of transfer_sync."""

    Read = 0
    Write = 1


@dataclass
class TransferNotify:
    """What the receiver of a transfer finds with get_notifies."""

    name: str = ""
    msg: str = ""


class TransferEngine:
    """One program's end. A session is "HOST:PORT" of another program's engine: its host, and its get_rpc_port."""

    TransferOpcode = TransferOpcode

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: EventLoop | None = None
        self._core: Core | None = None
        self._port = 0
        self._threads = ThreadPoolExecutor(ASYNC_THREADS, thread_name_prefix="mooncake-transfer")
        self._batches: dict[int, Future[int]] = {}
        self._next_batch = 1
        self._buffers: dict[int, ctypes.Array[ctypes.c_char]] = {}

    # --- life

    def initialize(self, local_hostname: str, metadata_server: str, protocol: str, device_name: str) -> int:
        """Listen on `local_hostname`, "HOST" or "HOST:PORT". Peers find each other by their sessions, as with
        upstream's "P2PHANDSHAKE"; `metadata_server`, `protocol` and `device_name` change nothing. -1 if it cannot
        listen there, or listens already."""
        host, port = _address(local_hostname)
        with self._lock:
            if self._core is not None:
                return FAILED
            loop = EventLoop("mooncake-engine")

            async def open_core() -> tuple[Core, int]:
                core = Core(tcp_only=bool(os.environ.get("MC_FORCE_TCP")))
                return core, await core.start(host, port)

            try:
                self._core, self._port = loop.run(open_core())
            except OSError as error:
                log.error("initialize: %s", error)
                loop.close()
                return FAILED
            self._loop = loop
            return OK

    def get_rpc_port(self) -> int:
        """0 before `initialize`."""
        return self._port

    def get_engine(self) -> TransferEngine:
        """For MooncakeDistributedStore.setup(engine=...), which ignores it."""
        return self

    def get_local_topology(self) -> str:
        """JSON; no devices are needed."""
        return json.dumps({})

    # --- memory

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """-7 if it overlaps registered memory."""
        return self._on_loop(lambda core: OK if core.register(buffer_addr, capacity) else ALREADY)

    def unregister_memory(self, buffer_addr: int) -> int:
        """-3 if no registered memory begins there."""
        return self._on_loop(lambda core: OK if core.unregister(buffer_addr) else UNKNOWN)

    def batch_register_memory(
        self, buffer_addresses: Sequence[int], capacities: Sequence[int], location: str = "*"
    ) -> int:
        """All or nothing."""
        if len(buffer_addresses) != len(capacities):
            return FAILED
        done: list[int] = []
        for address, capacity in zip(buffer_addresses, capacities, strict=True):
            if (code := self.register_memory(address, capacity, location)) != OK:
                for registered in done:
                    self.unregister_memory(registered)
                return code
            done.append(address)
        return OK

    def batch_unregister_memory(self, buffer_addresses: Sequence[int]) -> int:
        """The first code other than 0, after all of them."""
        ends = [self.unregister_memory(address) for address in buffer_addresses]
        return next((end for end in ends if end != OK), OK)

    def allocate_managed_buffer(self, length: int) -> int:
        """The address of registered memory that this engine owns; 0 if that fails."""
        if length <= 0:
            return 0
        memory = ctypes.create_string_buffer(length)
        address = ctypes.addressof(memory)
        if self.register_memory(address, length) != OK:
            return 0
        self._buffers[address] = memory
        return address

    def free_managed_buffer(self, buffer_addr: int, length: int) -> int:
        """-1 if it is none."""
        if self._buffers.pop(buffer_addr, None) is None:
            return FAILED
        return self.unregister_memory(buffer_addr)

    def write_bytes_to_buffer(self, dest_address: int, src_ptr: bytes, length: int) -> int:
        """Copy within this process."""
        if not dest_address or not 0 <= length <= len(src_ptr):
            return FAILED
        ctypes.memmove(dest_address, src_ptr, length)
        return OK

    def read_bytes_from_buffer(self, source_address: int, length: int) -> bytes:
        """Copy within this process."""
        return ctypes.string_at(source_address, length)

    def get_first_buffer_address(self, segment_name: str) -> int:
        """The lowest address that the program at that session has registered; 0 if it has none or does not answer."""
        try:
            core, loop = self._running()
            peer = loop.run(core.peer(segment_name))
            loop.run(core.refresh(peer))
        except ERRORS as error:
            log.info("get_first_buffer_address: %s", error)
            return 0
        rows = peer.ranges.rows()
        return rows[0][0] if rows else 0

    # --- transfers that wait

    def transfer_sync_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        """0, or -1: the session does not answer, or has not registered all of that memory."""
        return self._transfer(target_hostname, Op.WRITE, [buffer], [peer_buffer_address], [length])

    def transfer_sync_read(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        return self._transfer(target_hostname, Op.READ, [buffer], [peer_buffer_address], [length])

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        return self._transfer(target_hostname, Op.WRITE, buffers, peer_buffer_addresses, lengths)

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        return self._transfer(target_hostname, Op.READ, buffers, peer_buffer_addresses, lengths)

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: int,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """`notify` reaches the other program after the bytes."""
        return self._transfer(target_hostname, _op(opcode), [buffer], [peer_buffer_address], [length], notify)

    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: int,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        return self._transfer(target_hostname, _op(opcode), buffers, peer_buffer_addresses, lengths, notify)

    def get_notifies(self) -> list[TransferNotify]:
        """Those that have arrived since the last call."""
        core, loop = self._core, self._loop
        if core is None or loop is None:
            return []

        async def take() -> list[Notify]:
            return core.take_notices()

        return [TransferNotify(one.name, one.msg) for one in loop.run(take())]

    def send_probe(self, target_hostname: str) -> int:
        """0 if the program at that session answers, otherwise -102."""
        core, loop = self._core, self._loop
        if core is None or loop is None:
            return FAILED
        try:
            loop.run(core.probe(target_hostname))
        except ERRORS as error:
            log.info("send_probe: %s", error)
            return AWAY
        return OK

    # --- transfers that run meanwhile

    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """A batch id, which transfer_check_status frees when it answers 1 or -1; 0 if none could begin."""
        return self._begin(target_hostname, Op.WRITE, buffers, peer_buffer_addresses, lengths)

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        return self._begin(target_hostname, Op.READ, buffers, peer_buffer_addresses, lengths)

    def transfer_submit_write(self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int) -> int:
        return self._begin(target_hostname, Op.WRITE, [buffer], [peer_buffer_address], [length])

    def transfer_check_status(self, batch_id: int) -> int:
        """1: done, 0: running, -1: failed, or no such id."""
        batch = self._batches.get(batch_id)
        if batch is not None and not batch.done():
            return RUNNING
        with self._lock:
            batch = self._batches.pop(batch_id, None)
        return DONE if batch is not None and batch.result() == OK else FAILED

    def get_batch_transfer_status(self, batch_ids: Sequence[int]) -> int:
        """Wait for all and free them. 0 if all are done; -1 if one failed, or if an id is unknown."""
        with self._lock:
            batches = [self._batches.pop(batch_id, None) for batch_id in batch_ids]
        ends = [FAILED if batch is None else batch.result() for batch in batches]
        return OK if all(end == OK for end in ends) else FAILED

    def _begin(self, session: str, op: Op, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> int:
        if self._core is None or not len(local) == len(remote) == len(lengths):
            return 0
        with self._lock:
            number, self._next_batch = self._next_batch, self._next_batch + 1
            self._batches[number] = self._threads.submit(self._transfer, session, op, local, remote, lengths)
        return number

    # --- inner

    def _transfer(
        self,
        session: str,
        op: Op | None,
        local: Sequence[int],
        remote: Sequence[int],
        lengths: Sequence[int],
        notify: TransferNotify | None = None,
    ) -> int:
        if op is None or not len(local) == len(remote) == len(lengths):
            return FAILED
        moves = [move for move in zip(local, remote, lengths, strict=True) if move[2]]
        if any(min(move) < 0 for move in moves):
            return FAILED
        try:
            self._move(session, op, moves, notify)
        except ERRORS as error:
            log.warning("%s with %s: %s", op.value, session, error)
            return FAILED
        return OK

    def _move(self, session: str, op: Op, moves: list[Move], notify: TransferNotify | None) -> None:
        core, loop = self._running()
        peer = core.known(session)
        if peer is None:
            peer = loop.run(core.peer(session))
        if moves and peer.process is not None:
            if peer.process.count() != peer.count:
                loop.run(core.refresh(peer))
            locate(peer, moves)
            peer.process.move(op, moves)
        elif moves:
            loop.run(core.move_over_tcp(peer, op, moves))
        if notify is not None:
            loop.run(core.notify(peer, Notify(notify.name, notify.msg)))

    def _running(self) -> tuple[Core, EventLoop]:
        if self._core is None or self._loop is None:
            raise ValueError("call initialize first")
        return self._core, self._loop

    def _on_loop(self, work: Callable[[Core], int]) -> int:
        try:
            core, loop = self._running()
        except ValueError as error:
            log.warning("%s", error)
            return FAILED

        async def run() -> int:
            return work(core)

        return loop.run(run())

    def __del__(self) -> None:
        self._threads.shutdown(wait=False)
        if self._core is not None and self._loop is not None and self._loop.alive:
            self._loop.end_with(self._core.close())  # this may run in the loop's own thread


def _address(local_hostname: str) -> tuple[str, int]:
    """(host, port) of "HOST", "HOST:PORT" or "[IPv6]:PORT"."""
    host, colon, port = local_hostname.rpartition(":")
    if colon and port.isdigit() and (":" not in host or host.startswith("[")):
        return host.strip("[]"), int(port)
    return local_hostname.strip("[]"), 0


def _op(opcode: Any) -> Op | None:
    return {TransferOpcode.Read: Op.READ, TransferOpcode.Write: Op.WRITE}.get(opcode)
