"""The passive end of RDMA: queue pairs through which one peer reads and writes this node's regions.

The card does the work; this side only makes the queue pairs, tells keys, and takes them away: `end` is the fence
after which nothing of the peer can land here any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from net.connection import Connection
from net.memory import Region
from net.rdma.device import Device
from net.rdma.queue_pair import Endpoint, QueuePair, VerbsError
from net.transport import Unusable
from net.wire import Frame, Header, nowhere


def _nothing(*arguments: Any) -> None:
    """This side posts no requests, so none completes."""


class Target:
    """What one peer reaches here."""

    def __init__(
        self,
        connection: Connection,
        devices: Sequence[Device],
        regions: Mapping[str, Region],
        everyone: set[Target],
        on_notice: Callable[[str, int, bytes], None],
    ) -> None:
        self.connection = connection
        self._devices = devices
        self._regions = regions
        self._everyone = everyone
        self._on_notice = on_notice
        self._pairs: list[QueuePair | None] = []
        everyone.add(self)

    def _connect(self, rails: Sequence[Any]) -> list[Any]:
        """For every rail our endpoint, or the reason why it cannot be used."""
        answers: list[Any] = []
        for index, theirs in enumerate(rails):
            pair: QueuePair | None = None
            try:
                if index >= len(self._devices):
                    raise ValueError("the peer has no device for this rail")
                pair = QueuePair(self._devices[index], _nothing, _nothing, self._notice)
                pair.connect(Endpoint.from_json(theirs))
                answers.append(pair.endpoint().to_json())
            except (VerbsError, ValueError) as error:
                answers.append(str(error))
                if pair is not None:
                    pair.close()
                    pair = None
            self._pairs.append(pair)
        return answers

    def _notice(self, value: int, content: bytes) -> None:
        self._on_notice(self.connection.peer_id, value, content)

    def _start(self, index: int, theirs: Any) -> Header:
        answer: Header = {"op": "started", "rail": index}
        try:
            pair = self._pair(index)
            pair.reset()
            pair.connect(Endpoint.from_json(theirs))
            return answer | {"endpoint": pair.endpoint().to_json()}
        except (VerbsError, ValueError) as error:
            return answer | {"reason": str(error)}

    def _pair(self, index: int) -> QueuePair:
        pair = self._pairs[index] if 0 <= index < len(self._pairs) else None
        if pair is None:
            raise ValueError(f"rail {index} was never connected")
        return pair

    def _tell(self, name: str) -> Header:
        """Address and keys of a region; registering it pins its memory."""
        answer: Header = {"op": "region", "name": name}
        region = self._regions.get(name)
        if region is None or region.closed:
            return answer | {"reason": f"region {name!r} is not registered there"}
        try:
            keys = [device.register(region).rkey for device in self._devices]
        except Unusable as error:
            return answer | {"reason": str(error)}
        return answer | {"address": region.address, "nbytes": region.nbytes, "keys": keys}

    def withdraw(self, name: str) -> None:
        self.connection.send({"op": "gone", "region": name})

    def end(self) -> None:
        """Nothing of the peer lands here any more when this returns. Idempotent."""
        self._everyone.discard(self)
        for pair in self._pairs:
            if pair is not None:
                pair.close()
        self._pairs = []

    # --- net.connection.Receiver

    def place(self, connection: Connection, header: Header, nbytes: int) -> Sequence[memoryview]:
        return nowhere(nbytes)

    def frame(self, connection: Connection, frame: Frame) -> None:
        header = frame.header
        match header["op"]:
            case "connect" if not self._pairs:
                connection.send({"op": "connected", "rails": self._connect(header["rails"])})
            case "region":
                connection.send(self._tell(header["name"]))
            case "stop":
                try:
                    self._pair(header["rail"]).break_off("the peer stopped it")
                except ValueError:
                    return
                connection.send({"op": "stopped", "rail": header["rail"]})
            case "start":
                connection.send(self._start(header["rail"], header["endpoint"]))

    def closed(self, connection: Connection, reason: str | None) -> None:
        self.end()
