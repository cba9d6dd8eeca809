"""Log probabilities at one position, and those of a whole prompt.

A prompt's are kept as numbers: as objects those of a long one would be tens of thousands, and the event loop would
stand still while they are made. A reader gets one object at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from engine.sampling.params import TokenLogprobs

WIDTH = 4
"""Bytes of a number, of either kind."""


class PromptLogprobs(Sequence[TokenLogprobs]):
    """Of prompt tokens 1, 2, ...; all have the same number of others beside them.

    values  float32, 1 + top for each token: its own log probability, then those of the others
    ids     uint32, 1 + top for each token: its rank, then the ids of the others
    """

    def __init__(self, found: Iterable[TokenLogprobs] = ()) -> None:
        self._values, self._ids = array("f"), array("I")
        self._top = 0
        for one in found:
            self.append(one)

    def append(self, one: TokenLogprobs) -> None:
        """Raises ValueError when it has not as many others as those before it."""
        if not self._values:
            self._top = len(one.top)
        if len(one.top) != self._top:
            raise ValueError(f"{len(one.top)} others where every token before had {self._top}")
        self._values.append(one.logprob)
        self._values.extend([logprob for _, logprob in one.top])
        self._ids.append(one.rank)
        self._ids.extend([token_id for token_id, _ in one.top])

    @property
    def top(self) -> int:
        """How many others each token has."""
        return self._top

    def pack(self) -> list[bytes]:
        """The data of a message; as JSON it would be megabytes."""
        return [self._values.tobytes(), self._ids.tobytes()]

    @classmethod
    def unpack(cls, count: int, top: int, data: memoryview) -> PromptLogprobs:
        """Raises ValueError when the data has another size than `count` tokens with `top` others each."""
        border = count * (1 + top) * WIDTH
        if count < 0 or top < 0 or len(data) != 2 * border:
            raise ValueError(f"{len(data)} bytes are no log probabilities of {count} tokens and {top} others each")
        read = cls()
        read._top = top
        read._values.frombytes(data[:border])
        read._ids.frombytes(data[border:])
        return read

    def __len__(self) -> int:
        return len(self._values) // (1 + self._top)

    @overload
    def __getitem__(self, at: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, at: slice) -> list[TokenLogprobs]: ...

    def __getitem__(self, at: int | slice) -> TokenLogprobs | list[TokenLogprobs]:
        places = range(len(self))[at]
        return self._at(places) if isinstance(places, int) else [self._at(place) for place in places]

    def __iter__(self) -> Iterator[TokenLogprobs]:
        return map(self._at, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PromptLogprobs):
            return NotImplemented
        return (self._top, self._values, self._ids) == (other._top, other._values, other._ids)

    def __repr__(self) -> str:
        return f"PromptLogprobs({list(self)!r})"

    __hash__ = None  # type: ignore[assignment]  # it grows

    def _at(self, place: int) -> TokenLogprobs:
        begin = place * (1 + self._top)
        end = begin + 1 + self._top
        own, *others = self._values[begin:end]
        rank, *best = self._ids[begin:end]
        return TokenLogprobs(own, list(zip(best, others, strict=True)), rank)
