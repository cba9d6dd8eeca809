"""How much more two processes compute at once than one: cores that share units, memory or background work give less.

Each process has one thread, on a core of its own, and multiplies float32 matrices that fit into its caches:

    python -m lab.bench.common.cores CORE BEGIN SECONDS      prints products per second from time BEGIN on
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

SECONDS = 2.0
LEAD_S = 8.0
"""Between the start of the processes and their work: they load torch meanwhile."""
TIMEOUT_S = 60.0
"""For a process to end after its work should have begun."""

WIDTH = 256


def two_at_once() -> float:
    """Products per second of two processes at once over those of one alone; 2 where nothing is shared. Takes about 20
    seconds. Raises RuntimeError with the error output of a process that failed."""
    alone = (_rates([0])[0] + _rates([1])[0]) / 2
    return sum(_rates([0, 1])) / alone


def _rates(cores: Sequence[int]) -> list[float]:
    """Of one process for each of these cores, by their place among those of this process."""
    own, root = sorted(os.sched_getaffinity(0)), Path(__file__).resolve().parents[3]
    begin = time.time() + LEAD_S
    commands = [[sys.executable, "-m", __name__, str(own[core % len(own)]), str(begin), str(SECONDS)] for core in cores]
    running = [subprocess.Popen(one, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for one in commands]
    try:
        answers = [one.communicate(timeout=LEAD_S + TIMEOUT_S) for one in running]
    except subprocess.TimeoutExpired as late:
        raise RuntimeError("the cores could not be measured: a process did not end") from late
    finally:
        for one in running:
            one.kill()
            one.wait()
    for one, (_, error) in zip(running, answers, strict=True):
        if one.returncode:
            raise RuntimeError(f"the cores could not be measured:\n{error.decode()[-2000:]}")
    return [float(out) for out, _ in answers]


def products_per_s(core: int, begin: float, seconds: float) -> float:
    """In this process, which stays on `core`."""
    import torch

    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    a = torch.full((WIDTH, WIDTH), 1 / WIDTH)
    if (late := time.time() - begin) > 0:
        sys.exit(f"torch was loaded {late:.1f} s too late: the processes would not compute at once")
    time.sleep(-late)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        a @ a
        count += 1
    return count / (time.perf_counter() - began)


if __name__ == "__main__":
    print(products_per_s(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
