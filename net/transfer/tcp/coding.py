"""Coded frames: bytes that a data connection carries as a frame of net/codec/exponents.py, if that pays.

    {"id", ..., "z": raw bytes} + coded bytes        any frame of a transfer or of a bulk call
    {"op": "read" or "bulk", ..., "c": ratio}        the answer may come in coded frames, if they are shorter than this
                                                     share of the raw bytes

Both nodes must offer the coder: a node codes only what it sends to a peer that has offered it, or that has asked for
it. Each frame is coded for itself, from its own bytes, so values and weights that are not floats of this type travel
raw, and so does a frame whose coding would not pay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from net.channel.wire import Frame, FrameError, Header, allocate
from net.codec.exponents import CodecError, Exponents
from net.codec.paying import MARGIN, CodecRates, OnWire, worthwhile_ratio
from net.transfer.tcp.bulk_call import Source

CODER = "exponent"
RAW_BYTES = "z"
ACCEPTS = "c"
CODED_MIN = 16 << 10  # raw bytes of a frame: shorter ones are not worth a call
CODED_FRAME_BYTES = 1 << 20  # of raw bytes: while one frame is on its way, the next is coded
CODED_MAX = 8 << 20  # bytes of a coded frame
SAMPLE_BYTES = 8 << 10  # of a frame, coded first to predict its ratio

place_coded = allocate(CODED_MAX)

Encode = Callable[[Sequence[memoryview]], memoryview | None]
"""Bytes in order -> a coded frame, None: it would not pay."""

Link = Callable[[str], float | None]
"""Peer -> raw bytes per second of the transfers with it, as they were measured; None: not yet."""


class Coding:
    """The coder of one node, for all its peers. All methods run on the event loop."""

    def __init__(self, coder: Exponents, always: bool, most: float = 0.0) -> None:
        """always: code whatever becomes shorter; otherwise only where the link is slow enough. most: a limit of the
        link's bytes per second that no measurement shows (--rail-limit); 0: none."""
        self._coder = coder
        self._always = always
        self._most = most
        self._ours = CodecRates(*coder.rates())
        self._theirs: dict[str, CodecRates] = {}  # of peers that offer the coder
        self._on_wire: dict[str, OnWire] = {}
        self.link: Link = lambda peer_id: None  # set by the transport
        self.frames = {"coded": 0, "raw": 0}  # sent; raw ones that were long enough to be coded
        self.sent = {"raw": 0, "wire": 0}  # bytes of the coded frames
        self.received = {"raw": 0, "wire": 0}
        self.seconds = {"encode": 0.0, "decode": 0.0}

    def offer(self) -> dict[str, Any]:
        return {"coder": CODER, "encode": self._ours.encode, "decode": self._ours.decode}

    def met(self, peer_id: str, offer: dict[str, Any]) -> None:
        """What the peer's transport offers, with a coder or without."""
        match offer:
            case {"coder": name, "encode": float(encode), "decode": float(decode)} if name == CODER:
                if encode > 0 and decode > 0:
                    self._theirs[peer_id] = CodecRates(encode, decode)

    def lost(self, peer_id: str) -> None:
        self._theirs.pop(peer_id, None)
        self._on_wire.pop(peer_id, None)

    # --- what pays

    def ratio_to(self, peer_id: str) -> float:
        """The ratio below which a frame to the peer is coded; 0: never."""
        theirs = self._theirs.get(peer_id)
        return 0.0 if theirs is None else self._ratio(peer_id, CodecRates(self._ours.encode, theirs.decode))

    def ratio_from(self, peer_id: str) -> float:
        """The same of a frame from the peer."""
        theirs = self._theirs.get(peer_id)
        return 0.0 if theirs is None else self._ratio(peer_id, CodecRates(theirs.encode, self._ours.decode))

    def _ratio(self, peer_id: str, rates: CodecRates) -> float:
        if self._always:
            return 1 - MARGIN
        goodput = self.link(peer_id)
        link = None if goodput is None else self._seen(peer_id).link(goodput, rates)
        if self._most:
            link = self._most if link is None else min(link, self._most)
        return max(0.0, worthwhile_ratio(link, rates))

    def share(self, peer_id: str) -> float:
        """Bytes on the wire for each raw byte of the last transfers with the peer."""
        seen = self._on_wire.get(peer_id)
        return 1.0 if seen is None else seen.share

    def _seen(self, peer_id: str) -> OnWire:
        return self._on_wire.setdefault(peer_id, OnWire())

    # --- frames

    def encoder(self, peer_id: str, ratio: float, nbytes: int) -> Encode | None:
        """Codes frames of `nbytes` in total to the peer, those whose ratio is less; None: coding does not pay."""
        if nbytes < CODED_MIN:
            return None
        if ratio <= 0.0:
            self.went_raw(peer_id, nbytes)
            return None
        return lambda views: self._encoded(peer_id, ratio, views)

    def went_raw(self, peer_id: str, nbytes: int) -> None:
        """Bytes to or from the peer that were not coded."""
        if nbytes >= CODED_MIN:
            self._seen(peer_id).moved(nbytes, nbytes, False)

    def asked(self, peer_id: str, header: Header, nbytes: int) -> Encode | None:
        """The same for an answer to a request with this header."""
        ratio = header.get(ACCEPTS)
        return self.encoder(peer_id, min(ratio, 1 - MARGIN) if isinstance(ratio, float) else 0.0, nbytes)

    def _encoded(self, peer_id: str, ratio: float, views: Sequence[memoryview]) -> memoryview | None:
        began, raw = time.perf_counter(), sum(map(len, views))
        longest = max(views, key=len)
        sample = longest[: min(len(longest), SAMPLE_BYTES)]
        frame = None
        if len(self._coder.encode([sample])) < ratio * len(sample):
            frame = self._coder.encode(views)
        self.seconds["encode"] += time.perf_counter() - began
        if frame is None or len(frame) >= ratio * raw:
            self.frames["raw"] += 1
            self._seen(peer_id).moved(raw, raw, False)
            return None
        self.frames["coded"] += 1
        self.sent["raw"] += raw
        self.sent["wire"] += len(frame)
        self._seen(peer_id).moved(raw, len(frame), True)
        return frame

    def land(self, peer_id: str, frame: Frame, target: Source) -> None:
        """Write the raw bytes of a coded frame to `target`. Raises FrameError."""
        raw = frame.header[RAW_BYTES]
        if not isinstance(raw, int) or not 0 < raw <= target.left:
            raise FrameError(f"a coded frame of {raw!r} raw bytes arrived, but {target.left} were requested")
        began, wire = time.perf_counter(), len(frame.data)
        try:
            self._coder.decode(frame.data, target.take(raw))
        except CodecError as error:
            raise FrameError(str(error)) from None
        self.seconds["decode"] += time.perf_counter() - began
        self.received["raw"] += raw
        self.received["wire"] += wire
        self._seen(peer_id).moved(raw, wire, True)

    def row(self) -> dict[str, dict[str, float]]:
        """For /debug/state and the metrics."""
        return {
            "frames": dict(self.frames),
            "sent": dict(self.sent),
            "received": dict(self.received),
            "seconds": dict(self.seconds),
        }


def land(coding: Coding | None, peer_id: str, frame: Frame, target: Source) -> None:
    """`Coding.land`. Raises FrameError also where this node has not offered a coder."""
    if coding is None:
        raise FrameError("a coded frame arrived, but this node has --wire-codec none")
    coding.land(peer_id, frame, target)
