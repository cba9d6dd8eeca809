"""Messages between the stages of a pipeline, and from them to the decode node: their kinds and bodies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

KNOWN = "engine.stage.known"  # stage -> first stage: my blocks hold so much of the prompt's prefix
HIDDEN = "engine.stage.hidden"  # stage -> next stage: the hidden states of a chunk; answered when they are computed
LANDED = "engine.stage.landed"  # stage -> decode node: my layers of the first tokens are in your blocks


@dataclass(frozen=True, slots=True)
class StageOf:
    """The place of a node in the pipeline of one prompt; part of PREFILL."""

    index: int  # of this node in `nodes`
    nodes: Sequence[str]  # in the order of the layers
    cuts: Sequence[int]  # stage i computes the layers [cuts[i], cuts[i + 1])

    def __post_init__(self) -> None:
        count = len(self.nodes)
        if count < 2 or not 0 <= self.index < count or len(set(self.nodes)) != count:
            raise ValueError(f"stage {self.index} of {count} nodes is no place in a pipeline")
        if len(self.cuts) != count + 1 or self.cuts[0] != 0 or any(a >= b for a, b in pairwise(self.cuts)):
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
class Landed:
    """LANDED."""

    id: str
    tokens: int
