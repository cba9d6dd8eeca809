"""The sending half of a stream over a transport that has failed without a word."""

from __future__ import annotations

from typing import Any, cast

import pytest

from net.channel.stream import Stream
from net.errors import PeerLost


class ClosedHandle:
    """As uvloop's transport after its handle was closed and before connection_lost."""

    def is_closing(self) -> bool:
        return False

    def write(self, data: object) -> None:
        raise RuntimeError("unable to perform operation; the handler is closed")

    writelines = write

    def get_write_buffer_size(self) -> int:
        return 0


def test_a_closed_handle_is_a_lost_peer():
    stream = Stream(cast(Any, None), 1 << 16, None)
    stream._transport = cast(Any, ClosedHandle())
    with pytest.raises(PeerLost, match="handler is closed"):
        stream.send({"bye": True})
    with pytest.raises(PeerLost, match="handler is closed"):
        stream.send_views({"k": 1}, [memoryview(b"ab")], 2)
