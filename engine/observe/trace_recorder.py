"""Records live traffic as a trace in Mooncake's format, one line per request, for the simulator and other tools.

A line has the arrival time, the lengths of prompt and answer, and one number per block of 512 tokens. The number
identifies the block and everything before it. Equal prefixes have equal numbers on every node and in every file. To
learn text from the numbers, one must guess a whole block. The recorder writes lines when requests end, so sort them by
timestamp.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import orjson

from engine.observe.line_file import LineFile

BLOCK_TOKENS = 512
ID_BITS = 52
"""A float64 represents the number exactly. Two of a billion blocks share a number with a chance of 1 in 9,000."""


class TraceRecorder:
    """Appends to a file. Raises OSError if it cannot be opened."""

    def __init__(self, path: Path, started: float) -> None:
        """started: the origin of the timestamps, unix seconds."""
        self._file = LineFile(path, "--record-trace")
        self._started = started

    def ended(self, accepted: float, prompt: Sequence[int], output_tokens: int, service_class: str) -> None:
        """A request with at least one output token has ended. accepted: unix seconds."""
        row = {
            "timestamp": round(1000 * (accepted - self._started), 3),
            "input_length": len(prompt),
            "output_length": output_tokens,
            "hash_ids": hash_ids(prompt),
            "service_class": service_class,
        }
        self._file.add(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        self._file.close()


def hash_ids(prompt: Sequence[int]) -> list[int]:
    """One number per block of the prompt, including the last, partial one."""
    ids, chain = [], b""
    for begin in range(0, len(prompt), BLOCK_TOKENS):
        chain = blake2b(chain + array("I", prompt[begin : begin + BLOCK_TOKENS]).tobytes(), digest_size=16).digest()
        ids.append(int.from_bytes(chain[:8], "little") >> (64 - ID_BITS))
    return ids
