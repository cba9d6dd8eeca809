"""Generated traces by name: (seed, requests) -> rows by time. The same seed gives the same rows."""

from __future__ import annotations

from collections.abc import Callable

from lab.loads.agents import agents
from lab.loads.changes import bursty, flipped, unique, viral
from lab.loads.conversation import conversation
from lab.loads.generate import chats
from lab.loads.sessions import sessions
from lab.loads.shapes import goes_viral, mixed, pareto, popular
from lab.loads.sun import sun
from lab.loads.synthetic import synthetic
from lab.loads.trace import TraceRow

Generator = Callable[[int, int], list[TraceRow]]

GENERATORS: dict[str, Generator] = {
    "chats": chats,
    "conversation": conversation,
    "agents": agents,
    "synthetic": synthetic,
    "unique": lambda seed, requests: unique(conversation(seed, requests), seed),
    "flip": lambda seed, requests: flipped(conversation(seed, requests), seed),
    "popular": popular,
    "viral": lambda seed, requests: viral(conversation(seed, requests), seed),
    "goes-viral": goes_viral,
    "pareto": pareto,
    "mixed": mixed,
    "sun": sun,
    "sessions": sessions,
    "bursty": lambda seed, requests: bursty()(conversation(seed, requests), seed),
}

STANDS_FOR = {"conversation": "conversation", "synthetic": "synthetic", "toolagent": "agents"}
"""Released trace -> the generator fitted to it."""
