"""Messages between the nodes of a group, and from them to the decode node: their kinds and bodies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

KNOWN = "engine.group.known"  # node -> first node: my blocks hold so much of the prompt's prefix
HIDDEN = "engine.group.hidden"  # stage -> next stage: the hidden states of a chunk; answered when they are computed
BEGIN = "engine.group.begin"  # first node -> the others, if they divide the tokens: the known prefix and the chunks
LAYER = "engine.group.layer"  # node -> those with later chunks: KV of one layer of my tokens; answered at once
LANDED = "engine.group.landed"  # node -> decode node: my part of the first tokens is in your blocks


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a node in the group of one prompt; part of PREFILL."""

    index: int  # of this node in `nodes`
    nodes: Sequence[str]  # the last one samples the first token
    cuts: Sequence[int] = ()  # node i computes the layers [cuts[i], cuts[i + 1]); empty: all layers of some tokens

    def __post_init__(self) -> None:
        count = len(self.nodes)
        if count < 2 or not 0 <= self.index < count or len(set(self.nodes)) != count:
            raise ValueError(f"node {self.index} of {count} is no place in a group")
        layers = len(self.cuts) == count + 1 and self.cuts[0] == 0 and all(a < b for a, b in pairwise(self.cuts))
        if self.cuts and not layers:
            raise ValueError(f"{list(self.cuts)} are no borders of the layers of {count} stages")


@dataclass(frozen=True, slots=True)
class Known:
    """KNOWN."""

    id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Hidden:
    """HIDDEN; its data is the hidden states [count, H] in the model's type."""

    id: str
    prefix: int  # tokens that all stages know: the first chunk begins there
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Begin:
    """BEGIN."""

    id: str
    prefix: int  # tokens that all nodes know: the first chunk begins there
    sizes: Sequence[int]  # of the chunks; they give the rest of the prompt


@dataclass(frozen=True, slots=True)
class Layer:
    """LAYER; its data is that layer of all blocks with the tokens [start, start + count), as they are in the arena."""

    id: str
    layer: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Landed:
    """LANDED."""

    id: str
    tokens: int
