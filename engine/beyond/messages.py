"""Messages between acceptors and nodes that take requests beyond memory: their kinds and bodies. Pure.

The acceptor asks before it places such a request, so that what no node can bear is refused before anything is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

FORESEE = "engine.beyond.foresee"  # what would this request cost you?


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
