"""OtherProcess: reads and writes any memory of another process of this host (process_vm_readv, process_vm_writev).

The kernel copies once, without the other process. It allows this for processes of one user, unless
/proc/sys/kernel/yama/ptrace_scope or a container forbids it. The other process shows a word of proof: 16 random bytes
and a counter in shared memory, which this process maps. It also keeps a descriptor of the process, and asks it before
every copy whether the process still runs, so that no copy goes to a later process with the same number.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Sequence
from errno import EFAULT
from itertools import chain
from pathlib import Path
from signal import pidfd_send_signal
from struct import Struct, pack
from typing import NamedTuple, Self

from net.errors import TransferError
from net.transfer.common.memory import Region
from net.transfer.common.transport import Op, Unusable

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
IOV_MAX = 1024
WORD = Struct("<16sQ")
COUNT, COUNT_AT = Struct("<Q"), 16
IOVEC = Struct("@2N")
"""struct iovec: address, bytes."""

Move = tuple[int, int, int]
"""(local address, remote address, bytes)"""


_libc = ctypes.CDLL(None, use_errno=True)
_CALLS = {Op.READ: _libc.process_vm_readv, Op.WRITE: _libc.process_vm_writev}
for _call in _CALLS.values():
    _call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_ulong]
    _call.restype = ctypes.c_ssize_t


class Offer(NamedTuple):
    """How another process finds this one."""

    boot: str
    pid: int
    address: int  # of the word of proof
    proof: str  # hex
    memfd: int  # number of the descriptor of the word's memory, in this process


class Word:
    """The word of proof of this process."""

    def __init__(self) -> None:
        self._proof = secrets.token_bytes(16)
        self._memory = Region.shared("word of proof", WORD.size)
        WORD.pack_into(self._memory.memory, 0, self._proof, 0)
        self.count = 0

    def step(self) -> None:
        """Count a change that others must hear of before their next copy."""
        self.count += 1
        COUNT.pack_into(self._memory.memory, COUNT_AT, self.count)

    def offer(self) -> Offer:
        """Raises OSError if the kernel hides the host's identity."""
        boot, memfd = BOOT_ID.read_text().strip(), self._memory.memfd
        assert memfd is not None
        return Offer(boot, os.getpid(), self._memory.address, self._proof.hex(), memfd)

    def close(self) -> None:
        """Nobody is offered anything any more. Idempotent."""
        self._memory.close()


class OtherProcess:
    """The process of an Offer. A copy of a small block takes as long as the Python around it, so there is little."""

    def __init__(self, offer: Offer) -> None:
        """Raises OSError, and ValueError for memory that is no word."""
        self._pid = offer.pid
        self._process = os.pidfd_open(offer.pid)
        try:
            memfd = os.open(f"/proc/{offer.pid}/fd/{offer.memfd}", os.O_RDWR | os.O_CLOEXEC)
            self._word = Region.attach("word of proof", memfd, WORD.size)
        except BaseException:
            os.close(self._process)
            raise
        self._memory = self._word.memory

    @classmethod
    def of(cls, offer: Offer) -> Self:
        """Raises Unusable with the reason."""
        try:
            if BOOT_ID.read_text().strip() != offer.boot:
                raise Unusable("it runs on another host")
        except OSError as error:
            raise Unusable(f"this host hides its identity: {error}") from None
        process = None
        try:
            process = cls(offer)
            process.check(offer)
        except PermissionError:
            reason = "the kernel forbids it (another user, ptrace_scope, or a container)"
        except (OSError, ValueError, TransferError) as error:
            reason = f"same host, but its memory is unreachable (another container?): {error}"
        else:
            return process
        if process is not None:
            process.close()
        raise Unusable(reason)

    def check(self, offer: Offer) -> None:
        """Read the word, in both ways. Raises TransferError if the process has ended or is another one, OSError."""
        copy = ctypes.create_string_buffer(WORD.size)
        self.move(Op.READ, [(ctypes.addressof(copy), offer.address, WORD.size)])
        self.count()
        proof = bytes.fromhex(offer.proof)
        if WORD.unpack(copy)[0] != proof or WORD.unpack_from(self._memory)[0] != proof:
            raise TransferError(f"process {self._pid} is another one by now")

    def count(self) -> int:
        """The counter of its word. Raises TransferError if the process has ended and its number is free; until then
        `move` says that there is no such process."""
        try:
            pidfd_send_signal(self._process, 0)  # none; any thread may ask, as it could not with a poll object
        except ProcessLookupError:
            raise TransferError(f"process {self._pid} has ended") from None
        found: int = COUNT.unpack_from(self._memory, COUNT_AT)[0]
        return found

    def move(self, op: Op, moves: Sequence[Move]) -> None:
        """Copy, after `count`. Any thread may call; the interpreter lock is free meanwhile. Raises OSError, also for an
        address that is not mapped; then some of the bytes may have been copied."""
        call, pid = _CALLS[op], self._pid
        if len(moves) == 1:
            local, remote, length = moves[0]
            moved = call(pid, IOVEC.pack(local, length), 1, IOVEC.pack(remote, length), 1, 0)
            if moved == length:
                return
            if moved <= 0:
                raise self._error(moved)
            moves = _rest(moves, moved)
        for first in range(0, len(moves), IOV_MAX):
            some = moves[first : first + IOV_MAX]
            left = sum([length for _, _, length in some])
            while True:
                count = len(some)
                locals_, remotes, lengths = zip(*some, strict=True)
                form = f"@{2 * count}N"
                here = pack(form, *chain.from_iterable(zip(locals_, lengths, strict=True)))
                there = pack(form, *chain.from_iterable(zip(remotes, lengths, strict=True)))
                if (moved := call(pid, here, count, there, count, 0)) <= 0:
                    raise self._error(moved)
                left -= moved
                if not left:
                    break
                some = _rest(some, moved)  # in Linux a call moves less than 2 GiB

    def _error(self, moved: int) -> OSError:
        error = ctypes.get_errno() if moved < 0 else EFAULT  # nothing is mapped there
        return OSError(error, f"process {self._pid}: {os.strerror(error)}")

    def close(self) -> None:
        """No call may run. Idempotent."""
        self._word.close()
        if self._process >= 0:
            os.close(self._process)
            self._process = -1

    def __del__(self) -> None:
        if hasattr(self, "_word"):  # it was opened
            self.close()


def _rest(moves: Sequence[Move], moved: int) -> list[Move]:
    """The moves without their first `moved` bytes."""
    out = []
    for local, remote, length in moves:
        done = min(moved, length)
        moved -= done
        if done < length:
            out.append((local + done, remote + done, length - done))
    return out
