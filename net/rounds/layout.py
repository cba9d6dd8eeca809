"""Where the parts of a message lie. Pure.

    rows           [most_rows, hidden]              elements, or codes of one byte: int8, or fp8 (E4M3)
    scales         [most_rows] float32              of the codes
    pair_rows      [most_rows * top_k] int32        a pair is one token at one expert: its row of this message,
    pair_slots     [most_rows * top_k] int32        the place of the expert on the rank that gets the message,
    pair_weights   [most_rows * top_k] float32      and the factor of its result

Parts begin at multiples of a page, so that a short message touches few pages. An answer is rows [most_rows, hidden].
"""

from __future__ import annotations

from dataclasses import dataclass

TYPES = ("float32", "float16", "bfloat16")
"""Element types, in the order of rows.h."""
CODES = ("none", "int8", "fp8")
"""How rows travel, in the order of rows.h."""

PAGE = 4096


@dataclass(frozen=True, slots=True)
class Layout:
    """Of all messages to one rank. Raises ValueError for another element type."""

    most_rows: int
    hidden: int
    top_k: int
    dtype: str  # of TYPES
    codes: str = "none"  # of CODES; but for none, each row has a scale

    def __post_init__(self) -> None:
        if self.dtype not in TYPES:
            raise ValueError(f"rows of {self.dtype} cannot be sent: only {', '.join(TYPES)}")

    @property
    def coded(self) -> int:
        """How rows travel, as rounds.c counts; 0: as elements."""
        return CODES.index(self.codes)

    @property
    def item_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def answer_bytes(self) -> int:
        return pages(self.most_rows * self.hidden * self.item_bytes)

    @property
    def sent_row_bytes(self) -> int:
        """Of one row on its way to a rank."""
        return self.hidden + 4 if self.coded else self.hidden * self.item_bytes

    @property
    def at_scales(self) -> int:
        return pages(self.most_rows * self.hidden * (1 if self.coded else self.item_bytes))

    @property
    def at_pair_rows(self) -> int:
        return self.at_scales + (pages(self.most_rows * 4) if self.coded else 0)

    @property
    def at_pair_slots(self) -> int:
        return self.at_pair_rows + pages(self.most_rows * self.top_k * 4)

    @property
    def at_pair_weights(self) -> int:
        return self.at_pair_slots + pages(self.most_rows * self.top_k * 4)

    @property
    def message_bytes(self) -> int:
        return self.at_pair_weights + pages(self.most_rows * self.top_k * 4)

    def parts(self, rows: int, pairs: int) -> list[tuple[int, int]]:
        """(offset, bytes) of what a message with so much in it fills. Raises ValueError if there is no room for it."""
        if not (0 <= rows <= self.most_rows and 0 <= pairs <= self.most_rows * self.top_k):
            raise ValueError(f"{rows} rows and {pairs} pairs are no message of at most {self.most_rows} rows")
        of_row = self.hidden if self.coded else self.hidden * self.item_bytes
        filled = [(0, rows * of_row), (self.at_scales, rows * 4 if self.coded else 0)]
        filled += [(at, pairs * 4) for at in (self.at_pair_rows, self.at_pair_slots, self.at_pair_weights)]
        return [part for part in filled if part[1]]

    def answer_part(self, rows: int) -> int:
        """Bytes that the answer to `rows` rows fills."""
        return rows * self.hidden * self.item_bytes


def pages(nbytes: int) -> int:
    """`nbytes`, rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE
