"""OtherProcess: reads and writes any memory of another process of this host (process_vm_readv, process_vm_writev).

The kernel copies once, without the other process. It allows this for processes of one user, unless
/proc/sys/kernel/yama/ptrace_scope or a container forbids it. The other process shows a word of proof: 16 random bytes
and a counter at a known address. They are compared before every copy, so that no copy goes to a later process with the
same number.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from struct import Struct
from typing import NamedTuple, Self

from net.errors import TransferError
from net.transfer.common.transport import Op, Unusable

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
IOV_MAX = 1024
WORD = Struct("<16sQ")

Move = tuple[int, int, int]
"""(local address, remote address, bytes)"""


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_CALLS = {Op.READ: _libc.process_vm_readv, Op.WRITE: _libc.process_vm_writev}
for _call in _CALLS.values():
    _call.argtypes = [ctypes.c_int, ctypes.POINTER(_Iovec), ctypes.c_ulong, ctypes.POINTER(_Iovec), ctypes.c_ulong]
    _call.argtypes += [ctypes.c_ulong]
    _call.restype = ctypes.c_ssize_t


class Offer(NamedTuple):
    """How another process finds this one."""

    boot: str
    pid: int
    address: int  # of the word of proof
    proof: str  # hex


class Word:
    """The word of proof of this process."""

    def __init__(self) -> None:
        self._proof = secrets.token_bytes(16)
        self._memory = ctypes.create_string_buffer(WORD.pack(self._proof, 0), WORD.size)
        self.count = 0

    def step(self) -> None:
        """Count a change that others must hear of before their next copy."""
        self.count += 1
        self._memory.raw = WORD.pack(self._proof, self.count)

    def offer(self) -> Offer:
        """Raises OSError if the kernel hides the host's identity."""
        boot = BOOT_ID.read_text().strip()
        return Offer(boot, os.getpid(), ctypes.addressof(self._memory), self._proof.hex())


class OtherProcess:
    """The process of an Offer."""

    def __init__(self, offer: Offer) -> None:
        self._offer = offer
        self._proof = bytes.fromhex(offer.proof)

    @classmethod
    def of(cls, offer: Offer) -> Self:
        """Raises Unusable with the reason."""
        try:
            if BOOT_ID.read_text().strip() != offer.boot:
                raise Unusable("it runs on another host")
        except OSError as error:
            raise Unusable(f"this host hides its identity: {error}") from None
        process = cls(offer)
        try:
            process.count()
        except PermissionError:
            raise Unusable("the kernel forbids it (another user, ptrace_scope, or a container)") from None
        except (OSError, TransferError) as error:
            raise Unusable(f"same host, but its memory is unreachable (another container?): {error}") from None
        return process

    def count(self) -> int:
        """The counter of its word. Raises TransferError if the process has ended, OSError."""
        word = ctypes.create_string_buffer(WORD.size)
        self.move(Op.READ, [(ctypes.addressof(word), self._offer.address, WORD.size)])
        proof, count = WORD.unpack(word.raw)
        if proof != self._proof:
            raise TransferError(f"process {self._offer.pid} is another one by now")
        return int(count)

    def move(self, op: Op, moves: Sequence[Move]) -> None:
        """Copy, after `count`. Any thread may call; the interpreter lock is free meanwhile. Raises OSError, also for an
        address that is not mapped; then some of the bytes may have been copied."""
        for first in range(0, len(moves), IOV_MAX):
            some = moves[first : first + IOV_MAX]
            moved = self._call(op, some)
            while moved < sum(length for _, _, length in some):  # in Linux a call moves less than 2 GiB
                some = _rest(some, moved)
                moved = self._call(op, some)

    def _call(self, op: Op, moves: Sequence[Move]) -> int:
        here = (_Iovec * len(moves))(*[_Iovec(local, length) for local, _, length in moves])
        there = (_Iovec * len(moves))(*[_Iovec(remote, length) for _, remote, length in moves])
        moved: int = _CALLS[op](self._offer.pid, here, len(moves), there, len(moves), 0)
        if moved <= 0:
            error = ctypes.get_errno() if moved < 0 else 14  # EFAULT: nothing is mapped there
            raise OSError(error, f"process {self._offer.pid}: {os.strerror(error)}")
        return moved


def _rest(moves: Sequence[Move], moved: int) -> list[Move]:
    """The moves without their first `moved` bytes."""
    out = []
    for local, remote, length in moves:
        done = min(moved, length)
        moved -= done
        if done < length:
            out.append((local + done, remote + done, length - done))
    return out
