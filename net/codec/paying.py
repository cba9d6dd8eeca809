"""When coding makes a transfer faster: a rule of four rates; and when rounding does. Pure.

Without overlap of coder and link, a byte that is coded takes 1 / encode + ratio / link + 1 / decode seconds, a raw byte
1 / link. So coding pays below the ratio

    1 - link (1 / encode + 1 / decode)

which is the higher the slower the link. Frames of a long transfer do overlap, so the rule errs on the side of raw
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

MARGIN = 0.03  # coded bytes must be fewer than the raw ones by this share: frames also cost calls and memory
WEIGHT = 0.2  # of a new frame of WEIGHT_BYTES in the means
WEIGHT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CodecRates:
    """Raw bytes per second."""

    encode: float
    decode: float

    def seconds(self) -> float:
        """Of both ends, per raw byte."""
        return 1 / self.encode + 1 / self.decode


def worthwhile_ratio(link: float | None, rates: CodecRates) -> float:
    """The ratio of coded to raw bytes below which coding pays; 0 or less: it never does. link: bytes per second of the
    wire; None: not measured yet, and a link counts as fast until then."""
    if link is None:
        return 0.0
    return 1 - link * rates.seconds() - MARGIN


ROUNDING_GAIN = 0.25
"""Share of the time of a get that rounded blocks must save: they also cost precision."""


def rounding_pays(goodput: float, share: float, ratio: float, decode: float) -> bool:
    """Whether KV that is rounded to `ratio` of its bytes comes sooner, by enough. goodput: bytes of exact KV per second
    over the link, as measured, with a lossless coder if it has one; share: bytes on the wire for each of them; decode:
    bytes of exact KV per second in which the receiver decodes. Rounded KV has no exponents to code. Rounding itself is
    not counted: no request waits for a put."""
    return ratio / (goodput * share) + 1 / decode <= (1 - ROUNDING_GAIN) / goodput


@dataclass(slots=True)
class OnWire:
    """What the frames to and from one peer became on the wire: means that forget."""

    share: float = 1.0  # bytes on the wire for each raw byte
    coded: float = 0.0  # share of the raw bytes that were coded

    def moved(self, raw: int, wire: int, coded: bool) -> None:
        weight = min(1.0, WEIGHT * raw / WEIGHT_BYTES)
        self.share += weight * (wire / raw - self.share)
        self.coded += weight * (coded - self.coded)

    def link(self, goodput: float, rates: CodecRates) -> float:
        """Bytes per second of the wire, from raw bytes per second of whole transfers, which include the coder. At least
        a quarter of their time counts as the wire's, because a link may hide the coder's time."""
        seconds = max(1 / goodput - self.coded * rates.seconds(), 0.25 / goodput)
        return self.share / seconds
