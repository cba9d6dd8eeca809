"""One end of the transfers of mooncake.engine, in a process that has upstream's module or ours.

It imports nothing else of ours.

    python engine_program.py owner                    prints [port, address of its memory], ends with its input
    python engine_program.py client SESSION ADDRESS   transfers between its memory and that of the owner
    python engine_program.py memcpy                   copies within its memory, for comparison

The last two print "ready", then read one JSON question per line and print one JSON answer: the seconds of each call.
Every call moves other bytes than the one before, as blocks of a KV cache do: neither side's bytes are in a cache.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

NBYTES = 64 << 20  # of the memory of each side
CALLS_MAX = 512  # different calls of a round
CHECKED = 2  # calls of a round whose bytes are compared

Places = tuple[list[int], list[int], list[int]]
"""The arguments of one call: local addresses, remote addresses, lengths."""


def memory() -> tuple[mmap.mmap, int]:
    """(owner, address) of NBYTES that are all mapped."""
    made = mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(made))
    ctypes.memset(address, 1, NBYTES)
    return made, address


def opened(address: int) -> Any:
    """An engine that listens, with that memory."""
    engine = import_module("mooncake.engine").TransferEngine()
    for code in (
        engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""),
        engine.register_memory(address, NBYTES),
    ):
        if code:
            sys.exit(f"the start answered {code}")
    return engine


class Client:
    """Transfers between the memory of two programs."""

    def __init__(self, session: str, remote: int) -> None:
        self._memory, self.local = memory()
        self.remote = remote
        self._session = session
        self._engine = opened(self.local)

    def call(self, op: str, places: Places) -> Callable[[], None]:
        """One call that moves the bytes."""
        local, remote, lengths = places
        single = len(lengths) == 1
        move = getattr(self._engine, f"transfer_sync_{op}" if single else f"batch_transfer_sync_{op}")
        given = (local[0], remote[0], lengths[0]) if single else places

        def run() -> None:
            if code := move(self._session, *given):
                sys.exit(f"{op} answered {code}")

        return run


class Memcpy:
    """The same copies within one program."""

    def __init__(self) -> None:
        self._here, self.local = memory()
        self._there, self.remote = memory()

    def call(self, op: str, places: Places) -> Callable[[], None]:
        """One call that moves the bytes."""
        local, remote, lengths = places
        pairs = (local, remote) if op == "read" else (remote, local)
        rows = list(zip(*pairs, lengths, strict=True))
        first = rows[0]

        def copy_one() -> None:
            _copy(*first)

        def copy_all() -> None:
            for row in rows:
                _copy(*row)

        return copy_one if len(rows) == 1 else copy_all


_copy = ctypes.memmove


def places(mover: Client | Memcpy, size: int, pieces: int, count: int) -> list[Places]:
    """The calls of a round in turn. A value's pieces are as far apart as the layers of a KV cache; neighbours on one
    side are none on the other."""
    length, layer = size // pieces, NBYTES // pieces
    slots = layer // length
    found = []
    for first in range(0, min(slots // count, CALLS_MAX) * count, count):
        values = range(first, first + count)
        here = [j * layer + i * length for i in values for j in range(pieces)]
        there = [j * layer + (slots - 1 - i) * length for i in values for j in range(pieces)]
        local, remote = [mover.local + at for at in here], [mover.remote + at for at in there]
        found.append((local, remote, [length] * len(local)))
    return found


def fill(rows: Places) -> list[bytes]:
    """New bytes in the local places."""
    made = [os.urandom(length) for length in rows[2]]
    for address, content in zip(rows[0], made, strict=True):
        ctypes.memmove(address, content, len(content))
    return made


def clear(rows: Places) -> None:
    """Zeros in the local places."""
    for address, length in zip(rows[0], rows[2], strict=True):
        ctypes.memset(address, 0, length)


def measure(mover: Client | Memcpy, op: str, size: int, pieces: int, count: int, seconds: float) -> list[float]:
    """Seconds of each call; the bytes of some are compared."""
    rows = places(mover, size, pieces, count)
    checked = rows[:CHECKED]
    contents = [fill(row) for row in checked]
    if op == "read":
        for row in checked:
            mover.call("write", row)()
            clear(row)
    calls = [mover.call(op, row) for row in rows]
    took: list[float] = []
    now = time.perf_counter
    end = now() + seconds
    number = 0
    while number < len(checked) or now() < end:
        call = calls[number % len(calls)]
        begun = now()
        call()
        took.append(now() - begun)
        number += 1
    for row, content in zip(checked, contents, strict=True):
        if op == "write":
            clear(row)
            mover.call("read", row)()
        if any(ctypes.string_at(at, len(part)) != part for at, part in zip(row[0], content, strict=True)):
            sys.exit(f"{op} of {size} bytes gave other bytes")
    return took


def main() -> None:
    """Called with the program's arguments."""
    kind, *rest = sys.argv[1:]
    if kind == "owner":
        _kept, address = memory()
        engine = opened(address)
        print(json.dumps([engine.get_rpc_port(), address]), flush=True)
        sys.stdin.read()
        return
    mover = Memcpy() if kind == "memcpy" else Client(rest[0], int(rest[1]))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        try:
            print(json.dumps(measure(mover, **asked)), flush=True)
        except SystemExit as error:
            print(json.dumps(f"{asked}: {error}"), flush=True)
            raise


if __name__ == "__main__":
    main()
