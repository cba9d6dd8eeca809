"""NearOutpost: the answering end of a NearDesk, with the calls of an Outpost."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from typing import Self

from net.channel.wire import FrameError
from net.errors import PeerLost, PeerRefused
from net.rounds.desk import Desk, Heart, Message, desk_bytes
from net.rounds.frame_socket import FrameSocket
from net.rounds.layout import Layout
from net.rounds.outpost import Give, Told, addresses, nothing, pulled
from net.transfer.common.memory import Region


class NearOutpost:
    """A context manager: inside, messages arrive at `desk` and beats leave. `ended` says why that is over."""

    def __init__(
        self, wire: FrameSocket, layout: Layout, descriptors: list[int], told: Told, give: Give = nothing
    ) -> None:
        """`descriptors`: of the desk and of the bell, which belong to this object from now on, also if this raises.
        `told`, `give`: as Outpost has it. Raises PeerLost if the memory is not of this layout."""
        desk, bell = descriptors
        with ExitStack() as undo:
            try:
                undo.callback(os.close, bell)
                region = Region.attach("desk", desk, desk_bytes(layout))
                undo.pop_all()
                undo.callback(region.close)
                self._bell = Region.attach("bell", bell, os.fstat(bell).st_size)
                undo.callback(self._bell.close)
                self.desk = Desk(region, layout)
                self._heart = Heart(self.desk)
                undo.pop_all()
            except (OSError, ValueError) as error:
                raise PeerLost(f"the memory of the node cannot be used: {error}") from None
        self.ended: str | None = None
        self._wire, self._told, self._give = wire, told, give
        self._thread = threading.Thread(target=self._receive, name="rounds-end", daemon=True)

    def __enter__(self) -> Self:
        self._wire.await_for(0.0)
        self._heart.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._heart.__exit__()
        self._wire.end()
        self._thread.join()
        self._wire.close()
        self.desk.close()
        self._bell.close()

    def next_message(self, time_s: float) -> Message | None:
        """A message without an answer; None at the end of the time."""
        return self.desk.next_message(time_s)

    def answered(self, message: Message) -> None:
        """The answer to a message lies at the desk."""
        self.desk.answered(message.number, self._bell)

    def queue(self, waits: bool) -> None:
        """Say whether the message waits for work of others."""
        self.desk.queue(waits)

    def _receive(self) -> None:
        try:
            for frame in self._wire.frames():
                if "pull" in frame.header:
                    self._wire.send(*pulled(self._give, frame.header))
                else:
                    self._told(addresses(frame.header))
        except (PeerLost, PeerRefused, FrameError) as error:
            self.ended = str(error)
            self._wire.end()
