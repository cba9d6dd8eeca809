"""ConnectedDesk: a desk whose answering process was started by somebody else, and has come to this one over TCP.

The end of the connection is the end of that process, as far as the asking one can know. The kinds of such desks differ
in what else comes on it. All of them pull, also while a message is open:

    asking side                                                 answering side (outpost.py)
    {"pull": number, "name": numbers, "at": begin, "n": bytes}  ──>
                              <──  {"pulled": number, "sum": checksum} + the bytes; without both: it has no such bytes
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress

from net.channel.wire import Frame, FrameError, Header, nowhere
from net.errors import PeerLost, PeerRefused
from net.rounds.desk import Desk
from net.rounds.frame_socket import FrameSocket
from net.rounds.layout import Layout
from net.rounds.silence import ANSWER_S, LOOK_S
from net.transfer.common.memory import Region

SILENT_S = 3.0
"""A pull ends after this long without a sign of life. More than a round allows (silence.py): a rank that waits for a
busy core is worth waiting for, because few others have the same bytes."""


class _Pull:
    """Bytes that are to come. `checksum`: as the other side says, when they are there; None: it has none of them."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.memory = memoryview(bytearray(nbytes))
        self.checksum: int | None = None
        self.over = threading.Event()


class ConnectedDesk(Desk, ABC):
    """The asking end. Owns the region and the connection, on which the other side has said that it is ready."""

    def __init__(self, region: Region, layout: Layout, wire: FrameSocket, ended: Callable[[str], None]) -> None:
        """`ended(why)` is called in a thread of this desk, once, when the connection has ended; not after `close`."""
        super().__init__(region, layout)
        self._wire, self._ended = wire, ended
        self._closing = False
        self._why: str | None = None  # the connection has ended
        self._one_pull = threading.Lock()
        self._pull = _Pull(0, 0)  # the last one
        self._thread = threading.Thread(target=self._receive, name="rounds-receive", daemon=True)

    def tell(self, nodes: Sequence[str]) -> None:
        """HOST:PORT of all asking processes that share the answering one."""
        with suppress(PeerLost):  # the thread that receives sees the end too
            self._wire.post({"nodes": [*nodes]}, [])

    def pull(self, name: Sequence[int], at: int, nbytes: int) -> tuple[memoryview, int]:
        """`nbytes` from `at` on of what the other side knows by this name, and their checksum as it says. In any
        thread; one waits for another. Raises PeerLost if there is no connection, no sign of life, or no such bytes."""
        with self._one_pull:
            pull = self._pull = _Pull(self._pull.number + 1, nbytes)
            self._wire.post({"pull": pull.number, "name": [*name], "at": at, "n": nbytes}, [])
            self._await(pull)
        if not pull.over.is_set():
            raise PeerLost(self._why or "the connection has ended")
        if pull.checksum is None:
            raise PeerLost("it has no such bytes")
        return pull.memory, pull.checksum

    def close(self) -> None:
        self._closing = True
        self._wire.end()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._wire.close()
        super().close()

    @abstractmethod
    def _heard(self, frame: Frame) -> None:
        """Another frame than one of a pull. In the thread of this desk, which the constructor starts at its end. Raises
        PeerLost, FrameError."""

    def _await(self, pull: _Pull) -> None:
        """Its end, or that of the connection. As in silence.py, only time counts in which this process was running."""
        beats, silent_s, waited_s = -1, 0.0, 0.0
        while self._why is None and not pull.over.wait(LOOK_S):
            now, waited_s = self.beats, waited_s + LOOK_S
            silent_s = silent_s + LOOK_S if now == beats else 0.0
            beats = now
            if silent_s > SILENT_S or waited_s > ANSWER_S:
                raise PeerLost("it does not give what it is asked for")

    def _room(self, header: Header, nbytes: int) -> Sequence[memoryview]:
        """The memory of bytes that are pulled. Raises FrameError for anything else."""
        pull, number = self._pull, header.get("pulled")
        if type(number) is not int or not 0 < number <= pull.number or type(header.get("sum")) is not int:
            raise FrameError(f"{nbytes} bytes came that nobody pulls")
        if number < pull.number or pull.over.is_set():
            return nowhere(nbytes)  # nobody waits for them any more
        if nbytes != len(pull.memory):
            raise FrameError(f"{nbytes} bytes are not the {len(pull.memory)} that were asked for")
        return [pull.memory]

    def _came(self, frame: Frame) -> None:
        pull = self._pull
        if frame.header["pulled"] == pull.number and not pull.over.is_set():
            pull.checksum = frame.header["sum"] if frame.payload else None
            pull.over.set()

    def _receive(self) -> None:
        try:
            for frame in self._wire.frames():
                if "pulled" in frame.header:
                    self._came(frame)
                else:
                    self._heard(frame)
        except (PeerLost, PeerRefused, FrameError) as error:
            self._why = str(error)
        self._wire.end()
        if not self._closing:
            self._ended(self._why or "the connection has ended")
