"""TransferEngine and TransferNotify: upstream's calls for transfers between programs, answered by our transfers.

Every call waits, except batch_transfer_async_*; any thread may make it. connect/engine/mover.py says how bytes move,
connect/engine/reach.py what forbids a way, docs/connect.md what differs.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import index
from typing import Any

from connect.common.forked import watch
from connect.common.huge_pages import HugePages
from connect.engine.arguments import END, host_and_port, moves_of, one_move, possible_moves
from connect.engine.batches import Batches
from connect.engine.core import Core
from connect.engine.messages import Notify
from connect.engine.mover import Mover
from connect.engine.reach import Reach
from net.errors import PeerLost, PeerRefused, RemoteError, TransferError
from net.loop.own_thread import EventLoop, LoopClosed
from net.transfer.cma.process import Move
from net.transfer.common.transport import Op

log = logging.getLogger("mooncake.connect")

OK, FAILED = 0, -1
ALREADY, UNKNOWN = -7, -3
AWAY = -102
ERRORS = (TransferError, PeerLost, PeerRefused, RemoteError, TimeoutError, OSError, ValueError, LoopClosed)


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
        self._buffers: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._reset()
        watch(self)

    # --- life

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._loop: EventLoop | None = None
        self._core: Core | None = None
        self._mover: Mover | None = None
        self._pages: HugePages | None = None
        self._port = 0
        self._batches = Batches()

    def let_go(self) -> object:
        """See connect.common.forked."""
        parts = self._loop, self._core, self._mover, self._pages, self._batches
        self._reset()
        return parts

    def initialize(self, local_hostname: str, metadata_server: str, protocol: str, device_name: str) -> int:
        """Listen on `local_hostname`, "HOST" or "HOST:PORT". Peers find each other by their sessions, as with
        upstream's "P2PHANDSHAKE"; `metadata_server` changes nothing. `protocol` "rdma" allows RDMA with the devices
        `device_name`, separated by commas, or with all; without a usable one a line of the log says why, and bytes go
        over TCP. -1 if it cannot listen there, or listens already."""
        host, port = host_and_port(local_hostname)
        if port >= 1 << 16:  # the event loop would listen on the rest
            log.error("initialize: there is no port %d", port)
            return FAILED
        with self._lock:
            if self._core is not None:
                return FAILED
            loop = EventLoop("mooncake-engine")

            async def open_core() -> tuple[Core, int]:
                core = Core(reach)
                return core, await core.start(host, port)

            try:
                reach = Reach.of(protocol, device_name, os.environ)
                core, self._port = loop.run(open_core())
            except (OSError, ValueError) as error:
                log.error("initialize: %s", error)
                loop.close()
                return FAILED
            self._core, self._loop, self._mover = core, loop, Mover(core, loop)
            self._pages = HugePages() if reach.huge_pages else None
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
        """-7 if it overlaps registered memory, -1 if it cannot be memory, or an RDMA device cannot use it."""
        address, nbytes = index(buffer_addr), index(capacity)
        if nbytes < 1 or not 0 <= address <= END - nbytes:
            return FAILED

        async def register(core: Core) -> int:
            return OK if await core.register(address, nbytes) else ALREADY

        code = self._on_loop(register)
        if code == OK and self._pages is not None:
            self._pages.ask(address, nbytes)
        return code

    def unregister_memory(self, buffer_addr: int) -> int:
        """-3 if no registered memory begins there."""

        async def unregister(core: Core) -> int:
            return OK if core.unregister(buffer_addr) else UNKNOWN

        if self._pages is not None:
            self._pages.forget(buffer_addr)
        return self._on_loop(unregister)

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
        try:
            memory = ctypes.create_string_buffer(length)
        except (MemoryError, OverflowError):
            log.warning("no memory for a managed buffer of %d bytes", length)
            return 0
        address = ctypes.addressof(memory)
        if self.register_memory(address, length) != OK:
            return 0
        self._buffers[address] = memory
        return address

    def free_managed_buffer(self, buffer_addr: int, length: int) -> int:
        """-1 if it is none."""
        memory = self._buffers.pop(buffer_addr, None)
        if memory is None:
            return FAILED
        code = self.unregister_memory(buffer_addr)
        del memory  # peers might write to it until here
        return code

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
        return self._transfer(target_hostname, Op.WRITE, one_move(buffer, peer_buffer_address, length))

    def transfer_sync_read(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        return self._transfer(target_hostname, Op.READ, one_move(buffer, peer_buffer_address, length))

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        return self._transfer(target_hostname, Op.WRITE, moves_of(buffers, peer_buffer_addresses, lengths))

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        return self._transfer(target_hostname, Op.READ, moves_of(buffers, peer_buffer_addresses, lengths))

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
        return self._transfer(target_hostname, _op(opcode), one_move(buffer, peer_buffer_address, length), notify)

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
        moves = moves_of(buffers, peer_buffer_addresses, lengths)
        return self._transfer(target_hostname, _op(opcode), moves, notify)

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
        return self._begin(target_hostname, Op.WRITE, moves_of(buffers, peer_buffer_addresses, lengths))

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        return self._begin(target_hostname, Op.READ, moves_of(buffers, peer_buffer_addresses, lengths))

    def transfer_submit_write(self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int) -> int:
        return self._begin(target_hostname, Op.WRITE, one_move(buffer, peer_buffer_address, length))

    def transfer_check_status(self, batch_id: int) -> int:
        """1: done, 0: running, -1: failed, or no such id."""
        return self._batches.status(batch_id)

    def get_batch_transfer_status(self, batch_ids: Sequence[int]) -> int:
        """Wait for all and free them. 0 if all are done; -1 if one failed, or if an id is unknown."""
        return self._batches.wait(batch_ids)

    def _begin(self, session: str, op: Op, moves: Sequence[Move] | None) -> int:
        if self._core is None or moves is None:
            return 0
        return self._batches.begin(lambda: self._transfer(session, op, moves))

    # --- inner

    def _transfer(
        self, session: str, op: Op | None, moves: Sequence[Move] | None, notify: TransferNotify | None = None
    ) -> int:
        wanted = None if moves is None else possible_moves(moves)
        if op is None or wanted is None:
            return FAILED
        mover = self._mover
        if mover is None:
            log.warning("%s: call initialize first", op.value)
            return FAILED
        try:
            mover.move(session, op, wanted, None if notify is None else Notify(notify.name, notify.msg))
        except ERRORS as error:
            log.warning("%s with %s: %s", op.value, session, error)
            return FAILED
        return OK

    def _running(self) -> tuple[Core, EventLoop]:
        if self._core is None or self._loop is None:
            raise ValueError("call initialize first")
        return self._core, self._loop

    def _on_loop(self, work: Callable[[Core], Coroutine[Any, Any, int]]) -> int:
        try:
            core, loop = self._running()
            return loop.run(work(core))
        except (ValueError, TransferError, LoopClosed) as error:
            log.warning("%s", error)
            return FAILED

    def __del__(self) -> None:
        self._batches.close()
        if self._pages is not None:
            self._pages.close()
        if self._mover is not None and self._core is not None and self._loop is not None and self._loop.alive:
            self._mover.close()
            self._loop.end_with(self._core.close())  # this may run in the loop's own thread


def _op(opcode: Any) -> Op | None:
    return {TransferOpcode.Read: Op.READ, TransferOpcode.Write: Op.WRITE}.get(opcode)
