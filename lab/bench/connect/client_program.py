"""A client of mooncake.store in a process that has upstream's module or ours; it imports nothing else of ours.

    python client_program.py ADDRESS SEGMENT_BYTES

It prints "ready", then reads one JSON question per line and prints one JSON answer: the seconds of each call.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from importlib import import_module
from typing import Any

BUFFER_BYTES = 256 << 20
SETS = 6  # of keys that gets take turns on
MOST_BYTES = 96 << 20  # of fresh values in one round of puts
SMALL_BYTES = 64 << 10
MOST_SMALL, MOST_LARGE = 3000, 150  # values of a round: each takes a slot of the pool


class Client:
    """Puts and gets values of equal pieces between the pool and its own memory."""

    def __init__(self, address: str, segment_bytes: int) -> None:
        self.store = import_module("mooncake.store").MooncakeDistributedStore()
        code = self.store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, BUFFER_BYTES, "tcp", "", address)
        if code:
            sys.exit(f"setup answered {code}")
        self._memory = ctypes.create_string_buffer(64 << 20)
        self._at = ctypes.addressof(self._memory)
        ctypes.memset(self._at, 1, len(self._memory))
        self.store.register_buffer(self._at, len(self._memory))
        self._run = f"{os.getpid()}-{time.time_ns()}"
        self._number = 0

    def keys(self, count: int) -> list[str]:
        self._number += 1
        return [f"{self._run}/{self._number}/{i}" for i in range(count)]

    def places(self, size: int, pieces: int, count: int) -> tuple[list[list[int]], list[list[int]]]:
        """Addresses and sizes of `count` values of `size` bytes in `pieces`."""
        length = size // pieces
        starts = [self._at + i * size for i in range(count)]
        return [[start + j * length for j in range(pieces)] for start in starts], [[length] * pieces] * count

    def put(self, keys: list[str], size: int, pieces: int) -> None:
        where, lengths = self.places(size, pieces, len(keys))
        if len(keys) == 1 and pieces == 1:
            ends = [self.store.put_from(keys[0], where[0][0], size)]
        else:
            ends = self.store.batch_put_from_multi_buffers(keys, where, lengths)
        if any(ends):
            sys.exit(f"put answered {ends}")

    def get(self, keys: list[str], size: int, pieces: int) -> None:
        where, lengths = self.places(size, pieces, len(keys))
        if len(keys) == 1 and pieces == 1:
            ends = [self.store.get_into(keys[0], where[0][0], size)]
        else:
            ends = self.store.batch_get_into_multi_buffers(keys, where, lengths)
        if ends != [size] * len(keys):
            sys.exit(f"get answered {ends}")

    def measure(self, op: str, size: int, pieces: int, count: int, seconds: float) -> list[float]:
        """Seconds of each call. Values are removed again."""
        took: list[float] = []
        nbytes = size * count
        fill = os.urandom(nbytes)
        ctypes.memmove(self._at, fill, nbytes)
        most = min(MOST_BYTES // nbytes, (MOST_SMALL if size <= SMALL_BYTES else MOST_LARGE) // count)
        sets = [self.keys(count) for _ in range(min(SETS, most) if op == "get" else most)]
        if op == "get":
            for keys in sets:
                self.put(keys, size, pieces)
            ctypes.memset(self._at, 0, nbytes)
        end = time.perf_counter() + seconds
        number = 0
        while not took or (time.perf_counter() < end and (op == "get" or number < len(sets))):
            keys = sets[number % len(sets)]
            begun = time.perf_counter()
            (self.get if op == "get" else self.put)(keys, size, pieces)
            took.append(time.perf_counter() - begun)
            number += 1
        if op == "put":
            ctypes.memset(self._at, 0, nbytes)
            self.get(sets[0], size, pieces)
        if ctypes.string_at(self._at, nbytes) != fill:
            sys.exit(f"{op} of {size} bytes gave other bytes")
        self.store.batch_remove([key for keys in sets for key in keys], True)
        return took


def main(address: str, segment_bytes: int) -> None:
    client = Client(address, segment_bytes)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        try:
            print(json.dumps(client.measure(**asked)), flush=True)
        except SystemExit as error:
            print(json.dumps(f"{asked}: {error}"), flush=True)
            raise


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
