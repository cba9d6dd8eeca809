"""Mover: moves bytes between this program's memory and another's, in the calling thread where that is possible.

- the same program: a copy
- the same host: a copy by the kernel (net/transfer/cma/process.py)
- RDMA: the event loop posts the requests, and the network card copies
- TCP: one question over a connection of this thread (connect/engine/questions.py), because an event loop in another
  thread costs two switches of threads. Without such a connection that loop asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove

from connect.engine.core import SILENCE_S, Core, Peer, locate
from connect.engine.messages import Notify
from connect.engine.questions import ReadQuestion, WriteQuestion, questions
from net.errors import RemoteError, TransferError
from net.loop.own_thread import EventLoop
from net.transfer.cma.process import Move
from net.transfer.common.transport import Op
from net.transfer.tcp.blocking_calls import BlockingCalls
from net.transfer.tcp.transport import BUSY_POLL_US


class Mover:
    """Any thread may call. `core` lives on `loop`."""

    def __init__(self, core: Core, loop: EventLoop) -> None:
        self._core = core
        self._loop = loop
        self._calls = BlockingCalls(core.links, BUSY_POLL_US / 1e6)

    def move(self, session: str, op: Op, moves: Sequence[Move], notice: Notify | None = None) -> None:
        """`notice` reaches the other program after the bytes. Moves have at least one byte. Raises TransferError,
        PeerLost, PeerRefused, RemoteError, TimeoutError, OSError, ValueError."""
        peer = self._core.known(session)
        if peer is None:
            peer = self._loop.run(self._core.peer(session))
        if moves:
            if (process := peer.process) is not None:
                if process.count() != peer.count:
                    self._loop.run(self._core.refresh(peer))
                locate(peer, moves)
                process.move(op, moves)
            elif peer.is_self:
                self._copy(op, moves)
            elif peer.by_rdma:
                self._loop.run(self._core.move_by_card(peer, op, moves))
            else:
                for question in questions(op, moves):
                    self._ask(peer, question)
        if notice is not None:
            self._loop.run(self._core.notify(peer, notice))

    def _copy(self, op: Op, moves: Sequence[Move]) -> None:
        if not self._core.holds(moves):
            raise TransferError("some of that memory is not registered")
        for local, remote, length in moves:
            if op is Op.READ:
                memmove(local, remote, length)
            else:
                memmove(remote, local, length)

    def _ask(self, peer: Peer, question: ReadQuestion | WriteQuestion) -> None:
        error = self._calls.ask_one(peer.node_id, question, SILENCE_S)
        if error is None:
            return
        if isinstance(error, RemoteError) or not question.may_repeat:
            raise error
        self._loop.run(self._core.ask(peer, question))

    def close(self) -> None:
        """No call may run."""
        self._calls.close()
