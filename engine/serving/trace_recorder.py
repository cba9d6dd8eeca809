"""Live traffic as a trace in Mooncake's format, one line per request, for the simulator and for others.

A line has when the request came, how long prompt and answer were, and for every block of 512 tokens a number that
stands for the block and everything before it: equal prefixes have equal numbers, on every node and in every file, and
nothing of the text can be read from them but by guessing it. Lines are written when requests end, so sort by timestamp.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import orjson

from engine.line_file import LineFile

BLOCK_TOKENS = 512
ID_BITS = 52
"""Exact in every reader's floating point; a billion blocks have one chance in nine thousand to share a number."""


class TraceRecorder:
    """Appends to a file. Raises OSError when it cannot be opened."""

    def __init__(self, path: Path, started: float) -> None:
        """started: what timestamps count from, unix seconds."""
        self._file = LineFile(path, "--record-trace")
        self._started = started

    def ended(self, accepted: float, prompt: Sequence[int], output_tokens: int, service_class: str) -> None:
        """A request is over: accepted at unix seconds, with at least one token of output."""
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
    """One number per block of the prompt, the last, shorter one included."""
    ids, chain = [], b""
    for begin in range(0, len(prompt), BLOCK_TOKENS):
        chain = blake2b(chain + array("I", prompt[begin : begin + BLOCK_TOKENS]).tobytes(), digest_size=16).digest()
        ids.append(int.from_bytes(chain[:8], "little") >> (64 - ID_BITS))
    return ids
