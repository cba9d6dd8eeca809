"""Slows processes down by a duty cycle: SIGSTOP and SIGCONT in turn, in periods of some milliseconds.

It stands for a machine that computes at `share` of the speed. It needs no cgroups, so no root. The periods are far
below every deadline between nodes: a node that gossip probes answers some milliseconds later, and nobody suspects it.

A process of its own sends the signals, because this one is a busy client. It ends when the pipe from its owner closes,
whatever ended the owner, and its last signal to each process is SIGCONT. The owner sends another one. The owner names
processes by descriptors that it opens, so a signal never reaches a later process with the same id.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

PERIOD_S = 0.01
LONGEST_STOPS = 4
END_S = 10.0


@dataclass(slots=True)
class Duty:
    """`ran`: the share of the time in which the processes could run, as measured; NaN before the end."""

    ran: float = float("nan")


@contextmanager
def slowed(pids: Sequence[int], share: float) -> Iterator[Duty]:
    """These processes run for `share` of the time until the end of the context. Raises ValueError if `share` is not
    between 0 and 1, OSError if a process is gone, ChildProcessError if the duty cycle has broken off."""
    if not 0 < share < 1:
        raise ValueError(f"a duty cycle runs for a share between 0 and 1 of the time, not {share:g}")
    duty = Duty()
    handles: list[int] = []
    try:
        handles += [os.pidfd_open(pid) for pid in pids]
        with subprocess.Popen(
            [sys.executable, "-I", __file__, str(share), str(PERIOD_S), *map(str, handles)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=handles,
            start_new_session=True,  # Ctrl-C is for the owner
        ) as process:
            try:
                yield duty
            finally:
                told = _ended(process)
    finally:
        for handle in handles:
            _send(handle, signal.SIGCONT)
            os.close(handle)
    if process.returncode:
        raise ChildProcessError(f"the duty cycle ended with exit code {process.returncode}: the figures are void")
    duty.ran = float(told)


def _ended(process: subprocess.Popen[bytes]) -> bytes:
    """Its last words."""
    try:
        return process.communicate(timeout=END_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


def _send(handle: int, number: signal.Signals) -> None:
    """To a process that may have ended."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, number)


# --- the process that sends the signals


def alternate(handles: Sequence[int], share: float, period_s: float, pipe: int) -> float:
    """SIGSTOP and SIGCONT to all in turn until `pipe` is closed. Returns the share of the time in which they ran.

    A busy machine wakes this process late. So a stop lasts until they have run for `share` of all time, but no longer
    than LONGEST_STOPS periods.
    """
    begun = time.monotonic()
    ran_s, begin = 0.0, begun
    while not _closed(pipe, begin + share * period_s - time.monotonic()):
        for handle in handles:
            _send(handle, signal.SIGSTOP)
        stopped = time.monotonic()
        ran_s += stopped - begin
        end = min(begun + ran_s / share, stopped + LONGEST_STOPS * period_s)
        closed = _closed(pipe, end - time.monotonic())
        for handle in handles:
            _send(handle, signal.SIGCONT)
        begin = time.monotonic()
        if closed:
            break
    now = time.monotonic()
    return (ran_s + now - begin) / (now - begun)


def _closed(pipe: int, wait_s: float) -> bool:
    """Whether the owner is gone, after at most that long."""
    return bool(select.select([pipe], [], [], max(0.0, wait_s))[0])


def _end(signum: int, frame: object) -> NoReturn:
    raise SystemExit(128 + signum)


def main(words: Sequence[str]) -> int:
    share, period_s, handles = float(words[0]), float(words[1]), [int(word) for word in words[2:]]
    signal.signal(signal.SIGTERM, _end)
    try:
        ran = alternate(handles, share, period_s, sys.stdin.fileno())
    finally:
        for handle in handles:
            _send(handle, signal.SIGCONT)
    print(ran)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
