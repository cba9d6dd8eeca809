"""Log probabilities at one position, and those of a whole prompt.

Those of a prompt are kept as arrays of numbers: for a long prompt, tens of thousands of objects would block the event
loop while they are created. A reader gets one object at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from engine.sampling.params import TokenLogprobs

NUMBER_BYTES = 4
"""Of a value and of an id."""


class PromptLogprobs(Sequence[TokenLogprobs]):
    """Log probabilities of prompt tokens 1, 2, ...; all have the same number of alternatives.

    values  float32, 1 + top for each token: its own log probability, then those of the alternatives
    ids     uint32, 1 + top for each token: its rank, then the ids of the alternatives
    """

    def __init__(self, found: Iterable[TokenLogprobs] = ()) -> None:
        self._values, self._ids = array("f"), array("I")
        self._top = 0
        for one in found:
            self.append(one)

    def append(self, one: TokenLogprobs) -> None:
        """Raises ValueError if the number of alternatives differs from that of earlier tokens."""
        if not self._values:
            self._top = len(one.top)
        if len(one.top) != self._top:
            raise ValueError(f"{len(one.top)} alternatives, but earlier tokens have {self._top}")
        self._values.append(one.logprob)
        self._values.extend([logprob for _, logprob in one.top])
        self._ids.append(one.rank)
        self._ids.extend([token_id for token_id, _ in one.top])

    @property
    def top(self) -> int:
        """Number of alternatives per token."""
        return self._top

    def pack(self) -> list[bytes]:
        """The data of a message; as JSON it would be megabytes."""
        return [self._values.tobytes(), self._ids.tobytes()]

    @classmethod
    def unpack(cls, count: int, top: int, data: memoryview) -> PromptLogprobs:
        """Raises ValueError if the size of the data does not fit `count` tokens with `top` alternatives each."""
        border = count * (1 + top) * NUMBER_BYTES
        if count < 0 or top < 0 or len(data) != 2 * border:
            raise ValueError(f"{len(data)} bytes do not fit {count} tokens with {top} alternatives each")
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

    __hash__ = None  # type: ignore[assignment]  # it is mutable

    def _at(self, place: int) -> TokenLogprobs:
        begin = place * (1 + self._top)
        end = begin + 1 + self._top
        own, *others = self._values[begin:end]
        rank, *best = self._ids[begin:end]
        return TokenLogprobs(own, list(zip(best, others, strict=True)), rank)
