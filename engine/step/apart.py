"""Apart: a request that passes the model by itself, not as a row of the ragged batch, and a few layers at a time. Pure.

Its tokens may stay between two layers while steps without it run. Two kinds of requests do so: a part of a long prompt
(part.py), because a chunk takes long and others come meanwhile, and a request beyond memory (cold.py), because a step
over many cold blocks does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True, slots=True)
class Apart(ABC):
    """`pending`, `layer` change only on the event loop, between steps; `hidden`, `spent_s` in the engine thread too."""

    pending: int = 0  # tokens that have passed the layers before `layer`; 0: none
    layer: int = 0
    hidden: Any = None  # engine.model.decoder.Between: where they are, and with what; None: nowhere yet
    spent_s: float = 0.0  # on them, in steps

    @property
    @abstractmethod
    def span(self) -> range:
        """The layers that this node computes."""

    @property
    @abstractmethod
    def model_layers(self) -> int:
        """How many the model has."""

    @property
    def layers_left(self) -> range:
        """Those that the next tokens have yet to pass."""
        return range(self.layer if self.pending else self.span.start, self.span.stop)

    def passed(self, count: int, layer: int) -> None:
        """`count` tokens go on at that layer in the next step; 0: none."""
        self.pending, self.layer = count, layer
        if not count:
            self.hidden, self.spent_s = None, 0.0

    def spent(self, seconds: float, hidden: Any) -> None:
        """A step took its tokens through some layers. hidden: None behind the last one."""
        self.spent_s += seconds
        self.hidden = hidden
