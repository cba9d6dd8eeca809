"""Progress of loading weights: a bar on a terminal, at most ten lines in a log."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger("mooncake.node")


class Progress:
    """Call it with (done, total) bytes, from one thread."""

    def __init__(self) -> None:
        self._percent = 0

    def __call__(self, done: int, total: int) -> None:
        percent = 100 * done // max(1, total)
        if sys.stderr.isatty() and percent > self._percent:
            bar, end = "#" * (percent // 5), "\n" if done == total else ""
            print(f"\rloading weights [{bar:.<20}] {percent} %", end=end, file=sys.stderr, flush=True)
        elif percent // 10 > self._percent // 10:
            log.info("loading weights: %d %%", percent)
        self._percent = percent
