"""Lowers the priority of the model's threads, so that the event loop runs first if both need the same core.

The loop needs a core for 0.1 ms at a time. A model step takes all cores for many milliseconds; at equal priority it
makes the loop wait for whole time slices. Linux gives a thread at nice 5 a third of the time of one at nice 0, and lets
the latter interrupt it sooner. With idle cores this costs nothing. Other processes on the same cores also go first;
--engine-nice 0 shares evenly.
"""

from __future__ import annotations

import os
import threading

NICEST = 19


def step_back(nice: int) -> None:
    """Add `nice` to the niceness of the calling thread and of threads it starts later (its OpenMP team)."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, min(NICEST, os.getpriority(os.PRIO_PROCESS, thread) + nice))
