"""Messages of nodes that take requests beyond memory, and of nodes that hold their blocks: kinds and bodies. Pure.

The acceptor asks before it places such a request, so that what no node can bear is refused before anything is computed.

    decode node (owner)                  holder
      OFFER  what do you lend?      ──>    blocks, rate of its attention
      LEND   room for my blocks     ──>    a lease; the leading blocks that it has already
      STORE  a block                ──>    into a slot
      PART   a layer's queries      ──>    attention over the blocks: part + log-sum-exp
      KEEP, RELEASE  (posted)       ──>
"""

from __future__ import annotations

from dataclasses import dataclass

FORESEE = "engine.beyond.foresee"  # what would this request cost you?
OFFER = "engine.beyond.offer"  # what do you lend?
LEND = "engine.beyond.lend"  # lend room for blocks
STORE = "engine.beyond.store"  # one block, whole
PART = "engine.beyond.part"  # attend to the blocks of a lease
KEEP = "engine.beyond.keep"  # leases are needed further on
RELEASE = "engine.beyond.release"  # leases are needed no longer

LENDS = "lends_attention"
"""Entry of a member's info: it holds blocks of others and attends to them."""

NOT_HELD = "not_held"
"""Code of an error: there is no such lease, or no room."""


@dataclass(frozen=True, slots=True)
class Foresee:
    """FORESEE; the keys of the prompt's full blocks are its data."""

    tokens: int  # known
    output: int  # to generate at most
    service_class: str


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The answer to FORESEE."""

    refused: str  # why the node does not take it; empty: it does
    known_tokens: int = 0  # leading ones in its tier
    cold_bytes: int = 0  # that its first tokens read
    token_s: float = 0.0  # for each of them
    wait_s: float = 0.0  # for others
    prompt_s: float = 0.0  # from its first step to its first token


@dataclass(frozen=True, slots=True)
class Offer:
    """OFFER. Data of any length, and the length of the answer's: the owner measures the way there and back."""

    answer_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Offered:
    """The answer to OFFER."""

    blocks: int  # that may be lent now
    bytes_per_s: float  # of keys and values, for one token


@dataclass(frozen=True, slots=True)
class Lend:
    """LEND; the keys of the leading blocks, as far as they are known, are its data."""

    lease: int  # a number of the owner's
    blocks: int

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"{self.blocks} blocks are no room")


@dataclass(frozen=True, slots=True)
class Lent:
    """The answer to LEND."""

    found: int  # leading blocks of these keys that are there


@dataclass(frozen=True, slots=True)
class Store:
    """STORE; the block is its data."""

    lease: int
    place: int  # of the block in the lease
    checksum: int
    key: bytes = b""  # under which others may find it; empty: not at all

    def __post_init__(self) -> None:
        if self.place < 0:
            raise ValueError(f"place is {self.place}")


@dataclass(frozen=True, slots=True)
class Ask:
    """PART; the queries [rows, heads, head_size] are its data. Data of the answer: out float32, like q, and then
    lse [rows, heads] float32."""

    lease: int
    layer: int
    blocks: int  # the first ones of the lease
    rows: int
    heads: int
    dtype: str  # of the queries
    scale: float
    soft_cap: float = 0.0

    def __post_init__(self) -> None:
        if min(self.layer, self.blocks - 1, self.rows - 1, self.heads - 1) < 0 or not self.scale > 0:
            raise ValueError("needs layer >= 0, scale > 0, and at least one block, row and head")


@dataclass(frozen=True, slots=True)
class Parted:
    """The answer to PART."""

    seconds: float  # of computation


@dataclass(frozen=True, slots=True)
class LeaseNumbers:
    """KEEP and RELEASE."""

    leases: list[int]
