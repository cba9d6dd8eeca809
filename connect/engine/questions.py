"""ReadQuestion and WriteQuestion: bytes between this program's memory and another program's, over TCP.

The other program looks up the addresses itself (connect/engine/answers.py), so nobody here needs to know what is
registered there now, and one question reaches any number of its regions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from connect.common.raw_memory import view
from connect.engine.messages import READ, WRITE, Places
from net.bodies import encode
from net.errors import RemoteError
from net.transfer.cma.process import Move
from net.transfer.common.spans import slices
from net.transfer.common.transport import Op
from net.transfer.tcp.bulk_call import BulkCall, Views, joined
from net.transfer.tcp.pushing import FRAME_BYTES

ASK_BYTES = 64 << 20  # of one question: it ends in time even on a slow network
PLACES_MAX = 4096  # of one question


class ReadQuestion(BulkCall):
    """READ."""

    def __init__(self, moves: Sequence[Move], nbytes: int) -> None:
        super().__init__(READ, _places(moves), nbytes)
        self._moves = moves

    @property
    def may_repeat(self) -> bool:
        """Whether it may be asked again after an error: bytes come only over a connection that is still open."""
        return True

    def place(self, body: dict[str, object], nbytes: int) -> Views:
        if nbytes != self.expected:
            raise RemoteError(f"{nbytes} bytes arrived, but {self.expected} were requested", "bad_answer")
        return Views([view(local, length) for local, _, length in self._moves])


class WriteQuestion(BulkCall):
    """WRITE."""

    def __init__(self, moves: Sequence[Move], nbytes: int) -> None:
        super().__init__(WRITE, _places(moves), nbytes)
        self.sends, self.is_whole = nbytes, nbytes <= FRAME_BYTES
        self._moves = moves
        self._begun = False

    @property
    def may_repeat(self) -> bool:
        """Not once it has begun: its bytes may land late, when the memory there has another use."""
        return not self._begun

    def begin(self) -> None:
        super().begin()
        self._begun = True

    def data(self) -> Views:
        return Views(joined([view(local, length) for local, _, length in self._moves]))


def questions(op: Op, moves: Sequence[Move]) -> Iterator[ReadQuestion | WriteQuestion]:
    """As many as the bytes need."""
    kind = ReadQuestion if op is Op.READ else WriteQuestion
    nbytes = sum([length for _, _, length in moves])
    if nbytes <= ASK_BYTES and len(moves) <= PLACES_MAX:
        yield kind(moves, nbytes)
        return
    for some in slices(moves, ASK_BYTES):
        for first in range(0, len(some), PLACES_MAX):
            part = some[first : first + PLACES_MAX]
            yield kind(part, sum([length for _, _, length in part]))


def _places(moves: Sequence[Move]) -> dict[str, object]:
    return encode(Places([remote for _, remote, _ in moves], [length for _, _, length in moves]))
