"""Who goes first where the event loop and the model want the same core: the loop.

It needs a core for a tenth of a millisecond at a time; a model step takes all of them for many milliseconds, and as an
equal it keeps the loop waiting for whole time slices. Linux gives a thread of nice 5 a third of the time of one of nice
0 and lets the other interrupt it sooner. Nobody loses where cores are idle. Other processes on the same cores go first,
too: --engine-nice 0 shares evenly.
"""

from __future__ import annotations

import os
import threading

NICEST = 19


def step_back(nice: int) -> None:
    """Make the calling thread, and every thread it starts from now on (its OpenMP team), that much nicer."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, min(NICEST, os.getpriority(os.PRIO_PROCESS, thread) + nice))
