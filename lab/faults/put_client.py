"""One client of scripts/faults.py put-histories in a separate process: it may be on the other side of a cut.

    MOONCAKE_API_KEY=... python lab/faults/put_client.py ADDRESS NAME SEED

It opens the store and prints `open`. Then it reads lines of the form [puts, gets], two lists of key numbers. It puts
and gets each key once, several at a time in a random order, and prints its operations as one line of JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any

from cache.store.client import Store, StoreError

CONCURRENT_CALLS = 8

Row = tuple[int, str, float, float, str | None, Any, bool]
"""(number of the key, kind, called, returned, value, answer, failed)"""


def key_of(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def value_of(name: str, number: int) -> str:
    return f"{name} says {number}"


def work(store: Store, name: str, rng: random.Random, puts: list[int], gets: list[int]) -> Iterator[Row]:
    """Each operation once. Times are the machine's clock, so those of several clients can be compared."""

    def one(step: tuple[str, int]) -> Row:
        kind, number = step
        called = time.monotonic()
        if kind == "get":
            found = store.get(key_of(number))
            return number, kind, called, time.monotonic(), None, None if found is None else found.decode(), False
        value = value_of(name, number)
        try:
            answer, failed = store.put(key_of(number), value.encode()), False
        except StoreError:
            answer, failed = False, True
        return number, kind, called, time.monotonic(), value, answer, failed

    steps = [("put", number) for number in puts] + [("get", number) for number in gets]
    rng.shuffle(steps)
    with ThreadPoolExecutor(CONCURRENT_CALLS) as threads:
        yield from threads.map(one, steps)


def main() -> int:
    address, name, seed = sys.argv[1:]
    rng = random.Random(f"{seed} {name}")
    with Store(address, api_key=os.environ["MOONCAKE_API_KEY"], transports=("tcp",)) as store:
        print("open", flush=True)
        for line in sys.stdin:
            puts, gets = json.loads(line)
            print(json.dumps(list(work(store, name, rng, puts, gets))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
