"""A client's view while a holder of its values is killed or hangs: the longest get, and wrong bytes. The signals are
SIGKILL and SIGSTOP. With one copy, a value of a dead holder is missing; with two copies, no value is."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from cache.store.client import Store
from lab.faults.checks import form
from lab.faults.runner import Run
from lab.faults.soak.load import VALUE, content, key_of
from lab.launch.cluster import LocalCluster

KEYS = 150
BEFORE_S, AFTER_S = 0.3, 1.2
FLAGS = ("--model", "none", "--value-bytes", str(VALUE), "--dram-bytes", "32M")


class Gets:
    """One client's gets in a thread, one after the other, each timed. `failed`: the error of the first one that raised,
    which is the last one."""

    def __init__(self, store: Store, rng: random.Random) -> None:
        self.rows: list[tuple[float, float, bool, bool]] = []  # begin, seconds, found, wrong
        self.failed: Exception | None = None
        self._store, self._rng = store, rng
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            i = self._rng.randrange(KEYS)
            begin = time.monotonic()
            try:
                value = self._store.get(key_of(i))
            except Exception as error:  # a get that finds nothing returns None
                self.failed = error
                return
            wrong = value is not None and value != content(i)
            self.rows.append((begin, time.monotonic() - begin, value is not None, wrong))

    def end(self) -> None:
        """Raises RuntimeError if the gets have ended before: what came later was not read."""
        self._stop.set()
        self._thread.join()
        if self.failed is not None:
            raise RuntimeError(f"a get failed: {self.failed!r}") from self.failed


def holders(this: Run, times: int, replicas: int, number: int, seed: int, transports: Sequence[str]) -> dict[str, Any]:
    """Send signal `number` to one of three nodes, `times` times. Returns milliseconds: the longest get before and
    after, and the longest that found nothing."""
    rng = random.Random(seed)
    longest: list[float] = []
    counts: dict[str, Any] = {"gets": 0, "misses": 0, "wrong": 0, "before_ms": 0.0, "miss_ms": 0.0}
    flags = (*FLAGS, "--replicas", str(replicas))
    with this.cluster("store=3", flags) as nodes:
        for turn in range(times):
            with Store(nodes.nodes[0].url.removeprefix("http://"), transports=transports) as store:
                store.put_many([(key_of(i), content(i)) for i in range(KEYS)])
                gets = Gets(store, rng)
                victim = nodes.nodes[1 + turn % 2]
                time.sleep(BEFORE_S)
                killed = time.monotonic()
                _harm(nodes, victim.name, number)
                time.sleep(AFTER_S)
                gets.end()
            _mend(nodes, victim.name, number)
            after = [row for row in gets.rows if row[0] + row[1] >= killed]
            longest.append(1e3 * max(row[1] for row in after))
            missed = [1e3 * row[1] for row in after if not row[2]]
            counts["gets"] += len(gets.rows)
            counts["misses"] += len(missed)
            counts["wrong"] += sum(row[3] for row in gets.rows)
            counts["miss_ms"] = max([counts["miss_ms"], *missed])
            counts["before_ms"] = max([counts["before_ms"], *(1e3 * row[1] for row in gets.rows if row not in after)])
    longest.sort()
    return counts | {"longest_ms": longest[-1], "median_ms": longest[len(longest) // 2], "replicas": replicas}


def _harm(nodes: LocalCluster, name: str, number: int) -> None:
    if number == signal.SIGKILL:
        nodes.kill(name)
    else:
        nodes[name].process.send_signal(number)


def _mend(nodes: LocalCluster, name: str, number: int) -> None:
    if number == signal.SIGKILL:
        nodes.restart(name)
    else:
        nodes[name].process.send_signal(signal.SIGCONT)
    form(nodes)


def harmed_holders(this: Run, seed: int, times: int) -> Iterator[dict[str, Any]]:
    """Both signals, with one copy and with two. Over TCP clients cannot read from a stopped holder, so one copy would
    only show a deadline."""
    near, far = ("shm", "tcp"), ("tcp",)
    cases = [
        *(("kill -9", signal.SIGKILL, replicas, near) for replicas in (1, 2)),
        *(("hangs", signal.SIGSTOP, replicas, near) for replicas in (1, 2)),
        ("hangs, over TCP", signal.SIGSTOP, 2, far),
    ]
    for name, number, replicas, transports in cases:
        yield {"what": f"holder: {name}", **holders(this, times, replicas, number, seed, transports)}
