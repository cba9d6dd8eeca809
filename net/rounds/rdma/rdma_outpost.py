"""RdmaOutpost: the answering end of an RdmaDesk, with the calls of an Outpost."""

from __future__ import annotations

from typing import Self

from net.rounds import native
from net.rounds.desk import ANSWERED_AT, Message
from net.rounds.frame_socket import FrameSocket
from net.rounds.layout import PAGE, Layout
from net.rounds.outpost import Give, Outpost, Take, Told, nothing
from net.rounds.rdma.mirror import Mirror


class RdmaOutpost(Outpost):
    """A context manager: inside, messages arrive at `desk` and beats leave. `ended` says why that is over. Owns the
    mirror, which is connected."""

    def __init__(
        self, wire: FrameSocket, layout: Layout, mirror: Mirror, take: Take, told: Told, give: Give = nothing
    ) -> None:
        """As Outpost has it."""
        super().__init__(wire, layout, take, told, give, mirror.region)
        self._mirror = mirror

    def __enter__(self) -> Self:
        super().__enter__()
        self._mirror.watch(self._landed, self._end)
        return self

    def __exit__(self, *error: object) -> None:
        self._mirror.close()
        super().__exit__()

    def next_message(self, time_s: float) -> Message | None:
        """None also for one that cannot be: nobody has looked at what a card has written."""
        message = super().next_message(time_s)
        if message is not None:
            try:
                self.desk.layout.parts(*message.head[2:4])
            except ValueError as error:
                self._end(str(error))
                return None
        return message

    def answered(self, message: Message) -> None:
        layout = self.desk.layout
        self.desk.answered(message.number, self._bell)
        self._mirror.write([(PAGE + layout.message_bytes, layout.answer_part(message.head[2]))], ANSWERED_AT)

    def _landed(self) -> None:
        native.short().mr_message_landed(self.desk.address)
