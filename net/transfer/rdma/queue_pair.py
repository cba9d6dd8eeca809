"""One end of a reliable connection (RC queue pair) and its life: reset -> init -> ready -> error -> reset.

The first completion with an error ends a queue pair: all later requests are flushed. `reset` makes it usable again with
a new starting sequence number, its *generation*; the other end must do the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from net.transfer.rdma.card import PORT, Card, Completion
from net.transfer.rdma.endpoint import Endpoint
from net.transfer.rdma.send_queue import SendQueue
from net.transfer.rdma.verbs import OP, VerbsError, verbs

SEND_DEPTH = 256  # requests of a send queue
SIGNAL_EVERY = 32  # requests per signalled completion
ACK_TIMEOUT = 17  # 4.096 us * 2^17 = 0.5 s until a request is sent again
RETRIES = 7  # Soft-RoCE takes it as endless; a transfer ends all the same after its deadline (pump.py, revival.py)
RECEIVE = 0  # number of every receive request; those that are sent count from 1


@dataclass(frozen=True, slots=True)
class WorkRequest:
    """One work request: a slice to move, or an atomic. `item` is returned when the request has ended."""

    opcode: int
    local: int
    lkey: int
    remote: int
    rkey: int
    length: int
    item: Any
    add: int = 0


class QueuePair:
    """`on_done(items)` is called for successful requests, `on_error(items, why, refused)` for the others when the
    connection breaks; the request that failed is the first item. `on_landed()`: a write with an immediate value, and
    all writes before it, have landed here."""

    def __init__(
        self,
        device: Card,
        on_done: Callable[[list[Any]], None],
        on_error: Callable[[list[Any], str, bool], None],
        sends: int = SEND_DEPTH,
        receives: int = 0,
        on_landed: Callable[[], None] = lambda: None,
    ) -> None:
        """refused: a card refused the memory (the fault of the first item, not of the rail). sends: the most requests
        in flight. receives: the most writes with an immediate value that may land before they are noticed; the other
        side waits for room. Raises VerbsError."""
        self.device = device
        self._verbs = verbs()
        self._on_done, self._on_error, self._on_landed = on_done, on_error, on_landed
        depth = min(sends, device.max_sends)
        self._receives = receives
        self._most = depth + receives  # completions that may wait to be polled
        self._share, cq = device.take_completions(self._most)
        try:
            made = self._verbs.lib.kv_create_qp(device.pd, cq, depth, receives)
            self._qp = self._verbs.pointer(made, "create_qp")
        except VerbsError:
            device.give_back_completions(self._share, self._most)
            raise
        self._queue: SendQueue[Any] = SendQueue(depth, min(SIGNAL_EVERY, depth))
        self.ready = False
        self.psn = 0
        device.handlers[self.qp_num] = self._completed
        self._to_init()

    @property
    def qp_num(self) -> int:
        return int(self._qp.qp_num)

    @property
    def room(self) -> int:
        """Requests that may be posted now."""
        return self._queue.room if self.ready else 0

    def endpoint(self) -> Endpoint:
        device = self.device
        depths = {"reads": device.reads, "answers": device.answers}
        return Endpoint(self.qp_num, self.psn, device.gid.hex(), device.lid, device.mtu, **depths)

    def connect(self, other: Endpoint, ack_timeout: int = ACK_TIMEOUT, retries: int = RETRIES) -> None:
        """Connect to the other side's queue pair. Raises VerbsError."""
        path = self._verbs.ffi.new("struct kv_path *")
        path.qp_num, path.receive_psn, path.send_psn = other.qp_num, other.psn, self.psn
        path.gid = list(bytes.fromhex(other.gid))
        path.lid, path.port, path.gid_index = other.lid, PORT, self.device.gid_index
        path.is_global = 1 if self.device.is_ethernet else 0
        path.mtu = min(other.mtu, self.device.mtu)
        path.timeout, path.retries = ack_timeout, retries
        path.reads, path.answers = self.endpoint().depths(other)
        self._verbs.check(self._verbs.lib.kv_to_ready(self._qp, path), "modify_qp to ready")
        self.ready = True

    def post(self, requests: Sequence[WorkRequest], signal_last: bool = True) -> None:
        """Queue at most `room` requests. If the card refuses one, the connection breaks and `on_error` is called.
        `signal_last`: as SendQueue.post has it."""
        lib, ffi = self._verbs.lib, self._verbs.ffi
        marks = self._queue.post([request.item for request in requests], signal_last)
        records = bytearray(OP.size * len(requests))
        for i, (request, (number, signalled)) in enumerate(zip(requests, marks, strict=True)):
            flags = lib.IBV_SEND_SIGNALED if signalled else 0
            OP.pack_into(
                *(records, i * OP.size, number, request.local, request.remote, request.add),
                *(request.length, request.lkey, request.rkey, request.opcode, flags, 0),
            )
        posted = ffi.new("int *")
        error = lib.kv_post(self._qp, ffi.from_buffer("struct kv_op *", records), len(requests), posted)
        if error:
            self.break_off(f"the send queue took {posted[0]} of {len(requests)} requests (errno {error})")

    def _completed(self, completion: Completion) -> None:
        lib = self._verbs.lib
        if completion.number == RECEIVE:
            self._landed(completion)
            return
        if not self._queue.knows(completion.number):
            return  # it belongs to an earlier generation
        if not completion.status:
            self._on_done(self._queue.completed(completion.number))
        else:
            done, failed = self._queue.failed(completion.number)
            if done:
                self._on_done(done)
            refused = completion.status in (
                *(lib.IBV_WC_REM_ACCESS_ERR, lib.IBV_WC_LOC_PROT_ERR, lib.IBV_WC_LOC_QP_OP_ERR),
                *(lib.IBV_WC_REM_INV_REQ_ERR, lib.IBV_WC_LOC_LEN_ERR),
            )
            self._stop()
            self._on_error(failed, completion.why, refused)

    def _landed(self, completion: Completion) -> None:
        if not self.ready:
            return  # it belongs to an earlier generation
        if completion.status:
            self.break_off(completion.why)
            return
        try:
            self._verbs.check(self._verbs.lib.kv_receive(self._qp, 1), "post_recv")
        except VerbsError as error:
            self.break_off(str(error.strerror))
        self._on_landed()

    def break_off(self, why: str) -> None:
        """End the connection from this side; no byte moves over it any more when this returns."""
        if self.ready:
            self._stop()
            self._on_error(self._queue.clear(), why, False)

    def _stop(self) -> None:
        """RESET is synchronous: afterwards the card does not use the memory for sending or receiving any more."""
        self.ready = False
        self._verbs.check(self._verbs.lib.kv_to_state(self._qp, self._verbs.lib.IBV_QPS_RESET), "modify_qp to reset")

    def reset(self) -> None:
        """Start a new generation; call `connect` next. Drops requests in flight silently. Raises VerbsError."""
        self._stop()
        self._queue.clear()
        self.device.poll()  # completions of the old generation
        self._to_init()

    def _to_init(self) -> None:
        lib = self._verbs.lib
        self.psn = secrets.randbits(24)
        access = lib.IBV_ACCESS_REMOTE_WRITE | lib.IBV_ACCESS_REMOTE_READ | lib.IBV_ACCESS_REMOTE_ATOMIC
        self._verbs.check(lib.kv_to_init(self._qp, PORT, access), "modify_qp to init")
        if self._receives:
            self._verbs.check(lib.kv_receive(self._qp, self._receives), "post_recv")

    def close(self) -> None:
        """Idempotent."""
        if self._qp is None:
            return
        self.ready = False
        self.device.handlers.pop(self.qp_num, None)
        qp, self._qp = self._qp, None
        self._verbs.check(self._verbs.lib.ibv_destroy_qp(qp), "destroy_qp")
        self.device.give_back_completions(self._share, self._most)


__all__ = ["Endpoint", "QueuePair", "VerbsError", "WorkRequest"]
