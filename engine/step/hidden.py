"""Hidden states between the stages of a pipeline: what one stage computed, as bytes, and in the order of tokens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor


def to_bytes(hidden: Tensor) -> memoryview:
    """The bytes of hidden states [T, H] on the CPU, without a copy."""
    return hidden.contiguous().view(torch.uint8).numpy().data.cast("B")


def from_bytes(data: memoryview, count: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
    """Hidden states [count, hidden_size] of these bytes, without a copy. Raises ValueError if the sizes differ."""
    if len(data) != count * hidden_size * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are not {count} hidden states of {hidden_size} {dtype}")
    return torch.frombuffer(data, dtype=dtype).view(count, hidden_size)


@dataclass(slots=True)
class HiddenQueue:
    """Hidden states that have arrived and are not computed yet. Only the event loop changes it."""

    start: int = 0  # the token of the first one
    pieces: deque[Tensor] = field(default_factory=deque)

    @property
    def end(self) -> int:
        return self.start + sum(map(len, self.pieces))

    def add(self, piece: Tensor) -> None:
        self.pieces.append(piece)

    def take(self, start: int, count: int) -> Tensor:
        """Hidden states [count, H] of the tokens from `start` on; they stay here. Any thread may call this."""
        found = torch.cat(list(self.pieces))[start - self.start :][:count]
        assert len(found) == count, "the batcher schedules only tokens whose hidden states are here"
        return found

    def drop_before(self, start: int) -> int:
        """Forget the pieces that end at or before token `start`. Returns their number."""
        dropped = 0
        while self.pieces and self.start + len(self.pieces[0]) <= start:
            self.start += len(self.pieces.popleft())
            dropped += 1
        return dropped
